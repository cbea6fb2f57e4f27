"""Jobs of `launch/slurm/run.sbatch` on a cluster of Slurm's own daemons: what a preemption and a lost node cost."""

import pytest

from tests.e2e.runs import EXACT, Running, Toy
from tests.e2e.slurm import Cluster
from tests.e2e.test_agents import AgentToy
from tests.e2e.test_guarantees import bitwise_equal, tokens

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SETTINGS = (*EXACT, "steps=4", "checkpoint.every=0")
SLOWLY = "reward.toy.args.sleep=0.5"
"""Steps of some seconds, in which a signal or a loss can come."""


def run_of(toy: Toy, name: str) -> Running:
    """The files of a run that a job writes."""
    return Running([], toy.path / name, toy.path / f"{name}.out", "")


def submit(cluster: Cluster, toy: Toy, name: str, *words: str, **env: str) -> str:
    return cluster.submit(toy.door, *toy.settings(), f"run.dir={toy.path / name}", *words, **env)


def wait_for_step(cluster: Cluster, run: Running, step: int, number: str) -> None:
    """Until the run has done this step."""

    def done() -> bool:
        assert cluster.job(number)["JobState"] in ("PENDING", "CONFIGURING", "RUNNING"), cluster.text(number)[-3000:]
        return (run.run_dir / "metrics.jsonl").exists() and run.metrics()[-1]["step"] >= step

    cluster.wait(done, 200, f"step {step}")


def assert_equal(run: Running, straight: Running, steps: int) -> None:
    """The same weights and samples to the bit, and no step lost."""
    assert bitwise_equal(run.weights(steps), straight.weights(steps))
    assert [m["step"] for m in run.metrics()] == [m["step"] for m in straight.metrics()]
    assert [tokens(run, step) for step in range(1, steps + 1)] == [
        tokens(straight, step) for step in range(1, steps + 1)
    ]


def preempt(cluster: Cluster, run: Running, number: str) -> str:
    """Take the nodes of a job after its first step, with a minute's notice; return what it printed until its end."""
    wait_for_step(cluster, run, 1, number)
    assert cluster.end_of(cluster.occupy(2))["JobState"] == "COMPLETED"
    job = cluster.end_of(number)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), cluster.text(number)[-3000:]
    text = cluster.text(number)
    assert text.count(": stopped after step ") == text.count("\nresumed from step ") == 1
    return text


def test_preempted_with_a_minute_left(toy: Toy, straight: Running, tmp_path) -> None:
    with Cluster.start(tmp_path) as cluster:
        run = run_of(toy, "preempted")
        preempt(cluster, run, submit(cluster, toy, "preempted", "--nodes=2", *SETTINGS, SLOWLY))
    assert_equal(run, straight, 4)


def test_agents_by_the_same_file(tmp_path) -> None:
    toy = AgentToy(tmp_path / "toy", max_position_embeddings=2048)
    straight = toy.run("steps=3", name="straight")
    with Cluster.start(tmp_path / "slurm") as cluster:
        run = run_of(toy, "preempted")
        preempt(
            cluster,
            run,
            submit(cluster, toy, "preempted", "--nodes=2", "steps=3", "checkpoint.every=0", "env.echo.args.delay=3"),
        )
    assert_equal(run, straight, 3)


def test_a_lost_node_queues_the_job_again(toy: Toy, straight: Running, tmp_path) -> None:
    with Cluster.start(tmp_path) as cluster:
        run = run_of(toy, "lost")
        number = submit(cluster, toy, "lost", "--nodes=2", *SETTINGS, SLOWLY, "checkpoint.every=1")
        wait_for_step(cluster, run, 1, number)
        cluster.lose("n2")
        cluster.wait(lambda: cluster.job(number)["JobState"] == "PENDING", 120, "queued again")
        cluster.bring_back("n2")
        job = cluster.end_of(number)
        assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), cluster.text(number)[-3000:]
    assert_equal(run, straight, 4)


def test_a_spare_node_takes_the_place_of_a_lost_one(toy: Toy, straight: Running, tmp_path) -> None:
    with Cluster.start(tmp_path, nodes=3) as cluster:
        run = run_of(toy, "spare")
        words = ["--nodes=3", "--no-kill", *SETTINGS, SLOWLY, "checkpoint.every=1"]
        number = submit(cluster, toy, "spare", *words, SPARE="1", DOCTOR="open files,devices")
        wait_for_step(cluster, run, 1, number)
        cluster.lose("n2")
        job = cluster.end_of(number)
        assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), cluster.text(number)[-3000:]
        assert "n2 fails the doctor" in cluster.text(number)
    assert_equal(run, straight, 4)
