"""One fate for all: whatever befalls one rank, the whole job is gone soon, and says why."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed

from spmd_rl.base.errors import UserError
from spmd_rl.config.schema import RewardConfig, RlvrConfig
from spmd_rl.distributed import World
from spmd_rl.rollout import Sampling, expected
from tests.dist.harness import Job, alive, family, launch, torchrun
from tests.fakes import FakeEngine, FakePrompts, FakeScorer, make_rollouts
from tests.forked import Forked, new_store
from tests.patience import patient

STALL = 3.0


def rounds(world: World, num_rounds: int, odd: str = "") -> None:
    """Meet again and again; in round 3 rank 1 does something `odd`."""
    if world.rank == 0:
        mark = world.journal.path.parent.parent / "on_exit.txt"
        world.on_exit(lambda: mark.write_text("called"))
    for round_ in range(num_rounds):
        world.journal.set_step(round_)
        with world.phase("update"):
            if round_ == 3 and world.rank == 1:
                if odd == "error":
                    raise ValueError("a bad number")
                if odd == "library":
                    continue
            if odd == "user error" and round_ == 3:
                raise UserError("seed: all ranks dislike it")
            if odd == "library":
                with world.collective("all_reduce of gradients"):
                    torch.distributed.all_reduce(torch.ones(1))
            else:
                world.gather("plan", round_)
            time.sleep(0.02)
    if odd == "deaf":
        world.clone_store().wait(["never written"])


def killed_once(world: World) -> int:
    """Rank 1 dies at the first start; counts the starts that see the same store keys."""
    world.barrier("first")
    if world.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier("second")
    return world.store.add("starts", 1)


def in_round_three(job: Job, ranks: int = 2) -> None:
    """Wait until the ranks are well inside the loop."""
    job.wait_for("collective_done", ranks, name="plan", step=3)


def gone(pids: list[int], seconds: float) -> bool:
    """Whether all of them are gone after so long at most."""
    deadline = time.monotonic() + patient(seconds)
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pids)


def test_one_ranks_error_ends_all(tmp_path: Path) -> None:
    with launch(4, rounds, 10_000, "error", directory=tmp_path) as job:
        job.wait_for("error", 1, text="rank 1 failed: ValueError: a bad number")
        began = time.monotonic()
        assert set(job.wait(5)) == {1}
        assert time.monotonic() - began < patient(3)
        for rank in (0, 2, 3):
            log = (tmp_path / f"rank-{rank}.log").read_text()
            assert log.splitlines()[-1] == f"rank {rank}: ended because rank 1 failed: ValueError: a bad number"
            assert "Traceback" not in log
        assert 'raise ValueError("a bad number")' in (tmp_path / "rank-1.log").read_text()
        assert (job.run_dir / "on_exit.txt").exists()


def test_a_mistake_of_all_ranks_propagates_on_all(tmp_path: Path) -> None:
    with launch(2, rounds, 10, "user error", directory=tmp_path) as job:
        assert job.wait(30) == [1, 1]
        for rank in range(2):
            assert "UserError: seed: all ranks dislike it" in (tmp_path / f"rank-{rank}.log").read_text()


def test_stopped_rank_is_named_and_the_job_ends(tmp_path: Path) -> None:
    with torchrun(2, rounds, 10_000, directory=tmp_path, stall_seconds=STALL) as job:
        job.wait_for("collective_done", 2, name="plan", step=30)  # some heartbeats later
        everyone = [process.pid for process in family(job.processes[0].pid)]
        stopped = job.pids()[1]
        os.kill(stopped, signal.SIGSTOP)
        began = time.monotonic()
        assert job.wait(STALL + 10) == [1]
        assert time.monotonic() - began < patient(STALL + 5)
        assert gone(everyone, 1.0)
        report = (job.run_dir / "hang.txt").read_text()
        assert report in job.output()
        assert "phase: update" in report
        assert "collective: 'plan' #" in report
        assert "arrived: rank 0\n" in report
        assert "did not arrive: rank 1\n" in report
        assert f"rank 1 (pid {stopped} on " in report
        assert "stopped, dead or cut off; no stack. Last seen in phase update" in report
        assert "in gather" in (job.run_dir / "journal/stacks-rank-0.txt").read_text()
        assert not (job.run_dir / "journal/stacks-rank-1.txt").exists()
        assert (job.run_dir / "on_exit.txt").exists()


def test_skipped_collective_is_named(tmp_path: Path) -> None:
    with launch(2, rounds, 10, "library", directory=tmp_path, stall_seconds=STALL) as job:
        assert job.wait(30 + STALL) == [1, 1]
        report = (job.run_dir / "hang.txt").read_text()
        # rank 1 is one behind: it meets rank 0's last all_reduce at the barrier that ends the run
        assert "collective: " in report and "did not arrive: rank" in report
        assert "'all_reduce of gradients' #" in report
        assert "'end of run' #" in report
        assert "in rounds" in (job.run_dir / "journal/stacks-rank-0.txt").read_text()
        assert "in barrier" in (job.run_dir / "journal/stacks-rank-1.txt").read_text()


def test_sigterm_to_the_agent_ends_all(tmp_path: Path) -> None:
    with torchrun(2, rounds, 20, "deaf", directory=tmp_path) as job:  # in C++, where Python handlers would wait
        job.wait_for("exit", 2, phase="update", step=19)
        os.kill(job.processes[0].pid, signal.SIGTERM)
        assert gone(list(job.pids().values()), 2.0), job.output()
        # torchrun's own exit code: 1, or -6 (abort) where its handler raised inside one of its C++ calls.
        assert job.wait(10)[0] in (1, -signal.SIGABRT)
        # The agent signals both ranks, and either may be the first to say so.
        lines = ("rank 0 received SIGTERM: ending", "rank 0: ended because rank 1 received SIGTERM")
        assert any(line in job.output() for line in lines)
        assert (job.run_dir / "on_exit.txt").exists()


def test_sigint_to_one_rank_ends_all(tmp_path: Path) -> None:
    with launch(4, rounds, 20, "deaf", directory=tmp_path) as job:
        job.wait_for("exit", 4, phase="update", step=19)
        os.kill(job.pids()[2], signal.SIGINT)
        assert job.wait(3) == [1, 1, 128 + signal.SIGINT, 1]
        assert "rank 0: ended because rank 2 received SIGINT" in job.output()
        assert "Traceback" not in job.output()
        assert (job.run_dir / "on_exit.txt").exists()


def test_killed_agent_leaves_nothing(tmp_path: Path) -> None:
    with torchrun(2, rounds, 10_000, directory=tmp_path) as job:
        in_round_three(job)
        everyone = [process.pid for process in family(job.processes[0].pid)]
        assert len(everyone) == 3
        job.processes[0].kill()
        assert gone(everyone, 2.0)


def test_killed_rank_ends_all(tmp_path: Path) -> None:
    with launch(4, rounds, 10_000, directory=tmp_path) as job:
        in_round_three(job, 4)
        os.kill(job.pids()[2], signal.SIGKILL)
        began = time.monotonic()
        codes = job.wait(5)
        assert time.monotonic() - began < patient(3)
        assert codes[2] == -signal.SIGKILL
        assert set(codes) == {1, -signal.SIGKILL}


@pytest.mark.slow
def test_restarted_ranks_share_nothing_with_the_dead(tmp_path: Path) -> None:
    with torchrun(2, killed_once, directory=tmp_path, agent=("--max-restarts", "1")) as job:
        assert job.wait(40) == [0], job.output()
        assert sorted(job.results()) == [1, 2]
        starts = [line["nonce"] for line in job.journals()[1] if line["event"] == "start"]
        assert len(set(starts)) == 2
        assert "(rank 1 is gone: killed?)" in (job.run_dir / "journal/rank-0.jsonl").read_text()


def test_lost_store_ends_the_ranks(tmp_path: Path) -> None:
    with launch(2, rounds, 20, "deaf", directory=tmp_path) as job:
        job.wait_for("exit", 2, phase="update", step=19)
        pids = list(job.pids().values())
        job.store = None  # closes it
        assert gone(pids, 6.0), [psutil.Process(pid).status() for pid in alive(pids)]


def serve_store(port_file: str) -> None:
    """A store in a process of its own, which can be stopped: to its clients the same as a link that loses all."""
    store = new_store()
    Path(port_file).write_text(str(store.port))
    time.sleep(1000)


@contextmanager
def distant_store(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """Its `port`, and the `pid` of its process."""
    place = tmp_path / "port"
    process = Forked(tmp_path / "store.log", {}, serve_store, str(place))
    try:
        while not place.exists() or not place.read_text():
            time.sleep(0.02)
        yield SimpleNamespace(port=int(place.read_text()), pid=process.pid)
    finally:
        os.kill(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("odd", ["", "deaf"])
def test_a_store_that_is_out_of_reach_ends_the_ranks(odd: str, tmp_path: Path) -> None:
    """Whether their main threads work without it or wait for it."""
    num_rounds = 20 if odd else 10_000
    with (
        distant_store(tmp_path) as store,
        launch(2, rounds, num_rounds, odd, directory=tmp_path / "job", stall_seconds=STALL, store=store) as job,
    ):
        job.wait_for("exit", 2, phase="update", step=19)
        os.kill(store.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert set(job.wait(3 * STALL)) <= {1, -signal.SIGKILL}
        assert STALL - 0.5 < time.monotonic() - began < patient(2 * STALL)
        said = f"is cut off: the store is out of reach, without an answer for {STALL:.0f} s"
        assert all(f"rank {rank} {said}" in job.output() for rank in (0, 1)), job.output()
        where = "in phase none" if odd else "in phase update"
        assert any(where in path.read_text() for path in job.run_dir.glob("hang-rank-*.txt"))
        assert (job.run_dir / "journal/stacks-rank-0.txt").exists()


def test_a_store_that_answers_again_in_time_is_nothing(tmp_path: Path) -> None:
    with (
        distant_store(tmp_path) as store,
        launch(2, rounds, 400, directory=tmp_path / "job", stall_seconds=STALL, store=store) as job,
    ):
        in_round_three(job)
        os.kill(store.pid, signal.SIGSTOP)
        time.sleep(STALL / 2)
        os.kill(store.pid, signal.SIGCONT)
        assert job.wait(60) == [0, 0], job.output()


def test_a_rank_that_was_stopped_is_not_cut_off(tmp_path: Path) -> None:
    with launch(1, rounds, 200, directory=tmp_path, stall_seconds=1.0) as job:
        job.wait_for("exit", 1, phase="update", step=3)
        os.kill(job.pids()[0], signal.SIGSTOP)
        time.sleep(3.0)
        os.kill(job.pids()[0], signal.SIGCONT)
        assert job.wait(30) == [0], job.output()


def slow_to_close(world: World) -> None:
    """Rank 1 fails while it holds something that takes long to close."""
    with world.resources() as stack:
        stack.callback(time.sleep, 4)
        world.barrier("both hold it")
        if world.rank == 1:
            raise ValueError("a bad number")
        world.clone_store().wait(["never written"])


def test_an_error_is_known_before_the_rank_unwinds(tmp_path: Path) -> None:
    with launch(2, slow_to_close, directory=tmp_path) as job:
        job.wait_for("error", 1, text="rank 1 failed: ValueError: a bad number")
        began = time.monotonic()
        while job.processes[0].poll() is None:
            assert time.monotonic() - began < patient(2)
            time.sleep(0.02)
        assert job.processes[1].poll() is None, "still closing"
        assert job.wait(10) == [1, 1]


def slow_start(world: World, seconds: float, limit: float) -> str:
    """Rank 1 starts for a long time, and says how long it may take; rank 0 waits for it."""
    if world.rank == 1:
        with world.journal.extend_timeout(limit):
            time.sleep(seconds)
    world.barrier("started")
    return "started"


def test_a_slow_start_is_no_stall(tmp_path: Path) -> None:
    with launch(2, slow_start, 4.0, 60.0, directory=tmp_path, stall_seconds=1.5) as job:
        assert job.wait(30) == [0, 0], job.output()


def test_a_start_that_is_too_slow_is_a_stall(tmp_path: Path) -> None:
    with launch(2, slow_start, 60.0, 1.0, directory=tmp_path, stall_seconds=1.5) as job:
        assert job.wait(20) == [1, 1]
        assert "collective: 'started' #" in (job.run_dir / "hang.txt").read_text()


def judged(world: World, how: str, seconds: float, timeout: float) -> None:
    """An evaluation, or a step of training, by a judge that takes so long over each answer, and may take `timeout`."""
    cfg = RlvrConfig()
    cfg.rollout.prompts_per_step = cfg.rollout.answers_per_prompt = 2
    cfg.reward.domains = {"toy": RewardConfig("tests.fakes:FakeScorer", timeout=timeout, start_seconds=0.1)}
    expected.MARGIN_SECONDS = 0.5
    scorer = FakeScorer(lambda prompt, answer: int(answer[0]) % 2 == 0, lambda prompt: seconds)
    engine = FakeEngine(lambda request: 3)
    rollouts = make_rollouts(cfg, engine, FakePrompts(50), scorer, world)
    if how == "answer":
        assert rollouts.answer(rollouts.prompts.eval, [Sampling(0, "eval", 1.0, 8)])
    else:
        rollouts.collect(1)
    rollouts.close()


@pytest.mark.parametrize("how", ["answer", "collect"])
def test_a_slow_judge_is_no_stall(how: str, tmp_path: Path) -> None:
    with launch(1, judged, how, 4.0, 10.0, directory=tmp_path, stall_seconds=1.0) as job:
        assert job.wait(30) == [0], job.output()


@pytest.mark.parametrize("how", ["answer", "collect"])
def test_a_verdict_that_never_comes_is_a_stall(how: str, tmp_path: Path) -> None:
    with launch(1, judged, how, 1000.0, 0.5, directory=tmp_path, stall_seconds=1.0) as job:
        assert job.wait(20) == [1], job.output()
        assert "a stall: no progress" in (job.run_dir / "hang.txt").read_text()
