"""`WeightReceiver`: which version of the policy a generating rank's engine holds, and how a newer one gets there.

It is announced, fetched from the ranks that train, given to the engine, and proven there.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

import msgspec
import xxhash
from torch import Tensor

from spmd_rl.distributed import World
from spmd_rl.engine.base import Engine
from spmd_rl.errors import RunFailed
from spmd_rl.weights import probe
from spmd_rl.weights.client import WeightClient
from spmd_rl.weights.delta import DeltaBase
from spmd_rl.weights.messages import Announcement
from spmd_rl.weights.replica_broadcast import NamedTensor, ReplicaBroadcast
from spmd_rl.weights.stream import WeightStream


class WeightReceiver:
    """What a generating rank receives. The first rank of a replica fetches for all of them."""

    def __init__(
        self,
        engine: Engine,
        replica: ReplicaBroadcast,
        world: World,
        newest: Callable[[], Announcement | None],
        report: Callable[[int, bytes], object],
        deltas: bool,
    ) -> None:
        """replica: carries weights from its first rank to the others. world: of the ranks that generate.

        newest: the newest version that has been announced. report: delivers the answer to the probe of a version.
        deltas: keep a copy of what is loaded, so that only what has changed since need be fetched.
        """
        self.engine, self.replica, self.newest = engine, replica, newest
        self._world, self._report = world, report
        self._base = DeltaBase() if deltas and replica.leads else None
        self.version = -1
        """What the engine holds; -1: nothing yet."""

    def waiting(self, version: int) -> AbstractContextManager[object]:
        """While this rank waits inside, a hang report says for which version."""
        return self._world.journal.waiting(f"publish: version {version} from ranks that train")

    def fetch(self, newest: Announcement, client: WeightClient) -> Iterator[NamedTensor]:
        """Yield the pieces of a version, which the client holds: on the first rank of a replica."""
        return client.fetch(newest.version, newest.num_tensors, self._base)

    def load(self, newest: Announcement, pieces: Iterable[NamedTensor] | None, client: WeightClient | None) -> None:
        """[all] of a replica: give a version to the engine, and prove that it is what was announced.

        pieces: on its first rank. client: which fetches, or has fetched them. RunFailed if anything differs.
        """
        answers, whole = [], xxhash.xxh3_128()

        def arriving() -> Iterable[tuple[str, Tensor]]:
            for name, tensor, digest in self.replica.carry(pieces):  # [all] of the replica
                whole.update(name.encode() + digest)
                yield name, tensor

        with self._world.phase("publish"), self.engine.awake():
            stream = WeightStream(arriving(), self._world.device, self._world.progress)
            self.engine.load(stream, newest.version)  # [all] of the replica
            for _ in stream:  # whatever the engine left
                pass
            fault = stream.difference(self.engine)
            if whole.digest() != newest.digest:
                fault = "other weights have arrived than the trainers announced"
            if not fault and newest.probed:
                answers, fault = probe.ask(self.engine, newest.version)
            if fault:
                raise RunFailed(f"publish of version {newest.version}, generating rank {self._world.rank}: {fault}")
            if self._base:
                self._base.complete(newest.version, newest.digest)
            num_bytes = client.num_bytes if client else 0
            self._world.journal.note("fetched", version=newest.version, bytes=num_bytes, whole=stream.num_bytes)
        self.version = newest.version
        if newest.probed:
            self._report(newest.version, msgspec.msgpack.encode(answers))
