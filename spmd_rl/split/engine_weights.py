"""`EngineWeights`: which version of the policy a generating rank's engine holds, and how a newer one gets there.

It is announced in the store of all ranks, fetched from the ranks that train, given to the engine, and proven there.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

import msgspec
import xxhash
from torch import Tensor

from spmd_rl.distributed import World
from spmd_rl.engine import Engine
from spmd_rl.errors import RunFailed
from spmd_rl.split.courier import Courier
from spmd_rl.split.kept import Kept
from spmd_rl.split.publisher import Announcement, ProbePart
from spmd_rl.split.replica_road import Piece, ReplicaRoad
from spmd_rl.sync import WeightStream, difference, probe


class EngineWeights:
    """One rank's. The first rank of a replica fetches for all of them."""

    def __init__(
        self,
        engine: Engine,
        road: ReplicaRoad,
        world: World,
        newest: Callable[[], Announcement | None],
        courier: Courier,
        deltas: bool,
    ) -> None:
        """road: from the first rank of the replica to the others. world: of the ranks that generate.

        newest: the newest version that has been announced. courier: which delivers answers to probes. deltas: keep a
        copy of what is loaded, so that only what has changed since need be fetched.
        """
        self.engine, self.road, self.newest = engine, road, newest
        self._world, self._courier = world, courier
        self._kept = Kept() if deltas and road.leads else None
        self.version = -1
        """What the engine holds; -1: nothing yet."""

    def waiting(self, version: int) -> AbstractContextManager[object]:
        """While this rank waits inside, a hang report says for which version."""
        return self._world.journal.waiting(f"publish: version {version} from ranks that train")

    def fetch(self, newest: Announcement, courier: Courier) -> Iterator[Piece]:
        """Yield the pieces of a version, which the courier holds: on the first rank of a replica."""
        return courier.fetch(newest.version, newest.num_pieces, self._kept)

    def load(self, newest: Announcement, pieces: Iterable[Piece] | None, courier: Courier | None = None) -> None:
        """[all] of a replica: give a version to the engine, and prove that it is what was announced.

        pieces: on its first rank. courier: which fetches, or has fetched them, unless it is the one that delivers.
        RunFailed if anything differs.
        """
        answers, whole = [], xxhash.xxh3_128()

        def arriving() -> Iterable[tuple[str, Tensor]]:
            for name, tensor, digest in self.road.carry(pieces):  # [all] of the replica
                whole.update(name.encode() + digest)
                yield name, tensor

        with self._world.phase("publish"), self.engine.awake():
            stream = WeightStream(arriving(), self._world.device, self._world.progress)
            self.engine.load(stream, newest.version)  # [all] of the replica
            for _ in stream:  # whatever the engine left
                pass
            fault = difference(self.engine, stream, self._world.device)
            if whole.digest() != newest.digest:
                fault = "other weights have arrived than the trainers announced"
            if not fault and newest.probed:
                answers, fault = probe.ask(self.engine, newest.version)
            if fault:
                raise RunFailed(f"publish of version {newest.version}, generating rank {self._world.rank}: {fault}")
            if self._kept:
                self._kept.complete(newest.version, newest.digest)
            arrived = {"bytes": (courier or self._courier).num_bytes, "whole": stream.num_bytes}
            self._world.journal.note("fetched", version=newest.version, **arrived)
        self.version = newest.version
        if newest.probed:
            with self._world.journal.waiting(f"probe {newest.version}: handed over"):
                self._courier.deliver("probe", newest.version, msgspec.msgpack.encode(ProbePart(answers)))
