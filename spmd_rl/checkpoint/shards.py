"""Tensors to and from disk with `torch.distributed.checkpoint` (DCP), on a process group of its own.

DCP pickles its metadata, so `load` may only see a directory that its manifest has vouched for. A failure on one rank
is DCP's to spread: it raises on every rank, wrapped in a BaseException, which is unwrapped here.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

State = dict[str, dict[str, Any]]


class _Writer(dcp.FileSystemWriter):
    """Says why a write failed: torch's serialiser raises a RuntimeError of its own over the OSError."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as failed:
            raise _os_error(failed) or failed from None


class _SavePlanner(DefaultSavePlanner):
    """Ticks at every tensor, so that a long write is not taken for a stall."""

    def __init__(self, tick: Callable[[], object]) -> None:
        super().__init__()
        self._tick = tick

    def resolve_data(self, write_item: Any) -> Any:
        self._tick()
        return super().resolve_data(write_item)


class _LoadPlanner(DefaultLoadPlanner):
    """The same for reading."""

    def __init__(self, tick: Callable[[], object]) -> None:
        super().__init__()
        self._tick = tick

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        self._tick()
        super().commit_tensor(read_item, tensor)


def save(state: State, path: Path, group: ProcessGroup | None, tick: Callable[[], object]) -> None:
    """[all] Write each rank's share of `state` into the existing directory `path`, flushed to the disk.

    `group` is None where there is no process group at all. OSError on every rank if a write failed on any.
    """
    planner = _SavePlanner(tick)
    try:
        dcp.save(state, storage_writer=_Writer(path), planner=planner, process_group=group, no_dist=group is None)
    except CheckpointException as failed:
        raise _cause(failed) from failed


def load(state: State, path: Path, group: ProcessGroup | None, tick: Callable[[], object]) -> None:
    """[all] Fill the tensors of `state` in place, whatever the number of ranks that wrote them.

    ValueError on every rank where the checkpoint does not fit `state`.
    """
    reader = dcp.FileSystemReader(path)
    try:
        dcp.load(state, storage_reader=reader, planner=_LoadPlanner(tick), process_group=group, no_dist=group is None)
    except CheckpointException as failed:
        cause = _cause(failed)
        if isinstance(cause, OSError):
            raise cause from failed
        raise ValueError(f"{path} does not fit this model: {' '.join(str(cause).split())}") from failed


def _os_error(error: BaseException | None) -> OSError | None:
    """The OSError that `error` was raised over, if any."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _cause(failed: CheckpointException) -> Exception:
    """The failure of the lowest rank, an OSError first: the others often only follow from it."""
    errors = [error for _, (error, _) in sorted(failed.failures.items())]
    first = next((error for error in errors if isinstance(error, OSError)), errors[0])
    return first if isinstance(first, Exception) else RuntimeError(str(first))
