"""With lent ranks, each kind of rank is killed or stopped in each phase; nobody but the ranks themselves notices.

Ranks 0 and 1 train and generate, 2 and 3 do nothing but generate. What a killed run had begun is begun again, so that
it does not end bitwise where an undisturbed one does; but each ticket is used once, and no token is too old.
"""

import signal
from collections.abc import Callable

import pytest

from tests.e2e import strikes
from tests.e2e.runs import Running, Toy
from tests.e2e.strikes import MEETING, POINTS, SOON, ended_soon, reported
from tests.e2e.test_lent import assert_bounded

pytestmark = pytest.mark.slow
SETTINGS = (
    *strikes.SETTINGS,
    "steps=4",
    "placement.mode=lent",
    "rollout.partial_rollout=true",
    "rollout.over_sample=4",
    "engine.max_running=4",
)
VICTIMS = ("rank-0", "rank-1", "rank-2")
"""The first training rank and another one, and one that only generates."""
CASES = [(victim, phase) for victim in VICTIMS for phase in POINTS | MEETING]


def strike(toy: Toy, victim: str, phase: str, how: signal.Signals) -> Running:
    """A run whose victim was struck in the phase; one that only generates while rank 0 trains."""
    watched = 0 if victim == "rank-2" and phase in ("eval", "prepare", "update", "save") else int(victim[-1])
    step = 1 if phase == "generate" else 2  # from the second step on the others may have generated all of it
    return strikes.strike(toy, SETTINGS, victim, phase, how, (POINTS | MEETING)[phase], watched, step)


@pytest.mark.parametrize(("victim", "phase"), CASES)
def test_a_killed_run_goes_on_and_keeps_the_bound(toy: Toy, victim: str, phase: str, record_property: Callable) -> None:
    # With rank 0 dies the sidecar, which the others ask again for half a minute: their verdicts may come.
    within = 45 if victim == "rank-0" and phase in ("generate", "eval") else SOON
    ended_soon(strike(toy, victim, phase, signal.SIGKILL), record_property, within)
    assert_bounded(toy.run(*SETTINGS, ranks=4, name=f"{victim}-{phase}-SIGKILL"))


PUBLISH = ["publish: bucket", "publish: bytes of a bucket", "publish: weights"]
WAITS = {
    "start": ["start: prompt lengths"],
    "publish": PUBLISH,
    "generate": ["train: meeting: hand over", "generate: step 1 from generator ranks", "generate: end of step"],
    "hand-over": ["hand over: sizes"],
    "eval": ["train: meeting: eval", "eval: answers from generator ranks"],
    "prepare": ["train: prepare: samples"],
    "update": ["train: update: backward of micro-batch 1/1"],
    "save": ["train: save: policy"],
}
"""What the others wait for where a rank stands still that trains: whichever of them is reported."""
OF_GENERATING = [
    *PUBLISH,
    *WAITS["generate"],
    *WAITS["hand-over"],
    *WAITS["eval"],
    "hand over: reports",
    "generate: step 3 from generator ranks",
]
"""The same of one that only generates."""


@pytest.mark.parametrize(("victim", "phase"), CASES)
def test_a_stopped_rank_is_named_with_what_the_others_wait_for(
    toy: Toy, victim: str, phase: str, record_property: Callable
) -> None:
    run = strike(toy, victim, phase, signal.SIGSTOP)
    ended_soon(run, record_property)
    waits = reported(run, victim, record_property)
    if victim == "rank-2" and phase != "start":
        assert waits in OF_GENERATING
    else:
        assert waits in WAITS[phase]
