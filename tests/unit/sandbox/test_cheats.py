"""Answers that pass no honest test get no reward, whatever they do; and tests that ask nothing are at fault."""

import pytest

from rewards.code import CodeReward
from tests.unit.sandbox.cases import Case, cheats, read, rows, table

ROWS = {"never": "error|0", **dict.fromkeys(("outside", "second", "third", "fourth"), "0|error")}
ROWS |= dict.fromkeys(("objects", "stdin_cheats", "aliases", "callbacks", "faults", "iterators"), "0")
PARTS = 8
SHAPES_EACH = 3
"""So many shapes has each cheat of the table where all is run, three times each."""


def judged(sandbox, chosen: list[Case]) -> list[tuple[Case, str]]:
    reward = CodeReward(sandbox, seconds=2, total_seconds=20.0)
    found = [(case, *case.judge(reward)) for case in chosen]
    assert not {case.id: (verdict, why) for case, verdict, why in found if verdict not in case.expect}
    return [(case, verdict) for case, verdict, _ in found]


@pytest.mark.parametrize("part", range(PARTS))
def test_cheats_in_turns(sampled, part):
    """A sample has each cheat in one shape; where all is run, three times in several."""
    sandbox, every = sampled
    chosen = cheats(SHAPES_EACH if every == 1 else 1)[part :: PARTS * max(1, every // 2)]
    for _ in range(3 if every == 1 else 1):
        found = judged(sandbox, chosen)
    print(table(found))


@pytest.mark.parametrize("name", ROWS)
def test_cheats_of_rows_of_their_own(sampled, name):
    sandbox, every = sampled
    for _ in range(3 if every == 1 else 1):
        judged(sandbox, rows(name, ROWS[name])[::every])


def test_there_are_many_in_every_shape_and_of_every_family():
    asked = cheats(SHAPES_EACH)
    assert len(asked) > 600 and len({case.answer for case in asked}) > 500
    assert len({case.kind[0] for case in asked}) == len(read("shapes")) and len({case.kind[1] for case in asked}) > 10
