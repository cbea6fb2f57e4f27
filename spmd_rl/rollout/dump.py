"""Rollouts of a run as files, and a run that trains on them without an engine.

    rollouts = Dumped(rollouts, folder, about, world)    # rollout.dump=true: write each collected step
    rollouts = Replayed(folder, prompts, world)          # rollout.replay=RUN: read these steps instead of generating

Dumps hold what training sees, to the bit, but no answers to held-out prompts and no demonstrations. Ranks keep their
samples if their number is the same; otherwise they share the files.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from spmd_rl.base.errors import RunFailed
from spmd_rl.config.replay import ABOUT, step_file
from spmd_rl.data import EnvTasks, Prompts
from spmd_rl.distributed import World
from spmd_rl.rollout.collected import Collected
from spmd_rl.rollout.episode import Sampling
from spmd_rl.rollout.source import RolloutSource
from spmd_rl.rollout.step_plan import GroupSlice
from spmd_rl.types import Group, Prompt
from spmd_rl.types.encoded import pack, unpack


class DumpedStep(msgspec.Struct):
    """Step data that is equal on all ranks."""

    num_ranks: int
    tickets: list[int]
    reasons: dict[int, str]


class Dumped:
    """Rollouts whose steps are written to files."""

    def __init__(self, rollouts: RolloutSource, folder: Path, about: Mapping[str, Any], world: World) -> None:
        """[train] about: settings that a replay must share."""
        self._rollouts, self._folder, self._world = rollouts, folder, world
        self.prompts, self.answer = rollouts.prompts, rollouts.answer
        self.state, self.load_state, self.rest = rollouts.state, rollouts.load_state, rollouts.rest
        folder.mkdir(parents=True, exist_ok=True)
        if world.rank == 0:
            _write(folder / ABOUT, msgspec.json.encode(about))

    def collect(self, step: int) -> Collected:
        """[train] Write each step but one that ends the run."""
        collected = self._rollouts.collect(step)  # [train]
        if not collected.failure:
            path, world, table = step_file(self._folder, step), self._world, collected.table
            used, slices = table.tickets.tolist(), sorted(collected.slices.items())
            _write(_part(path, world.rank), pack([pair for pair in slices if pair[0].ticket in used]))
            if world.rank == 0:
                _write(path, msgspec.json.encode(DumpedStep(world.size, used, table.reasons)))
        return collected


class Replayed:
    """Steps of a dump; stateless."""

    def __init__(self, folder: Path, prompts: Prompts | EnvTasks, world: World) -> None:
        self._folder, self.prompts, self._world = folder, prompts, world

    def collect(self, step: int) -> Collected:
        """[all] Read a step. RunFailed with the file's name if damaged."""
        path, world = step_file(self._folder, step), self._world
        with world.phase("generate"):
            try:
                common = msgspec.json.decode(path.read_bytes(), type=DumpedStep)
                parts = [_part(path, rank).read_bytes() for rank in range(world.rank, common.num_ranks, world.size)]
                slices = dict(pair for part in parts for pair in unpack(part, list[tuple[GroupSlice, Group]]))
            except (OSError, msgspec.MsgspecError, ValueError, TypeError, LookupError) as error:
                raise RunFailed(f"rollout.replay: a file of {path.with_suffix('')} cannot be read: {error}") from None
            return Collected.given(step, slices, common.tickets, world, common.reasons)  # [all]

    def answer(self, prompts: Sequence[Prompt], sampling: Sequence[Sampling]) -> list[Group]:
        """Raise: a replay has no engine."""
        raise AssertionError("a replay evaluates nothing")

    def rest(self) -> None:
        """Do nothing: there is no engine."""

    def state(self) -> dict[str, Any]:
        """See `checkpoint.Stateful`."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """See `checkpoint.Stateful`."""


def _part(path: Path, rank: int) -> Path:
    return path.with_suffix(f".rank-{rank}.bin")


def _write(path: Path, content: bytes) -> None:
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_bytes(content)
    os.replace(draft, path)
