"""Checkpoints that are written while training goes on: the same bytes, and none before it is whole."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spmd_rl.base.errors import UserError
from spmd_rl.checkpoint.checkpointer import Unsealed
from spmd_rl.distributed import solo
from tests.unit.test_checkpoint import Job, names, resumed


def files(run_dir: Path) -> dict[str, bytes]:
    root = run_dir / "checkpoints"
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def with_write(job: Job, before: Callable[[], object]) -> None:
    """Let what is written behind the training call `before` first."""
    stage = job.role.stage

    def changed(folder: Path) -> Callable[[Callable[[], object]], list[Path]]:
        write = stage(folder)
        return lambda on_progress: (before(), write(on_progress))[1]

    job.role.stage = changed


def test_it_has_the_bytes_of_a_plain_one(tmp_path: Path) -> None:
    for name, overlap in (("plain", False), ("behind", True)):
        with solo() as world:
            job = Job(world, tmp_path / name, overlap=overlap, keep=9, every=2)
            for step in range(1, 8):
                job.role.train()
                job.part.held = {"cursor": step}
                job.saver.maybe_save(step, last=step == 7)
    assert files(tmp_path / "behind") == files(tmp_path / "plain")
    assert names(tmp_path / "behind") == ["latest", *(f"step-00000{step}" for step in (2, 4, 6, 7))]


def test_it_counts_after_the_next_step_and_holds_its_own(tmp_path: Path) -> None:
    """Training changes tensors in place while the thread has written none of them."""
    trained = threading.Event()
    with solo() as world:
        job = Job(world, tmp_path, overlap=True, every=2)
        with_write(job, trained.wait)
        job.train(1, 2)
        wanted = job.role.tensors["w"].clone()
        assert not [name for name in names(tmp_path) if name.startswith(("step", "latest"))]
        job.role.train()
        trained.set()
        job.saver.maybe_save(3)
    assert names(tmp_path) == ["latest", "step-000002"]
    step, after = resumed(tmp_path)
    assert step == after.role.updates == after.part.held["cursor"] == 2
    assert torch.equal(after.role.tensors["w"], wanted) and not torch.equal(job.role.tensors["w"], wanted)


def test_a_full_disk_is_an_error_of_the_step_that_seals(tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with solo() as world:
        job = Job(world, tmp_path, overlap=True)
        job.train(1, 1)
        with_write(job, full)
        job.train(2, 2)
        with pytest.raises(UserError, match="step-000002 could not be written: No space left on device"):
            job.train(3, 3)
    assert names(tmp_path) == ["latest", "step-000001"]
    assert resumed(tmp_path)[0] == 1


def test_waiting_for_it_is_progress_where_it_comes_on_and_training_beside_it_is_none() -> None:
    moved, looked, go = [], threading.Event(), threading.Event()

    def write(on_progress: Callable[[], object]) -> str:
        on_progress()
        looked.set()
        assert go.wait(60)
        on_progress()
        looked.wait(2.5)
        return "written"

    unsealed = Unsealed(1, Path("none"), write)
    assert looked.wait(60)
    looked.clear()
    assert not moved
    go.set()
    assert unsealed.result(lambda: moved.append(1)) == "written" and len(moved) == 1
