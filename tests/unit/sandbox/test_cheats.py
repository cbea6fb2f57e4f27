"""Answers that pass no honest test get no reward, whatever they do; and tests that ask nothing are at fault."""

import pytest

from rewards.code import CodeReward
from tests.unit.sandbox.cases import Case, cheats, rows, table

ROWS = {"never": "error|0", "rows": "0|error", "stdin_cheats": "0"}
PARTS = 4


def judged(sandbox, chosen: list[Case]) -> None:
    reward = CodeReward(sandbox, seconds=2, total_seconds=20.0)
    found = [(case, *case.judge(reward)) for case in chosen]
    print(table((case, verdict) for case, verdict, _ in found))
    assert not {case.id: (verdict, why) for case, verdict, why in found if verdict not in case.expect}


@pytest.mark.parametrize("part", range(PARTS))
def test_cheats_in_turns(sampled, part):
    """A sample has each cheat in one shape; where all is run, in several."""
    sandbox, every = sampled
    judged(sandbox, cheats(3 if every == 1 else 1)[part :: PARTS * max(1, every // 2)])


@pytest.mark.parametrize("name", ROWS)
def test_cheats_of_rows_of_their_own(sampled, name):
    sandbox, every = sampled
    judged(sandbox, rows(name, ROWS[name])[::every])


def test_there_are_some_in_every_shape_and_of_every_family():
    asked = cheats(3)
    assert len({case.answer for case in asked}) > 150 and len({case.kind[1] for case in asked}) > 10
