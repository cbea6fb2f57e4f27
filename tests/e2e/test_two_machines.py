"""Two machines and the link between them: cut for good, mended, slow; and the loss of either's agent."""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.e2e.machines import Machines, missing
from tests.e2e.runs import MARK, ROOT, Running, Toy
from tests.patience import patient

STALL = 20
SETTINGS = ("reward.toy.args.sleep=0.01", "reward.toy.timeout=10", f"journal.stall_seconds={STALL}")
PORT = 29_500
SPLIT = ("placement.mode=split", "placement.train=0")
"""The first machine trains, and the other one generates."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Toy:
    if reason := missing():
        pytest.skip(reason)
    return Toy(tmp_path_factory.mktemp("toy"))


@contextmanager
def job(toy: Toy, machines: Machines, *overrides: str, name: str, restarts: int = 0) -> Iterator[list[Running]]:
    """One rank under an agent on each machine; the first has the store. What each side runs."""
    run_dir, sides = toy.path / name, []
    try:
        for index, address in enumerate(machines.addresses):
            mark, output = secrets.token_hex(8), toy.path / f"{name}-{index}.out"
            agent = f"--nnodes 2 --nproc-per-node 1 --max-restarts {restarts} --local-addr {address} --rdzv-id {name}"
            meet = f"--rdzv-backend c10d --rdzv-endpoint {machines.addresses[0]}:{PORT} --rdzv-conf is_host={not index}"
            run = ["-m", "torch.distributed.run", *agent.split(), *meet.split(), "-m", toy.door]
            environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), MARK: mark}
            with open(output, "wb") as out:
                process = machines.start(
                    index,
                    [sys.executable, *run, *toy.settings(), *SETTINGS, f"run.dir={run_dir}", *overrides],
                    cwd=ROOT,
                    env=os.environ | environment | {"GLOO_SOCKET_IFNAME": machines.device},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            sides.append(Running([process], run_dir, output, mark, agent=True))
        yield sides
    finally:
        for side in sides:
            for process in side.processes():
                process.kill()
            side.process.wait()


def ranks_gone(sides: list[Running], seconds: float) -> list[float]:
    """Wait until nothing but agents is left; the seconds that took on each side."""
    began, took = time.monotonic(), [0.0] * len(sides)
    while time.monotonic() - began < patient(seconds):
        left = [[process for process in side.processes() if process.pid != side.process.pid] for side in sides]
        took = [time.monotonic() - began if there else before for there, before in zip(left, took, strict=True)]
        if not any(left):
            return took
        time.sleep(0.2)
    raise AssertionError(f"left after {seconds} s: {left}\n{sides[0].text()[-3000:]}\n{sides[1].text()[-3000:]}")


def test_a_cut_ends_both_sides_and_each_says_what_it_saw(toy: Toy, record_property) -> None:
    with Machines() as machines, job(toy, machines, "steps=100000", name="cut") as sides:
        sides[0].wait_for("collective track: metrics", step=8)
        machines.is_cut = True
        took = ranks_gone(sides, 2 * STALL)
        record_property("gone_after", took)
        assert min(took) > STALL - 2
        near = (sides[0].run_dir / "hang.txt").read_text()
        far = (sides[0].run_dir / "hang-rank-1.txt").read_text()
        record_property("reports", near + far)
        assert near in sides[0].text() and f"no progress on any of 2 ranks for {STALL} s" in near
        assert "did not arrive: rank 1" in near and "rank 1 (pid" in near
        assert far in sides[1].text() and "rank 1 is cut off: the store is out of reach" in far


def test_a_cut_that_heals_restarts_the_job(toy: Toy, record_property) -> None:
    with Machines() as machines, job(toy, machines, "steps=12", name="heals", restarts=3) as sides:
        sides[0].wait_for("collective track: metrics", step=8)
        machines.is_cut = True
        time.sleep(45)
        machines.is_cut = False
        healed = time.monotonic()
        codes = [side.wait(300) for side in sides]
        record_property("ended_after", time.monotonic() - healed)
        assert codes == [0, 0], sides[0].text()[-3000:] + sides[1].text()[-3000:]
        assert sides[0].metrics()[-1]["step"] == 12


def test_a_cut_between_training_and_generation_ends_both_sides(toy: Toy, record_property) -> None:
    with Machines() as machines, job(toy, machines, *SPLIT, "steps=100000", name="cut-split") as sides:
        sides[0].wait_for("enter update", step=3)
        machines.is_cut = True
        record_property("gone_after", ranks_gone(sides, 2 * STALL))
        near = (sides[0].run_dir / "hang.txt").read_text()
        far = (sides[0].run_dir / "hang-rank-1.txt").read_text()
        record_property("reports", near + far)
        assert near in sides[0].text() and "rank 1 (pid" in near and "stopped, dead or cut off" in near
        assert far in sides[1].text() and "rank 1 is cut off: the store is out of reach" in far


def test_a_cut_between_training_and_generation_that_heals_restarts_the_job(toy: Toy) -> None:
    with Machines() as machines, job(toy, machines, *SPLIT, "steps=6", name="heals-split", restarts=3) as sides:
        sides[0].wait_for("enter update", step=3)
        machines.is_cut = True
        time.sleep(45)
        machines.is_cut = False
        codes = [side.wait(300) for side in sides]
        assert codes == [0, 0], sides[0].text()[-3000:] + sides[1].text()[-3000:]
        assert sides[0].metrics()[-1]["step"] == 6


def test_a_slow_link_is_only_slow(toy: Toy, record_property) -> None:
    began = time.monotonic()
    with Machines(delay=0.1) as machines, job(toy, machines, "steps=4", name="slow") as sides:  # 200 ms there and back
        assert [side.wait(400) for side in sides] == [0, 0], sides[0].text()[-3000:] + sides[1].text()[-3000:]
    record_property("took", time.monotonic() - began)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_agent_ends_both_sides(toy: Toy, lost: int, record_property) -> None:
    with Machines() as machines, job(toy, machines, "steps=100000", name=f"lost-{lost}") as sides:
        sides[0].wait_for("collective track: metrics", step=4)
        psutil.Process(sides[lost].process.pid).kill()
        record_property("gone_after", ranks_gone(sides, 10))
        said = [line["text"] for line in sides[0].events(1 - lost) if line["event"] == "error"]
        assert said, "the side that is left says why it ended"
        record_property("said", said)
