"""The present of a run from its files: state, phases of ranks, alarms, and the same as OpenMetrics."""

import json
import os
import time
from pathlib import Path

import pytest
import yaml

from spmd_rl.distributed import Journal
from spmd_rl.tools.view.open_metrics import open_metrics
from spmd_rl.track.alarms import alarms
from spmd_rl.track.live import live
from spmd_rl.track.run_reader import RunData, read_run


def run_of(lines: list[dict], **settings) -> RunData:
    return RunData(Path("run"), [{"step": i + 1, **line} for i, line in enumerate(lines)], settings, {}, {})


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], {}),
        ([{"actor/entropy": 2.0, "critic/score/mean": 0.1 * i} for i in range(10)], {}),
        ([{"actor/entropy": 2.0 * 0.7**i} for i in range(15)], {"entropy": "fell from 1.11 to 0.0313 nats"}),
        ([{"actor/entropy": 0.1 + 0.1 * i} for i in range(15)], {"entropy": "rose from"}),
        ([{"critic/score/mean": min(i, 20 - i) / 10} for i in range(21)], {"collapse": "from 0.88 to 0.2"}),
        ([{"critic/score/mean": 0.5 + 0.2 * (-1) ** i} for i in range(40)], {}),
        ([{"rollout/zero_variance": 1.0}] * 5, {"no signal": "equal scores"}),
        ([{"actor/skipped": 1.0}], {"skipped": "step 1: "}),
        ([{"train_infer/abs_diff/mean": 1.5, "train_infer/ess": None}], {"mismatch": "is 1.5, above"}),
    ],
)  # fmt: skip
def test_alarms(lines: list[dict], expected: dict[str, str]) -> None:
    found = alarms(run_of(lines))
    assert found.keys() == expected.keys()
    assert all(text in found[name] for name, text in expected.items()), found


def test_the_bounds_of_a_run_are_its_own() -> None:
    lines = [{"train_infer/abs_diff/mean": 1.5, "train_infer/ess": 0.5}]
    own = {"max_abs_diff": 2.0, "min_ess": 0.6, "max_lag": None, "on_breach": "warn"}
    assert alarms(run_of(lines, algorithm={"bounds": own})) == {
        "mismatch": "train_infer/ess is 0.5, below algorithm.bounds.min_ess=0.6"
    }


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"steps": 9, "journal": {"stall_seconds": 60}}))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "a/b": 0.5, "c": None}) + "\n")
    return tmp_path


def started(run_dir: Path, ranks: int = 2, **process) -> list[Journal]:
    journals = [Journal(run_dir / "journal", rank, size=ranks, **process) for rank in range(ranks)]
    for journal in journals:
        journal.set_step(2)
    return journals


def test_each_rank_has_its_phase(run_dir: Path) -> None:
    first, second = started(run_dir, pid=os.getpid())
    with first.phase("generate"), second.phase("update"), second.collective("gather", kind="wait"):
        found = live(read_run(run_dir))
    assert found["state"] == "running" and found["step"] == 2 and found["alarms"] == {}
    shown = [(one["rank"], one["step"], one["phase"], one["kind"], one["call"]) for one in found["ranks"]]
    assert shown == [(0, 2, "generate", "compute", ""), (1, 2, "train", "wait", "gather")]
    assert all(one["seconds"] < 5 for one in found["ranks"])


def test_the_end_of_a_run_is_told_apart(run_dir: Path) -> None:
    journals = started(run_dir, pid=2**22 + 1, host=os.uname().nodename)
    now = time.time()
    assert live(read_run(run_dir), now)["state"] == "running"
    assert live(read_run(run_dir), now + 30)["alarms"].keys() == {"killed"}
    (run_dir / "error.txt").write_text("reward.math: it failed\n\ntraceback")
    assert live(read_run(run_dir), now)["alarms"] == {"failed": "reward.math: it failed"}
    os.utime(run_dir / "error.txt", (now - 99, now - 99))
    for journal in journals:
        journal.note("end")
    found = live(read_run(run_dir), now + 999)
    assert (found["state"], found["alarms"], found["ranks"]) == ("ended", {}, [])


def test_silence_of_another_machine(run_dir: Path) -> None:
    started(run_dir, pid=1, host="elsewhere")
    now = time.time()
    assert live(read_run(run_dir), now + 50)["state"] == "running"
    assert "no rank has written for" in live(read_run(run_dir), now + 70)["alarms"]["silent"]


def test_a_start_on_fewer_ranks_leaves_out_the_others(run_dir: Path) -> None:
    started(run_dir, 3)
    started(run_dir, 1)
    assert [one["rank"] for one in live(read_run(run_dir))["ranks"]] == [0]


def test_a_run_without_a_journal_is_unknown(run_dir: Path) -> None:
    assert live(read_run(run_dir))["state"] == "unknown"


def test_open_metrics(run_dir: Path) -> None:
    first, _ = started(run_dir, pid=os.getpid())
    with first.phase("generate"):
        run = read_run(run_dir)
        text = open_metrics({'a "b"': (run, live(run))})
    lines = text.splitlines()
    assert lines[-1] == "# EOF" and text.endswith("\n")
    assert "# TYPE spmd_rl_a_b gauge" in lines and 'spmd_rl_a_b{run="a \\"b\\""} 0.5' in lines
    assert any(line.startswith('spmd_rl_phase_seconds{run="a \\"b\\"",rank="0",phase="generate"} ') for line in lines)
    assert not any("spmd_rl_c" in line for line in lines)
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
