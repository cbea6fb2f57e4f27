"""The mix of domains: exact over every stretch, the same from any ticket on, and told at the start if it cannot be."""

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.base.errors import UserError
from spmd_rl.config.schema import DataConfig
from spmd_rl.data import Prompts
from spmd_rl.data.mix import MAX_PERIOD, Mix
from spmd_rl.types import Message, Prompt

SHARES = {"math": 0.4, "code": 0.3, "general": 0.3}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=9))
def test_every_prefix_has_each_domain_within_one_of_its_share(weights: list[int]) -> None:
    shares = {f"d{i}": weight for i, weight in enumerate(weights)}
    mix, counts = Mix(shares), Counter()
    k, total = len(weights), sum(weights)
    bound = 1 - Fraction(1, max(2 * k - 2, 1))
    for number in range(1, 2 * total + 3):
        domain, place = mix.ticket(number - 1)
        assert place == counts[domain]
        counts[domain] += 1
        for name, weight in shares.items():
            assert abs(counts[name] - Fraction(weight * number, total)) <= bound


def test_the_mix_asked_for_is_exact() -> None:
    mix = Mix(SHARES)
    assert Counter(mix.ticket(t)[0] for t in range(1000)) == {"math": 400, "code": 300, "general": 300}
    assert all(
        Counter(mix.ticket(t)[0] for t in range(s, s + 10)) == {"math": 4, "code": 3, "general": 3} for s in (0, 70)
    )


def test_shares_are_relative_and_their_order_means_nothing() -> None:
    names = lambda shares: [Mix(shares).ticket(t)[0] for t in range(50)]  # noqa: E731
    assert names(SHARES) == names({"general": 3, "math": 4, "code": 3, "none": 0})


def test_thirds_and_many_digits() -> None:
    assert Counter(Mix(dict.fromkeys("abc", 0.333)).ticket(t)[0] for t in range(3)) == {"a": 1, "b": 1, "c": 1}
    assert Mix({"a": 1, "b": MAX_PERIOD - 1}).ticket(5 * MAX_PERIOD)[1] in (5, 5 * (MAX_PERIOD - 1))
    with pytest.raises(UserError, match="data.mix: .*use fewer digits"):
        Mix({"a": 0.1234567, "b": 0.5})


def prompts(mix: dict[str, float] | None = None, **sizes: int) -> Prompts:
    made = [
        Prompt(f"{name}{i}", (Message("user", f"{name}{i}"),), name, "") for name in sizes for i in range(sizes[name])
    ]
    return Prompts(made, mix=mix)


def test_each_domain_is_dealt_in_epochs_of_its_own() -> None:
    dealt = [prompts(SHARES, math=8, code=30, general=5).ticket(t, seed=3) for t in range(100)]
    assert Counter(prompt.domain for _, prompt in dealt) == {"math": 40, "code": 30, "general": 30}
    for domain, size in (("math", 8), ("code", 30), ("general", 5)):
        mine = [(epoch, prompt.id) for epoch, prompt in dealt if prompt.domain == domain]
        assert [epoch for epoch, _ in mine] == [i // size for i in range(len(mine))]
        assert len(set(mine)) == len(mine)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=30))
def test_a_mixed_ticket_is_a_function_of_its_number_alone(tickets: list[int]) -> None:
    whole = prompts(SHARES, math=8, code=3, general=5)
    assert [whole.ticket(t, 1) for t in tickets] == [
        prompts(SHARES, math=8, code=3, general=5).ticket(t, 1) for t in tickets
    ]


def test_a_share_of_nothing_leaves_a_domain_out() -> None:
    left = prompts({"math": 1, "code": 0}, math=3, code=4)
    assert {p.domain for p in left.train} == {"math"} and left.ticket(10**6, 0)[1].domain == "math"


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ({"math": 1}, "data.mix: prompts have domain 'code', which has no share; 0 leaves them out"),
        ({"math": 1, "code": 1, "art": 1}, "data.mix.art: no training prompt has this domain (there are: code, math)"),
    ],
)
def test_a_mix_that_does_not_fit_the_prompts_is_told_at_the_start(mix: dict[str, float], message: str) -> None:
    with pytest.raises(UserError) as caught:
        prompts(mix, math=2, code=2)
    assert str(caught.value) == message


@pytest.mark.parametrize("mix", [{"a": -1}, {"a": 0}, {"a": float("inf")}, {"a": float("nan")}])
def test_shares_are_numbers_from_zero(mix: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="mix"):
        DataConfig(mix=mix)


def test_tags_get_their_domain_by_name_and_never_by_default(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{tag}{i}", "ground_truth": "1", "tag": tag} for tag in ("deepmath_103k", "RLVR") for i in range(4)
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = Prompts.load(DataConfig(train=str(path), holdout=1e-9))
    assert {p.domain for p in plain.train} == {"deepmath_103k", "RLVR"}
    named = DataConfig(
        train=str(path),
        holdout=1e-9,
        domains={"deepmath_103k": "math", "RLVR": "general"},
        mix={"math": 1, "general": 3},
    )
    mixed = Prompts.load(named)
    assert Counter(mixed.ticket(t, 0)[1].domain for t in range(40)) == {"math": 10, "general": 30}
    assert mixed.train[0].extra["tag"] == "deepmath_103k"
    with pytest.raises(UserError, match="data.domains: no row has the domain or tag 'RLVRR'"):
        Prompts.load(DataConfig(train=str(path), domains={"RLVRR": "general"}))
