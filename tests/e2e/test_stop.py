"""SIGINT, SIGTERM and SIGUSR1: the step is finished and saved, and the same command goes on bitwise."""

import os
import signal

import pytest
import torch

from tests.e2e.runs import EXACT, Running, Toy

SETTINGS = (*EXACT, "steps=3", "checkpoint.every=0", "reward.toy.args.sleep=0.01")


def assert_stopped(run: Running, signum: signal.Signals) -> None:
    """It ended after its second step, with that step's checkpoint alone, and said so once."""
    assert [m["step"] for m in run.metrics()] == [0, 1, 2]
    folders = sorted(path.name for path in (run.run_dir / "checkpoints").iterdir())
    assert folders == ["latest", "step-000002"]
    text = run.text()
    assert text.count(f"{signum.name}: the run ends once this step is finished and saved; a second ") == 1
    assert f"\n{signum.name}: stopped after step 2, which is saved\n" in text
    assert text.count("continue    the same command\n") == 1
    assert not (run.run_dir / "error.txt").exists()


def assert_goes_on(toy: Toy, run: Running, straight: Running) -> None:
    done = toy.run(*SETTINGS, name=run.run_dir.name)
    ours, theirs = done.weights(3), straight.weights(3)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [done.samples(step) for step in (1, 2, 3)] == [straight.samples(step) for step in (1, 2, 3)]
    assert [m["step"] for m in done.metrics()] == [0, 1, 2, 3]


def test_sigint_saves_the_step(toy: Toy, straight: Running) -> None:
    run = toy.linger("enter score", *SETTINGS, name="sigint")
    run.wait_for("enter score")
    os.kill(run.pid("rank-1"), signal.SIGINT)
    assert run.wait() == 128 + signal.SIGINT, run.text()[-3000:]
    assert [process.poll() for process in run.started] == 2 * [128 + signal.SIGINT]
    assert_stopped(run, signal.SIGINT)
    assert_goes_on(toy, run, straight)


def test_sigterm_to_the_agent_saves_the_step(toy: Toy, straight: Running) -> None:
    # which hands it to each rank's process group, sidecars and all
    run = toy.linger("progress generate", *SETTINGS, name="sigterm", torchrun=True)
    run.wait_for("progress generate")
    os.kill(run.pid("agent"), signal.SIGTERM)
    assert run.wait() != 0
    assert_stopped(run, signal.SIGTERM)
    assert "sidecar" not in run.text()
    assert_goes_on(toy, run, straight)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "ranks", "victim"), [("split", 3, 2), ("lent", 3, 2), ("overlapped", 2, 1)])
def test_sigusr1_ends_a_rank_that_is_a_step_ahead(toy: Toy, mode: str, ranks: int, victim: int) -> None:
    placed = [f"placement.mode={mode}", *["placement.train=0-1"] * (mode != "overlapped")]
    settings = [*SETTINGS, "rollout.claim=store", *placed]
    run = toy.linger("enter update", *settings, name=mode, ranks=ranks)
    run.wait_for("enter update")
    os.kill(run.pid(f"rank-{victim}"), signal.SIGUSR1)
    assert run.wait() == 128 + signal.SIGUSR1, run.text()[-3000:]
    assert_stopped(run, signal.SIGUSR1)
    assert [m["step"] for m in toy.run(*settings, name=mode, ranks=ranks).metrics()] == [0, 1, 2, 3]


def test_a_second_signal_ends_the_run_at_once(toy: Toy) -> None:
    run = toy.linger("enter score", *SETTINGS, name="twice", env={"LINGER_SECONDS": "60"}, ranks=0)
    run.wait_for("enter score")
    os.kill(run.pid("rank-0"), signal.SIGINT)
    while "ends it at once" not in run.text():
        assert run.process.poll() is None
    os.kill(run.pid("rank-0"), signal.SIGINT)
    assert run.wait() == 128 + signal.SIGINT
    assert "there is no checkpoint yet, step 1 is lost" in run.text()
