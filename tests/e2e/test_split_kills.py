"""With split placement, each kind of rank is killed or stopped in each phase; nobody but the ranks themselves notices.

Two ranks train (0 and 1) and two generate (2 and 3), without an agent. A killed run, typed again, ends bitwise where an
undisturbed one ends; one in which a rank stops ends soon and says where, what the others wait for, and who is missing.
"""

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch

from tests.e2e.runs import EXACT, Running, Toy
from tests.patience import patient

pytestmark = pytest.mark.slow
STALL = 4
SETTINGS = (
    *EXACT,
    "steps=3",
    "eval.every=1",
    "placement.mode=split",
    "placement.max_staleness=0",
    "reward.toy.args.sleep=0.01",
    "reward.toy.timeout=3",
    f"journal.stall_seconds={STALL}",
    f"journal.start_seconds={STALL}",
)
TRAIN = {
    "start": "enter start",
    "publish": "progress publish",
    "generate": "enter generate",
    "eval": "enter eval",
    "prepare": "collective train: prepare: samples",
    "update": "collective train: update: backward of micro-batch 1/1",
    "save": "progress save",
}
"""Where a training rank is struck: in `generate` and `eval` it waits for those that generate."""
GENERATE = TRAIN | {"generate": "progress generate", "eval": "progress eval"}
"""Where a generating rank is struck; from `prepare` on, while rank 0 is there."""
VICTIMS = ("rank-0", "rank-1", "rank-2", "rank-3")
"""The first training rank and another one, the first generating rank and another one."""
CASES = [(victim, phase) for victim in VICTIMS for phase in TRAIN]


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Toy:
    return Toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def straight(toy: Toy) -> Running:
    return toy.run(*SETTINGS, ranks=4, name="straight")


def strike(toy: Toy, victim: str, phase: str, how: signal.Signals) -> Running:
    """A run whose victim was struck in the phase, in step 2 unless that is the start."""
    rank, step = int(victim[-1]), 2 if phase != "start" else 0
    generates = rank > 1
    point = (GENERATE if generates else TRAIN)[phase]
    watched = 0 if generates and phase in ("prepare", "update", "save") else rank
    run = toy.linger(point, *SETTINGS, step=step, ranks=4, name=f"{victim}-{phase}-{how.name}")
    run.wait_for(point, step=step, rank=watched)
    os.kill(run.pid(victim), how)
    return run


def ended_soon(run: Running, record_property: Callable, within: float = 2 * STALL + 5) -> str:
    """Wait for the end of a run that has lost a rank; what it said."""
    began = time.time()
    assert run.wait(60) != 0
    record_property("gone_after", time.time() - began)
    assert time.time() - began < patient(within), run.text()[-3000:]
    assert not run.outlived(2.0), "a process outlived its run"
    return run.text()


@pytest.mark.parametrize(("victim", "phase"), CASES)
def test_a_killed_run_continues_as_if_nothing_had_happened(
    toy: Toy, straight: Running, victim: str, phase: str, record_property: Callable
) -> None:
    # With rank 0 dies the sidecar, which the ranks that generate ask again for half a minute: their verdicts may come.
    within = 45 if victim == "rank-0" and phase in ("generate", "eval") else 2 * STALL + 5
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


WAITS = {
    "rank-0": {
        "start": ["start: step"],
        "publish": ["train: publish: staged"],
        "generate": ["train: generate: reports"],
        "eval": ["train: eval: parts"],
        "prepare": ["train: prepare: samples"],
        "update": ["train: update: backward of micro-batch 1/1"],
        "save": ["train: save: shards"],
    },
    "rank-2": {
        "start": ["start: step"],
        "publish": ["publish: answers of engines"],
        "generate": ["generate: step 2 from ranks that generate"],
        "eval": ["eval: answers of ranks that generate"],
        "prepare": ["publish: answers of engines"],
        "update": ["publish: answers of engines"],
        "save": ["generate: step 3 from ranks that generate", "generate: end of step"],
    },
}
"""What the others wait for, by the first rank of the victim's side; of a generating rank, some wait of its own side."""


@pytest.mark.parametrize(("victim", "phase"), CASES)
def test_a_stopped_rank_is_named_with_what_the_others_wait_for(
    toy: Toy, victim: str, phase: str, record_property: Callable
) -> None:
    run = strike(toy, victim, phase, signal.SIGSTOP)
    ended_soon(run, record_property)
    report = (run.run_dir / "hang.txt").read_text()
    record_property("report", report)
    lines, rank = [line.strip() for line in report.splitlines()], f"rank {victim[-1]}"
    assert lines[2].removeprefix("collective: '").rpartition("'")[0] in [
        *WAITS["rank-0" if victim < "rank-2" else "rank-2"][phase],
    ]
    assert f"did not arrive: {rank}" in lines or f"stopped or dead: {rank}" in lines
    where = next(line for line in lines if line.startswith(f"{rank} (pid"))
    assert "stopped or dead; no stack" in where
