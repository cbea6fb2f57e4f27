"""With split placement, each kind of rank is killed or stopped in each phase; nobody but the ranks themselves notices.

Two ranks train (0 and 1) and two generate (2 and 3), without an agent. A killed run, typed again, ends bitwise where an
undisturbed one ends; one in which a rank stops ends soon and says where, what the others wait for, and who is missing.
"""

import signal
from collections.abc import Callable

import pytest
import torch

from tests.e2e import strikes
from tests.e2e.runs import EXACT, Running, Toy
from tests.e2e.strikes import MEETING, POINTS, SOON, ended_soon, reported

pytestmark = pytest.mark.slow
SETTINGS = (*strikes.SETTINGS, *EXACT, "placement.mode=split", "placement.max_staleness=0")
TRAIN = POINTS | MEETING | {"generate": "enter generate", "eval": "enter eval"}
"""Where a training rank is struck: in `generate` and `eval` it waits for those that generate."""
VICTIMS = ("rank-0", "rank-1", "rank-2", "rank-3")
"""The first training rank and another one, the first generating rank and another one."""
CASES = [(victim, phase) for victim in VICTIMS for phase in TRAIN]


@pytest.fixture(scope="module")
def straight(toy: Toy) -> Running:
    return toy.run(*SETTINGS, ranks=4, name="straight")


def strike(toy: Toy, victim: str, phase: str, how: signal.Signals) -> Running:
    """A run whose victim was struck in the phase; one that generates from `prepare` on while rank 0 is there."""
    generates = victim >= "rank-2"
    watched = 0 if generates and phase in ("prepare", "update", "save") else int(victim[-1])
    return strikes.strike(toy, SETTINGS, victim, phase, how, (POINTS | MEETING if generates else TRAIN)[phase], watched)


@pytest.mark.parametrize(("victim", "phase"), CASES)
def test_a_killed_run_continues_as_if_nothing_had_happened(
    toy: Toy, straight: Running, victim: str, phase: str, record_property: Callable
) -> None:
    # With rank 0 dies the sidecar, which the ranks that generate ask again for half a minute: their verdicts may come.
    within = 45 if victim == "rank-0" and phase in ("generate", "eval") else SOON
    said = ended_soon(strike(toy, victim, phase, signal.SIGKILL), record_property, within)
    record_property("said", said[-1500:])
    run = toy.run(*SETTINGS, ranks=4, name=f"{victim}-{phase}-SIGKILL")
    ours, theirs = run.weights(3), straight.weights(3)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert [line["step"] for line in run.metrics()] == [0, 1, 2, 3]
    for step in (1, 2, 3):
        assert run.samples(step) == straight.samples(step)
    for key in ("critic/score/mean", "actor/grad_norm", "val/score/mean"):
        assert [line.get(key) for line in run.metrics()] == [line.get(key) for line in straight.metrics()]


START, PUBLISH = ["start: prompt lengths"], ["publish: bucket", "publish: bytes of a bucket", "publish: weights"]
OF_TRAINING = {
    "start": START,
    "publish": PUBLISH,
    "generate": ["train: meeting: hand over"],
    "hand-over": ["hand over: sizes"],
    "eval": ["train: meeting: eval"],
    "prepare": ["train: prepare: samples"],
    "update": ["train: update: backward of micro-batch 1/1"],
    "save": ["train: save: policy"],
}
OF_GENERATING = {
    "start": START,
    "publish": PUBLISH,
    # The other generator rank may have answered the whole evaluation, whose hand over is then the next meeting.
    "generate": ["generate: step 2 from generator ranks", "train: meeting: hand over", "hand over: sizes"],
    "hand-over": ["hand over: sizes"],
    "eval": ["eval: answers from generator ranks", "train: meeting: eval"],
    "prepare": PUBLISH,
    "update": PUBLISH,
    "save": ["generate: step 3 from generator ranks", "train: meeting: hand over"],
}
"""What the others wait for, by the side of the victim: whichever of them is reported."""


@pytest.mark.parametrize(("victim", "phase"), CASES)
def test_a_stopped_rank_is_named_with_what_the_others_wait_for(
    toy: Toy, victim: str, phase: str, record_property: Callable
) -> None:
    run = strike(toy, victim, phase, signal.SIGSTOP)
    ended_soon(run, record_property)
    waits = reported(run, victim, record_property)
    assert waits in (OF_TRAINING if victim < "rank-2" else OF_GENERATING)[phase]
