"""Jobs of `launch/slurm/run.sbatch` on a cluster of Slurm's own daemons: what a preemption and a lost node cost."""

import pytest
import torch

from tests.e2e.runs import EXACT, Running, Toy
from tests.e2e.slurm import Cluster

pytestmark = pytest.mark.slow
SETTINGS = (*EXACT, "steps=4", "checkpoint.every=0", "reward.toy.args.sleep=0.02")


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Toy:
    return Toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def straight(toy: Toy) -> Running:
    return toy.run(*SETTINGS, name="straight")


def run_of(toy: Toy, name: str) -> Running:
    """The files of a run that a job writes."""
    return Running([], toy.path / name, toy.path / f"{name}.out", "")


def submit(cluster: Cluster, toy: Toy, name: str, *words: str, **env: str) -> str:
    return cluster.submit(toy.door, *words, *toy.settings(), f"run.dir={toy.path / name}", *SETTINGS, **env)


def wait_for_step(cluster: Cluster, run: Running, step: int, number: str) -> None:
    """Until the run has done so many steps."""

    def done() -> bool:
        assert cluster.job(number)["JobState"] in ("PENDING", "CONFIGURING", "RUNNING"), cluster.text(number)[-3000:]
        return (run.run_dir / "metrics.jsonl").exists() and len(run.metrics()) > step

    cluster.wait(done, 200, f"step {step}")


def assert_equal(run: Running, straight: Running, steps: int = 4) -> None:
    """The same weights and samples to the bit, and no step lost."""
    ours, theirs = run.weights(steps), straight.weights(steps)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [m["step"] for m in run.metrics()] == list(range(steps + 1))
    assert [run.samples(step) for step in range(1, steps + 1)] == [
        straight.samples(step) for step in range(1, steps + 1)
    ]


def test_preempted_with_a_minute_left(toy: Toy, straight: Running, tmp_path) -> None:
    with Cluster.start(tmp_path) as cluster:
        run = run_of(toy, "preempted")
        number = submit(cluster, toy, "preempted", "--nodes=2")
        wait_for_step(cluster, run, 1, number)
        other = cluster.occupy(2)
        assert cluster.end_of(other)["JobState"] == "COMPLETED"
        job = cluster.end_of(number)
        assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), cluster.text(number)[-3000:]
        text = cluster.text(number)
    assert text.count(": stopped after step ") == 1
    assert_equal(run, straight)
