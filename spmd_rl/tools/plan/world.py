"""`PlannedWorld`: one rank's view of a world whose other ranks do not exist.

    with planned_world(rank=0, size=256) as world:
        layout = Layout(world, ep=8)

Its process groups are torch's fake ones, without traffic: collectives return as if all ranks had sent this rank's data.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from spmd_rl.distributed import World
from spmd_rl.distributed.collectives import Reduction
from spmd_rl.distributed.journal import Journal
from spmd_rl.distributed.membership import Membership, Rendezvous


class PlannedWorld(World):
    """A rank of a planned world, made by `planned_world`."""

    def __init__(self, me: Membership, rendezvous: Rendezvous, journal: Journal) -> None:
        super().__init__(me, rendezvous, journal)
        self.on_meeting: Callable[[str], None] = lambda name: None
        """Callback for each collective's name"""
        self.told: dict[str, Any] = {}
        """Data of other ranks, by name of the broadcast or reduction"""

    def subset(self, name: str, ranks: Sequence[int], written: bool = True) -> "PlannedWorld":
        """Return this world: no plan uses some ranks only."""
        assert len(ranks) == self.size
        return self

    def process_group(
        self, name: str, backend: str | None = None, ranks: Sequence[int] | None = None
    ) -> dist.ProcessGroup | None:
        """[all] Form a fake group, whatever the backend."""
        return super().process_group(name, None, ranks)

    def gather(self, name: str, record: Any, type: Any = Any) -> list[Any]:
        """[all] Return this rank's record for each rank."""
        return [msgspec.convert(msgspec.to_builtins(record), type)] * self.size

    def broadcast(self, name: str, record: Any, src: int = 0) -> Any:
        """[all] Return the record in `told`, else this rank's."""
        return self.told.get(name, record)

    def agree(self, name: str, value: Any) -> None:
        """[all] Do nothing: one rank agrees with itself."""

    def reduce(self, name: str, values: Mapping[str, float], op: Reduction = "sum") -> dict[str, float]:
        """[all] Reduce as if each rank had these values, but for `told`."""
        values = {**values, **self.told.get(name, {})}
        return {key: value * (self.size if op == "sum" else 1) for key, value in values.items()}

    def barrier(self, name: str) -> None:
        """[all] Return at once: there are no other ranks."""

    def collective(self, name: str, *args: Any, **kwargs: Any) -> AbstractContextManager[int]:
        """[all] Report the collective to `on_meeting`, and journal it."""
        self.on_meeting(name)
        return super().collective(name, *args, **kwargs)


@contextmanager
def planned_world(rank: int, size: int) -> Iterator[PlannedWorld]:
    """Yield the world of rank `rank` of `size`, on the CPU, in a process without a group.

    The journal is temporary.
    """
    me = Membership(rank, size, 0, 1, node="0", launched=False, device=torch.device("cpu"))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            journal = Journal(Path(temporary) / "journal", rank, size=size)
            yield PlannedWorld(me, Rendezvous(dist.HashStore(), "plan", None), journal)
            journal.close()
    finally:
        dist.destroy_process_group()
        # The cache would give the next world's tensors meshes of this one.
        _clear_sharding_prop_cache()
