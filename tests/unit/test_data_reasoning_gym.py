"""Entries of reasoning-gym as plain JSON: what the rewarder gets must judge as the generator's own item does."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec
import numpy as np
import pytest
from reasoning_gym.factory import DATASETS, get_score_answer_fn

from spmd_rl.base.errors import UserError
from spmd_rl.data.fields import plain
from spmd_rl.data.reasoning_gym import generate

UNSUPPORTED = {"arc_agi", "rearc", "composite"}  # composite has no problems of its own
SLOW = {"knight_swap", "sudoku", "rush_hour"}


def is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return type(value) is dict and all(type(k) is str and is_plain(v) for k, v in value.items())
    if isinstance(value, list):
        return all(is_plain(v) for v in value)
    return value is None or type(value) in (str, int, float, bool)


def test_plain() -> None:
    class Colour(Enum):
        RED = 1

    value = {
        "text": np.str_("a"),
        "numbers": (np.int64(1), np.float64(0.5), np.bool_(True), 2**64, -(2**63)),
        "array": np.arange(4).reshape(2, 2),
        3: {"b", "a"},
        "other": Colour.RED,
        "none": None,
    }
    out = plain(value)
    assert is_plain(out)
    assert out["numbers"] == [1, 0.5, True, str(2**64), -(2**63)] and out["array"] == [[0, 1], [2, 3]]
    assert out["text"] == "a" and out["3"] == ["a", "b"] and out["other"] == "Colour.RED"


@pytest.mark.parametrize("task", sorted(set(DATASETS) - UNSUPPORTED - SLOW))
def test_every_task_keeps_its_scorer(task: str) -> None:
    (row,) = generate(task, 1, 1, {}, "data.train")
    entry = row.extra["entry"]
    assert is_plain(entry) and entry == msgspec.msgpack.decode(msgspec.msgpack.encode(entry))
    assert row.domain == "reasoning_gym" and row.extra["task"] == task and row.problem
    if entry["answer"] is not None:
        assert get_score_answer_fn(task)(entry["answer"], entry) == 1  # as the rewarder does it: without the dataset


@pytest.mark.parametrize("task", ["arc_agi", "rearc"])
def test_tasks_that_need_more_than_json_are_refused(task: str) -> None:
    with pytest.raises(UserError, match="not supported"):
        list(generate(task, 1, 0, {}, "data.train"))
