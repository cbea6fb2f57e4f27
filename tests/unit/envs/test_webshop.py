"""WebShop: the shop, its pages, and the three numbers that must not be mixed up."""

import re

import pytest

from envs.webshop import WebShopEnv
from envs.webshop_catalogue import open_shop
from envs.webshop_score import ALIKE, plain_color, score, token_set_ratio

SHOP = open_shop(0, 1000)


def visit(seed: int, split: str = "test", **kwargs):
    env = WebShopEnv(split=split, **kwargs)
    return env, SHOP.split(split)[seed], env.reset(seed)


def buy(env: WebShopEnv, goal, options: dict[str, str]):
    env.step(f"search[{goal.product.title}]")
    env.step(f"click[{goal.product.asin}]")
    for value in options.values():
        env.step(f"click[{value}]")
    return env.step("click[Buy Now]")


def test_every_wish_can_be_met_and_the_parts_are_those_of_the_paper() -> None:
    assert len(SHOP.products) == 1000
    assert len(SHOP.split("test")) == 500 and len(SHOP.split("dev")) == 1000
    assert len(SHOP.split("train")) == len(SHOP.goals) - 1500 > 4000
    assert SHOP.split("test") + SHOP.split("dev") + SHOP.split("train") == SHOP.split("all") == SHOP.goals
    assert {score(goal.product, goal.options, goal) for goal in SHOP.goals[::7]} == {1.0}
    assert all(goal.price_upper > goal.product.price for goal in SHOP.goals)
    assert len({goal.instruction + goal.product.asin for goal in SHOP.goals}) == len(SHOP.goals)


def test_no_two_choices_of_an_option_are_taken_for_each_other() -> None:
    pairs = {(a, b) for p in SHOP.products for values in p.options.values() for a in values for b in values if a < b}
    assert pairs and all(token_set_ratio(plain_color(a), plain_color(b)) <= ALIKE for a, b in pairs)


def test_a_perfect_purchase() -> None:
    env, goal, (observation, info) = visit(11)
    assert observation.startswith(
        f"WebShop [SEP] Instruction: [SEP] {goal.instruction} [SEP] Search\nAvailable actions: "
    )
    assert "search[" in info["instruction"]
    text, reward, terminated, truncated, info = buy(env, goal, goal.options)
    assert (reward, terminated, truncated) == (1.0, True, False) and "Thank you" in text
    assert info["metrics"]["success"] == 1.0 and info["metrics"]["task_score"] == 100.0
    assert info["metrics"]["purchase"] == 1.0


@pytest.mark.parametrize("strict", [False, True])
def test_a_purchase_is_no_success_by_itself(strict: bool) -> None:
    seed = next(i for i, goal in enumerate(SHOP.split("test")) if goal.options)
    env, goal, _ = visit(seed, strict=strict)
    _, reward, terminated, _, info = buy(env, goal, {})
    worth = (len(goal.attributes) + 1) / (len(goal.attributes) + len(goal.options) + 1)
    assert terminated and reward == (0.0 if strict else pytest.approx(worth))
    assert info["metrics"]["success"] == 0.0 and info["metrics"]["purchase"] == 1.0
    assert info["metrics"]["task_score"] == pytest.approx(100 * worth)
    assert info["metrics_agg_mode"] == {"success": "last", "task_score": "last", "purchase": "last"}


def test_pages_forth_and_back() -> None:
    env, goal, (first, _) = visit(2)
    query = goal.product.query
    results, _, _, _, info = env.step(f"search[{query} for gifts]")
    assert "Page 1 (Total results: 50)" in results and "Next >" in results and "< Prev" not in results
    assert info["metrics"] == {
        "success": 0.0,
        "task_score": 0.0,
        "purchase": 0.0,
        "action_is_valid": 1.0,
        "action_is_effective": 1.0,
    }
    asins = re.findall(r"click\[(b0\w{8})\]", results)
    assert len(asins) == 10
    for page in range(2, 6):
        text = env.step("click[next >]")[0]
        assert f"Page {page} " in text
        asins += re.findall(r"click\[(b0\w{8})\]", text)
    assert len(set(asins)) == 50 and "Next >" not in text and "click[next >]" not in text
    assert "Page 4 " in env.step("click[< Prev]")[0]
    item = env.step(f"click[{asins[33]}]")[0]
    assert "Price: $" in item and "click[buy now]" in item
    for detail in ("description", "features", "reviews"):
        assert "click[buy now]" not in env.step(f"click[{detail}]")[0]
        assert env.step("click[< prev]")[0] == item
    assert "Page 4 " in env.step("click[< prev]")[0]
    assert env.step("click[back to search]")[0] == first


def test_what_the_page_does_not_offer_changes_nothing() -> None:
    env, _, (first, _) = visit(0)
    for action in (
        "",
        "buy now",
        "click[buy now]",
        "search[]",
        "click[]",
        "buy[it]",
        "search[a] search[b]x",
        "click[x",
    ):
        text, reward, terminated, truncated, info = env.step(action)
        assert (text, reward, terminated, truncated) == (first, 0.0, False, False), action
        assert info["metrics"]["action_is_valid"] == info["metrics"]["action_is_effective"] == 0.0, action
    env.step("search[lamp]")
    assert env.step("search[lamp]")[4]["metrics"]["action_is_valid"] == 0.0  # there is no search bar on this page
    nothing = visit(0)[0].step("search[zzzz]")[0]
    assert "Total results: 0" in nothing and "Available actions: click[back to search]" in nothing


def test_a_choice_shows_replaces_and_is_forgotten_at_another_item() -> None:
    seed = next(i for i, goal in enumerate(SHOP.split("test")) if len(goal.options) == 2)
    env, goal, _ = visit(seed)
    env.step(f"search[{goal.product.title}]")
    plain = env.step(f"click[{goal.product.asin}]")
    name, values = next(iter(goal.product.options.items()))
    first = env.step(f"click[{values[0]}]")
    assert first[0] != plain[0] and f"You have clicked {values[0]}." in first[0]
    again = env.step(f"click[{values[0].upper()}]")
    assert again[4]["metrics"]["action_is_valid"] == 1.0 and again[4]["metrics"]["action_is_effective"] == 0.0
    second = env.step(f"click[{values[1]}]")
    assert f"clicked {values[0]}." not in second[0] and second[4]["state_key"] != first[4]["state_key"]
    env.step("click[< prev]")
    assert env.step(f"click[{goal.product.asin}]")[0] == plain[0]


def test_seeds_choose_the_wish_and_instances_do_not_disturb_each_other() -> None:
    one, two = WebShopEnv("dev"), WebShopEnv("dev")
    assert one.reset(1003)[0] == two.reset(3)[0] != two.reset(4)[0]
    one.step("search[tea]")
    assert "WebShop [SEP]" in two.step("nonsense")[0]
    assert SHOP.goals[500].instruction in WebShopEnv("dev").reset(0)[0]
    with pytest.raises(ValueError, match=r"split=valid: known are test, dev, train, all"):
        WebShopEnv("valid")
    with pytest.raises(ValueError, match="raise products"):
        WebShopEnv("train", products=10)
