"""`PlannedWorld`: one rank's view of a world whose other ranks are not there.

    with planned_world(rank=0, size=256) as world:
        layout = Layout(world, ep=8)

Its process groups are torch's fake ones, of the right sizes, over which nothing travels. Whatever ranks tell each other
is answered as if all of them said what this one says.
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
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend `fake`

from spmd_rl.distributed import World
from spmd_rl.distributed.collectives import Reduction
from spmd_rl.distributed.journal import Journal
from spmd_rl.distributed.membership import Membership, Rendezvous


class PlannedWorld(World):
    """Where this rank would stand. Made by `planned_world`."""

    def __init__(self, me: Membership, rendezvous: Rendezvous, journal: Journal) -> None:
        super().__init__(me, rendezvous, journal)
        self.on_meeting: Callable[[str], None] = lambda name: None
        """Called with the name of each meeting that the journal would show."""
        self.told: dict[str, Any] = {}
        """What other ranks alone know, by the name of the broadcast or reduction that brings it."""

    def subset(self, name: str, ranks: Sequence[int], written: bool = True) -> "PlannedWorld":
        """This world: nothing is planned over some of its ranks alone."""
        assert len(ranks) == self.size
        return self

    def gather(self, name: str, record: Any, type: Any = Any) -> list[Any]:
        """[all] This rank's record, as if each rank had sent it."""
        return [msgspec.convert(msgspec.to_builtins(record), type)] * self.size

    def broadcast(self, name: str, record: Any, src: int = 0) -> Any:
        """[all] What is `told`, else this rank's record."""
        return self.told.get(name, record)

    def agree(self, name: str, value: Any) -> None:
        """[all] One rank agrees with itself."""

    def reduce(self, name: str, values: Mapping[str, float], op: Reduction = "sum") -> dict[str, float]:
        """[all] As if each rank brought these values, but for those that are `told`."""
        values = {**values, **self.told.get(name, {})}
        return {key: value * (self.size if op == "sum" else 1) for key, value in values.items()}

    def barrier(self, name: str) -> None:
        """[all] Nobody else comes."""

    def collective(self, name: str, *args: Any, **kwargs: Any) -> AbstractContextManager[int]:
        """[all] See `World`."""
        self.on_meeting(name)
        return super().collective(name, *args, **kwargs)


@contextmanager
def planned_world(rank: int, size: int) -> Iterator[PlannedWorld]:
    """The world of rank `rank` of `size`, on the CPU. This process must not be in a process group.

    The journal goes to a directory that is gone afterwards.
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
        _clear_sharding_prop_cache()  # it would give the next world's tensors meshes of this one
