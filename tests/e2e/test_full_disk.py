"""A disk that is full when a checkpoint is due, through the real door."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.e2e.runs import EXACT, Toy

SETTINGS = (*EXACT, "steps=2", "eval.every=0")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system takes root")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_full_disk_during_a_checkpoint_is_one_line_and_costs_nothing(tmp_path: Path, disk: Path, ranks: int) -> None:
    toy = Toy(tmp_path / "toy")
    straight = toy.run(*SETTINGS, ranks=ranks, name="straight")
    settings = (*SETTINGS, f"run.dir={disk}/run")

    run = toy.linger("enter save", *settings, ranks=ranks, name="full")
    run.run_dir = disk / "run"
    run.wait_for("enter save")
    room = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(room.f_bavail * room.f_bsize - 300_000))
    assert run.wait() == (1 if ranks else 2)
    said = [line for line in run.text().splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "step-000002 could not be written: No space left on device" in said[0]
    if not ranks:  # torchrun adds a report of its own
        assert run.text().splitlines()[-1] == said[0] and "Traceback" not in run.text()
    assert (disk / "run" / "error.txt").read_text().strip() == said[0].removeprefix("error: ")
    assert sorted(path.name for path in (disk / "run" / "checkpoints").iterdir()) == ["latest", "step-000001"]
    assert not run.outlived(2.0)

    (disk / "filler").unlink()
    run = toy.run(*settings, ranks=ranks, name="full")
    run.run_dir = disk / "run"
    ours, theirs = run.weights(2), straight.weights(2)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in theirs)
    assert [m["step"] for m in run.metrics()] == [0, 1, 2]
