"""WebShop's reward: numbers worked by hand, and 200 purchases that are built to have a known number."""

import random
from dataclasses import replace

import pytest

from envs.webshop_score import Goal, Product, plain_color, score, title_nouns, token_set_ratio, type_score

SHOE = Product(
    "B000000001",
    "Velora Summit Breathable Running Shoes",
    "running shoes",
    ("Clothing", "Shoes", "Athletic"),
    ("breathable mesh", "rubber sole"),
    {"color": ("black", "navy blue"), "size": ("small", "large")},
    40.0,
    ("Made with arch support.",),
    "These shoes dry quickly: quick drying.",
)
GOAL = Goal("", SHOE, ("rubber sole", "arch support"), {"color": "blue", "size": "large"}, 50.0)
OTHER = replace(SHOE, query="trail", category=("Clothing",), attributes=(), features=(), description="", price=60.0)


@pytest.mark.parametrize(
    ("bought", "chosen", "worth"),
    [
        # (2 attributes + 2 options + price) / 5
        (SHOE, {"color": "navy blue", "size": "large"}, 1.0),
        (SHOE, {"color": "black", "size": "large"}, 4 / 5),
        (SHOE, {"size": "small"}, 3 / 5),
        (SHOE, {}, 3 / 5),
        (replace(SHOE, price=50.0), {}, 3 / 5),
        (replace(SHOE, price=50.01), {}, 2 / 5),
        (replace(SHOE, features=()), {}, 2 / 5),
        (replace(SHOE, attributes=("sole of rubber",)), {}, 3 / 5),  # the same words and one more
        # all nouns shared, nothing else
        (OTHER, {}, 0.0),
        (replace(OTHER, price=10.0), {"color": "blue"}, 2 / 5),
        # nouns wanted: velora summit shoes; one of three is above a fifth
        (replace(OTHER, title="Shoes", price=10.0), {}, 1 / 5),
        # none of them: nothing, even with everything else right
        (replace(SHOE, title="Hat"), {"color": "blue", "size": "large"}, 0.0),
    ],
)
def test_numbers_worked_by_hand(bought: Product, chosen: dict[str, str], worth: float) -> None:
    assert score(bought, chosen, GOAL) == pytest.approx(worth, abs=1e-12)


def test_the_kinds_of_type() -> None:
    """Twenty wanted nouns: 1 shared is 0.05, 2 are a tenth, 4 a fifth, 5 above it."""
    nouns = [f"noun{chr(97 + i)}" for i in range(20)]
    wanted = replace(SHOE, title=" ".join(nouns), query="one", category=("a", "b", "c"))
    for shared, query, category, expected in [
        (0, "one", ("a", "b", "c"), 0.0),
        (1, "one", ("a", "b", "c"), 0.1),
        (2, "two", ("a", "x", "y"), 0.5),
        (2, "two", ("a", "b", "y"), 1.0),
        (2, "one", ("x",), 1.0),
        (4, "two", ("x",), 0.5),
        (5, "two", ("x",), 1.0),
    ]:
        bought = replace(SHOE, title=" ".join([*nouns[:shared], "else"]), query=query, category=category)
        assert type_score(bought, wanted) == expected, (shared, query, category)


def test_no_noun_in_what_is_wanted_is_half_unless_something_else_agrees() -> None:
    wanted = replace(SHOE, title="breathable", query="one", category=("a",))
    assert type_score(replace(SHOE, query="two"), wanted) == 0.5
    assert type_score(replace(SHOE, query="one"), wanted) == 1.0


def test_two_hundred_purchases_against_the_formula() -> None:
    """Each is built from what it shall have; the number follows from the paper's formula alone."""
    rng = random.Random(7)
    words = ["alpha", "bravo", "chrome", "drift", "exotic", "fuzzy", "gamma", "hollow", "icy", "jumbo"]
    for _ in range(200):
        wishes = rng.sample(words, rng.randrange(1, 5))
        had = [rng.random() < 0.6 for _ in wishes]
        places = [rng.choice(("list", "title", "features", "description")) for _ in wishes]
        texts = {place: [w for w, h, p in zip(wishes, had, places) if h and p == place] for place in places}
        options = dict(zip(("size", "style", "pack"), ("huge", "round", "dozen")[: rng.randrange(0, 4)]))
        right = {name: rng.random() < 0.5 for name in options}
        bound, price = 30.0, rng.choice((29.99, 30.0, 30.01))
        shared, same_query, parts = rng.randrange(0, 4), rng.random() < 0.5, rng.randrange(0, 4)
        nouns = [f"thing{chr(97 + i)}" for i in range(15)]  # 0, 1/15 < 0.1, 2/15 < 0.2, 3/15 = 0.2
        wanted = replace(SHOE, title=" ".join(nouns), query="q", category=("a", "b", "c"))
        bought = Product(
            "B000000002",
            " ".join([*nouns[:shared], *texts.get("title", ())]),
            "q" if same_query else "r",
            (*"abc"[:parts], "z"),
            tuple(texts.get("list", ())),
            {},
            price,
            tuple(texts.get("features", ())),
            " ".join(texts.get("description", ())),
        )
        chosen = {name: value if right[name] else "wrong" for name, value in options.items()}
        worth = score(bought, chosen, Goal("", wanted, tuple(wishes), options, bound))
        r_type = {0: 0.0, 1: 0.1}.get(shared, 1.0 if same_query or parts >= 2 else 0.5)
        number = sum(had) + sum(right.values()) + (price <= bound)
        assert worth == pytest.approx(r_type * number / (len(wishes) + len(options) + 1), abs=1e-12)


def test_colors_and_nouns() -> None:
    assert [plain_color(text) for text in ("navy blue", "light pink", "large")] == ["blue", "pink", "large"]
    assert title_nouns("A Breathable Running Shoe for Men, 2 Pack") == {"shoe", "men", "pack"}


@pytest.mark.parametrize(
    ("left", "right", "ratio"),
    [
        ("machine wash", "machine washable", 86),  # "machine" shared; `wash` and `washable` as texts
        ("rubber sole", "sole of Rubber!", 100),
        ("free", "sugar free", 100),
        ("red", "blue", 29),
        ("", "x", 0),
    ],
)
def test_token_set_ratio(left: str, right: str, ratio: int) -> None:
    assert token_set_ratio(left, right) == token_set_ratio(right, left) == ratio


def test_token_set_ratio_against_another_implementation() -> None:
    fuzz = pytest.importorskip("rapidfuzz.fuzz")
    utils = pytest.importorskip("rapidfuzz.utils")
    rng = random.Random(3)
    words = ["wash", "washable", "machine", "free", "sugar", "steel", "steal", "x", "12"]
    for _ in range(300):
        left, right = (" ".join(rng.choices(words, k=rng.randrange(0, 4))) for _ in range(2))
        known = fuzz.token_set_ratio(left, right, processor=utils.default_process)
        assert token_set_ratio(left, right) == round(known), (left, right)
