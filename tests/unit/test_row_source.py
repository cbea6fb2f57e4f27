"""Rows of a step as samples: their order, what is too long, what a frozen model and a margin leave on them."""

import json
from array import array
from pathlib import Path

import numpy as np
import pytest

from spmd_rl.base.errors import UserError
from spmd_rl.config.sections.preference import PairsConfig
from spmd_rl.config.sections.rows import RowsConfig, ValidationConfig
from spmd_rl.data import Examples
from spmd_rl.distributed.solo import solo
from spmd_rl.rollout import RowSource
from spmd_rl.rollout.row_source import CHOSEN, MISMATCHED, REJECTED, num_empty
from spmd_rl.types import Conversation

ROWS = [{"prompt": f"p{n}", "completion": "x" * n} for n in range(1, 8)]
PAIRS = [
    {"prompt": "a", "chosen": "yes", "rejected": "no", "margin": 2},
    {"prompt": "b", "completion": "good", "label": True},
    {"prompt": "c", "completion": "bad", "label": False},
]


def render(conversation: Conversation) -> list[tuple[array, array]]:
    """A token for each character."""
    first, last = conversation.messages[0], conversation.messages[-1]
    return [(array("i", map(ord, first.text)), array("i", map(ord, last.text)))]


def source(world, tmp_path: Path, rows: list[dict], data=RowsConfig, kind="demonstration", **how) -> RowSource:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = data(train=str(path), holdout=0.0, rows_per_step=3, **how.pop("settings", {}))
    return RowSource(Examples.load(settings, kind), settings, ValidationConfig(), render, world, 0, **how)


def texts(collected) -> dict[int, list[str]]:
    """Ticket -> what is learnt of its samples."""
    return {
        group.ticket: ["".join(map(chr, sample.turns[0].token_ids)) for sample in group.samples]
        for group in collected.groups
    }


def test_steps_go_through_the_rows_and_end_in_the_middle_of_one(tmp_path: Path) -> None:
    with solo() as world:
        rows = source(world, tmp_path, ROWS, num_rows=10)
        steps = [rows.collect(step) for step in (1, 2, 3, 4)]
        assert [list(texts(one)) for one in steps] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
        found = [text for one in steps for (text,) in texts(one).values()]
        assert sorted(found[:7]) == [row["completion"] for row in ROWS] and len(set(found[7:])) == 3
        assert rows.metrics(steps[3])["data/epoch"] == pytest.approx(10 / 7)
        again = source(world, tmp_path, ROWS, num_rows=10)
        again.load_state(rows.state())
        assert texts(again.collect(3)) == texts(steps[2])


@pytest.mark.parametrize(("what", "longest", "dropped"), [("drop", 3, 4), ("cut", 3, 0)])
def test_what_is_too_long_is_left_out_or_cut(what: str, longest: int, dropped: int, tmp_path: Path) -> None:
    with solo() as world:
        rows = source(world, tmp_path, ROWS, settings={"max_tokens": 5, "overlong": what})
        steps = [rows.collect(step) for step in (1, 2, 3)]
        found = {ticket: text for one in steps for ticket, text in texts(one).items() if ticket < 7}
        assert max(len(text[0]) for text in found.values() if text) == longest
        assert sum(not text for text in found.values()) == dropped
        assert sum(rows.metrics(one)["data/overlong"] for one in steps[:2]) == sum(not found[n] for n in range(6))


def test_too_long_may_be_an_error_that_names_the_row(tmp_path: Path) -> None:
    with solo() as world, pytest.raises(UserError, match=r"data.max_tokens=5: .*rows.jsonl:[4-7] has \d+ tokens"):
        rows = source(world, tmp_path, ROWS, settings={"max_tokens": 5, "overlong": "error"})
        [rows.collect(step) for step in (1, 2, 3)]


def test_sides_of_pairs_and_votes(tmp_path: Path) -> None:
    with solo() as world:
        rows = source(world, tmp_path, PAIRS, PairsConfig, "judged", mismatched=True)
        rows.reference = {"train": np.array([[-1, -2, -3], [-4, 0, -5], [0, -6, -7]], np.float32)}
        found = {
            "".join(map(chr, group.samples[0].turns[0].prompt_ids)): {
                sample.answer: ("".join(map(chr, sample.turns[0].token_ids)), sample.targets)
                for sample in group.samples
            }
            for group in rows.collect(1).groups
        }
    assert found == {
        "a": {CHOSEN: ("yes", (-1,)), REJECTED: ("no", (-2,)), MISMATCHED: ("good", (-3,))},
        "b": {CHOSEN: ("good", (-4,)), MISMATCHED: ("bad", (-5,))},
        "c": {REJECTED: ("bad", (-6,)), MISMATCHED: ("yes", (-7,))},
    }


def test_a_margin_is_the_target_of_the_chosen_answer(tmp_path: Path) -> None:
    with solo() as world:
        (group,) = source(world, tmp_path, PAIRS[:1], PairsConfig, "ranked").collect(1).groups[:1]
    assert [sample.targets for sample in group.samples] == [(2,), ()]
    assert not any(any(sample.turns[0].logprobs) for sample in group.samples)


@pytest.mark.parametrize(
    ("prompts", "others"),
    [
        ("abcd", {"a": "1", "b": "2", "c": "3", "d": "0"}),
        ("aabb", {"a": "23", "b": "01"}),
        ("aaabb", {"a": "334", "b": "12"}),
    ],
)
def test_a_prompt_is_compared_with_answers_to_others(prompts: str, others: dict[str, str], tmp_path: Path) -> None:
    rows = [{"prompt": p, "completion": str(n), "label": True} for n, p in enumerate(prompts)]
    with solo() as world:
        settings = {"eval": str(tmp_path / "rows.jsonl")}
        found = source(world, tmp_path, rows, PairsConfig, "judged", mismatched=True, settings=settings)
        groups = [group for one in found.held_out(0, 0) for group in one.groups]
    compared: dict[str, str] = {}
    for group in groups:
        own, other = group.samples
        prompt = "".join(map(chr, own.turns[0].prompt_ids))
        compared[prompt] = compared.get(prompt, "") + "".join(map(chr, other.turns[0].token_ids))
    assert {prompt: "".join(sorted(answers)) for prompt, answers in compared.items()} == others


def test_held_out_rows_that_are_too_long_are_counted(tmp_path: Path, capsys) -> None:
    with solo() as world:
        settings = {"eval": str(tmp_path / "rows.jsonl"), "max_tokens": 5}
        rows = source(world, tmp_path, ROWS, settings=settings)
        counts = [[num_empty(one) for one in rows.held_out(0, 0)] for _ in range(2)]
    assert counts == [[0, 3, 1]] * 2
    assert capsys.readouterr().err.count("warning: 4 of 7 held-out rows are left out of val/*") == 1
