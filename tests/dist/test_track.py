"""The run directory over real ranks: one line and one samples file of all of them; a report when a signal ends it."""

import json
import os
import random
import signal
import time
from pathlib import Path

from spmd_rl.config.schema import RlvrConfig, RunConfig
from spmd_rl.distributed import World
from spmd_rl.track.run import Run
from tests.dist.harness import launch, run_ranks
from tests.synthetic import sample


def settings(run_dir: str) -> RlvrConfig:
    return RlvrConfig(steps=2, run=RunConfig(name="toy", dir=run_dir))


def two_steps(world: World, run_dir: str) -> list:
    """Each rank measures its own; the collectives that one step cost."""
    with Run.open(settings(run_dir), world) as track:
        for step in range(2):
            with track.step(step):
                before = world.journal.last[1]
                with world.phase("update" if world.rank else "generate"):
                    time.sleep(0.1)
                track.add({"equal": 1.5})
                track.add({"tokens": 10, "sum": world.rank + 1}, reduce="sum")
                track.add({"max": -world.rank}, reduce="max")
                if world.rank == 1:
                    track.add({"mean": 4}, reduce="mean")
                rows = [sample(ticket, world.rank, random.Random(0)) for ticket in (2, 0)]
                track.log_samples(step, rows if world.rank or step else [])
        return [world.journal.last[1] - before]


def test_one_line_and_one_file_of_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, two_steps, str(tmp_path)) == [[1], [1]]
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])
    assert (line["equal"], line["sum"], line["max"], line["mean"]) == (1.5, 3, 0, 4)
    assert line["system/tps"] == 20 / line["time/total"]
    parts = {key: value for key, value in line.items() if key.startswith("time/") and key != "time/total"}
    assert abs(sum(parts.values()) - line["time/total"]) < 1e-9
    assert 0.05 <= line["time/train"] < 0.09 and 0.05 <= line["time/generate"] < 0.09  # a mean over ranks
    for step, expected in ((0, [(0, 1), (2, 1)]), (1, [(0, 0), (0, 1), (2, 0), (2, 1)])):
        rows = [json.loads(row) for row in (tmp_path / "samples" / f"step-00000{step}.jsonl").read_text().splitlines()]
        assert [(row["ticket"], row["answer"]) for row in rows] == expected
    assert (tmp_path / "report.html").exists()


def forever(world: World, run_dir: str) -> None:
    """One step, then a phase that only a signal ends."""
    with Run.open(settings(run_dir), world) as track:
        with track.step(0):
            track.add({"critic/score/mean": 0.25})
        with track.step(1), world.phase("update"):
            time.sleep(60)


def test_a_signal_leaves_a_report(tmp_path: Path) -> None:
    run_dir = tmp_path / "job" / "run"
    with launch(2, forever, str(run_dir), directory=tmp_path / "job") as job:
        job.wait_for("enter", 2, phase="update")
        os.kill(job.processes[0].pid, signal.SIGTERM)
        job.wait(10)
    assert "0.25" in (run_dir / "report.html").read_text()
    assert [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()] == [0]
