"""`StateFiles`: a role's sharded tensors to and from a folder, with `torch.distributed.checkpoint` (DCP).

    written = StateFiles(world).save(role.state_dict(), folder)  # [all]

Tensors may be of any dtype and lie on any mesh: DCP writes each piece once, and reads what another number of ranks has
written. `SavedState` and `write_state` do without ranks, one tensor at a time.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

from spmd_rl.distributed import World
from spmd_rl.errors import UserError, one_line
from spmd_rl.train.fsdp2.metadata import read_metadata

State = dict[str, dict[str, Tensor]]
"""Tensors by part (`model`, `optimizer`) and name."""


class StateFiles:
    """Saves and loads the tensors of one role over the ranks of its world."""

    def __init__(self, world: World) -> None:
        """[all] Form a process group: DCP's collectives must not mix with training's, and are not NCCL's business."""
        self._world = world
        self._group = world.process_group("checkpoint", "gloo")  # [all]

    def save(self, state: State, folder: Path) -> list[Path]:
        """[all] Write each rank's part of `state` into the existing, empty `folder`; the files that this rank wrote.

        OSError on every rank if a write failed on any.
        """
        planner, writer = _SavePlanner(self._world.progress), _Writer(folder)
        try:
            with self._world.collective("save: shards", "copy"):
                dcp.save(state, storage_writer=writer, planner=planner, **self._meeting())
        except CheckpointException as failed:
            raise _cause(failed) from failed
        written = [folder / name for name in sorted(writer.written)]
        return [*written, folder / ".metadata"] if self._world.rank == 0 else written

    def load(self, state: State, folder: Path, elsewhere: Collection[str] = ()) -> None:
        """[all] Fill the tensors of `state` in place, whatever the number of ranks that wrote them.

        elsewhere: names, as `part.name`, of tensors that other ranks load, and that `state` may lack.
        ValueError on every rank if the names or shapes in `folder` are not those of `state` and `elsewhere`; OSError on
        every rank if a read failed on any.
        """
        planner = _LoadPlanner(self._world.progress, frozenset(elsewhere))
        try:
            with self._world.collective("restore: shards", "copy"):
                dcp.load(state, storage_reader=_Reader(folder), planner=planner, **self._meeting())
        except CheckpointException as failed:
            cause = _cause(failed)
            if isinstance(cause, OSError | UserError):
                raise cause from failed
            raise ValueError(f"{folder} does not fit this model: {' '.join(str(cause).split())}") from failed

    def _meeting(self) -> dict[str, Any]:
        return {"process_group": self._group, "no_dist": self._group is None}


class SavedState:
    """The tensors that ranks have saved in a folder, whole and one at a time, for one process alone.

    saved = SavedState(folder)
    saved.read("model.lm_head.weight")
    """

    def __init__(self, folder: Path) -> None:
        """OSError if `folder` holds no such state, UserError if what it holds is damaged."""
        self._reader = _Reader(folder)
        found = self._reader.read_metadata().state_dict_metadata
        self.tensors = {name: torch.empty(t.size, dtype=t.properties.dtype, device="meta") for name, t in found.items()}
        """By name as `part.name`: shapes and dtypes, on the meta device."""

    def read(self, name: str) -> Tensor:
        """One tensor, whole, on the CPU. Twice its memory is needed where one rank has written all of it.

        UserError if what is stored is damaged.
        """
        whole = torch.empty_like(self.tensors[name], device="cpu")
        try:
            with _alone():
                dcp.load({name: whole}, storage_reader=self._reader, no_dist=True)
        except CheckpointException as failed:
            raise UserError(f"{self._reader.path}: {name} cannot be read: {one_line(_cause(failed))}") from failed
        return whole


def write_state(folder: Path, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
    """Write what `StateFiles.load` loads into the existing folder, holding one tensor at a time.

    tensors: by name as `part.name`, on the meta device. read: gives each of them, on the CPU. OSError if a write fails.
    """
    state: State = {}
    for name, tensor in tensors.items():
        part, _, key = name.partition(".")
        state.setdefault(part, {})[key] = tensor
    writer = _Writer(folder, single_file_per_rank=False)  # torch holds all that goes into a file until it is written
    try:
        with _alone():
            dcp.save(state, storage_writer=writer, planner=_ReadingPlanner(read), no_dist=True)
    except CheckpointException as failed:
        raise _cause(failed) from failed


@contextmanager
def _alone() -> Iterator[None]:
    """DCP warns where it has no process group, which is what is wanted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _Reader(dcp.FileSystemReader):
    """Reads the table of tensors once, and not for every tensor, without running what a stranger may have put there."""

    @cached_property
    def _table(self) -> Metadata:
        return read_metadata(Path(self.path))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._table


class _ReadingPlanner(DefaultSavePlanner):
    """Gets a tensor when it is its turn to be written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def resolve_data(self, write_item: Any) -> Any:
        return self._read(write_item.index.fqn)


class _Writer(dcp.FileSystemWriter):
    """Raises the OSError behind a failed write, over which torch's serialiser raises a RuntimeError of its own."""

    written: frozenset[str] = frozenset()
    """Names of the files that this rank has written."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if not plan.items:  # torch would leave an empty file
            nothing: torch.futures.Future[list[Any]] = torch.futures.Future()
            nothing.set_result([])
            return nothing
        try:
            results = super().write_data(plan, planner)
        except RuntimeError as failed:
            raise _os_error(failed) or failed from None
        self.written = frozenset(result.storage_data.relative_path for result in results.value())
        return results


class _SavePlanner(DefaultSavePlanner):
    """Reports progress at every tensor, so that a long write is not taken for a stall."""

    def __init__(self, progress: Callable[[], object]) -> None:
        super().__init__()
        self._progress = progress

    def resolve_data(self, write_item: Any) -> Any:
        self._progress()
        return super().resolve_data(write_item)


class _LoadPlanner(DefaultLoadPlanner):
    """Reports progress at every tensor, and refuses a checkpoint whose tensors are not those asked for."""

    def __init__(self, progress: Callable[[], object], elsewhere: frozenset[str]) -> None:
        super().__init__()
        self._progress, self._elsewhere = progress, elsewhere

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        wanted = self.state_dict.keys() | self._elsewhere
        if odd := sorted(wanted ^ metadata.state_dict_metadata.keys()):
            whose = "this model has" if odd[0] in wanted else "the checkpoint has"
            raise ValueError(f"only {whose} {odd[0]} ({len(odd)} names differ)")

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        self._progress()
        super().commit_tensor(read_item, tensor)


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
