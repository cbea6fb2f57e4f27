"""Right answers of every shape score one; rows that need more than plain values are known as such, and left out."""

import pytest

from rewards.code import CodeReward
from spmd_rl.types import UNPROVEN, Prompt
from tests.unit.sandbox.cases import FOLDER, INFO, right_answers, rows

FILES = sorted(path.stem for path in (FOLDER / "right").glob("*.txt"))
BEYOND = rows("beyond", "1", gold=True)


def right(name: str) -> list:
    return right_answers() if name == "table" else rows(f"right/{name}", "1")


@pytest.mark.parametrize("name", ["table", *FILES])
def test_right_answers(sampled, name):
    sandbox, every = sampled
    reward = CodeReward(sandbox, total_seconds=60.0)
    cases = {case.id: case for case in right(name)[::every]}
    found = {name: case.judge(reward) for name, case in cases.items()}
    off = {name: verdict for name, verdict in found.items() if verdict[0] not in cases[name].expect}
    without = {"right/stdin/scratch-file"} if sandbox.name == "forkserver-unmounted" else set()
    assert off.keys() == without & found.keys(), off


def test_rows_that_need_more_are_unsupported_or_unproven(sampled):
    """A row's right answer is never a zero: it is no score, or with `unproven` one that says so."""
    sandbox, every = sampled
    strict, beside = (CodeReward(sandbox, total_seconds=60.0, unproven=unproven) for unproven in (False, True))
    for case in BEYOND[::every]:
        prompt = Prompt(case.id, (), "code", "", case.extra)
        assert strict.unsupported(prompt) and not beside.unsupported(prompt), case.id
        assert strict.score(prompt, case.answer, INFO).status == "unsupported", case.id
        verdict = beside.score(prompt, case.answer, INFO)
        assert verdict.parts.get(UNPROVEN) == 1.0 and verdict.scored, (case.id, verdict)
        assert verdict.score == 1.0 or sandbox.name == "forkserver-unmounted", (case.id, verdict)


def test_there_are_many():
    ids = [case.id for name in ("table", *FILES) for case in right(name)]
    assert len(set(ids)) == len(ids) > 300 and len(BEYOND) > 20
