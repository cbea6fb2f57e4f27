"""`StagingPublisher`: the trainer's end of the weight road: it keeps a version where generating ranks can fetch it.

The ranks that train share out the tensors, so that no rank holds more than its part of a copy. What is announced, once
all of them have theirs, is the version's number, how many tensors it has, and a digest over all of them.
"""

import time
from itertools import pairwise

import msgspec
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from spmd_rl.config.sections.run import PublishConfig
from spmd_rl.errors import RunFailed
from spmd_rl.split import messages
from spmd_rl.split.exchange import Staged, with_delta
from spmd_rl.split.pace import due
from spmd_rl.split.sides import TrainSide
from spmd_rl.sync import probe
from spmd_rl.train.base import Metrics, TrainBackend

NEWEST = "split: newest version"
"""Key, in the store of all ranks, of the announcement of the newest version."""


class Announcement(msgspec.Struct, array_like=True):
    """What is said of a version that can be fetched."""

    version: int
    num_pieces: int
    digest: bytes
    """Over the digests of all pieces, in order."""
    probed: bool
    """Whether the trainer waits for answers of engines that have loaded it."""


class ProbePart(msgspec.Struct, array_like=True):
    """What the engine of a generating rank answers to the probe."""

    answers: list[probe.Answer]
    """One for each of the probe's prompts."""


class StagingPublisher:
    """Publishes a policy to generating ranks, as `sync.Publisher` does to an engine in the same process."""

    def __init__(self, policy: TrainBackend, side: TrainSide, store: dist.Store, settings: PublishConfig) -> None:
        """store: that of all ranks. While a publish is probed, training waits for the engines' answers."""
        self._policy, self._world, self._exchange, self._senders = policy, side.world, side.exchange, side.mine
        self._store, self._probe_every, self._deltas = store, settings.probe_every, settings.delta
        self._base: messages.Base | None = None
        """The version that was staged last, where deltas are made."""
        self._before: dict[int, Staged] = {}
        """This rank's share of it."""
        self._probed_once = False
        self._dtype: torch.dtype | None = None
        """Of the last floating tensor of the weights."""

    def __call__(self, version: int) -> Metrics:
        """[all] that train: stage `version` and announce it. RunFailed, on all alike, if an engine means others.

        Metrics, equal on all ranks: `publish/bytes`, `publish/seconds`, and where it is probed `publish/probe_abs_diff`
        and `publish/probe_seconds`, in which the engines' answers were waited for and judged. Where there are deltas,
        `publish/delta_bytes`, which a generating rank with the version before fetches instead, and their share,
        `publish/delta_share`.
        """
        probed = not self._probed_once or due(version, self._probe_every)
        with self._world.phase("publish"):
            clock = [time.perf_counter()]
            with self._policy.awake():
                announcement, num_bytes, own_bytes = self._stage(version, probed)  # [all]
            sent_bytes = self._announce(announcement, own_bytes)  # [all]
            clock.append(time.perf_counter())
            metrics: Metrics = {}
            if self._base is not None:
                metrics |= {"publish/delta_bytes": sent_bytes, "publish/delta_share": sent_bytes / max(num_bytes, 1)}
            if self._deltas:
                self._base = messages.Base(version, announcement.digest)
            if probed:
                metrics["publish/probe_abs_diff"] = self._probe(version)  # [all]
                self._probed_once = True
            clock.append(time.perf_counter())
            seconds, probe_seconds = (b - a for a, b in pairwise(clock))
            own = {"publish/seconds": seconds + probe_seconds, "publish/probe_seconds": probe_seconds}
            metrics |= self._world.reduce("publish: seconds", own, "max")  # [all]
        return metrics | {"publish/bytes": float(num_bytes)}

    def _stage(self, version: int, probed: bool) -> tuple[Announcement, int, int]:
        """[all] Keep this rank's share of the weights; what is to be said of all of them, and their bytes.

        Last, the bytes of this rank's share as it goes to those who have the version before.
        """
        pieces, whole, num_pieces, num_bytes = {}, xxhash.xxh3_128(), 0, 0
        for index, (name, tensor) in enumerate(self._policy.weights()):  # [all]
            payload = _bytes(tensor)
            digest = messages.digest(payload)
            whole.update(name.encode() + digest)
            self._dtype = tensor.dtype if tensor.is_floating_point() else self._dtype
            num_pieces, num_bytes = index + 1, num_bytes + payload.nbytes
            if index % self._world.size == self._world.rank:
                dtype = str(tensor.dtype).removeprefix("torch.")
                piece = Staged(name, dtype, list(tensor.shape), memoryview(bytes(payload)), digest)
                pieces[index] = with_delta(piece, self._before.get(index))
            self._world.progress()
        waiting = self._world.journal.waiting("publish: an older version is fetched")
        self._exchange.stage(version, pieces, self._base, waiting)
        self._before = pieces if self._deltas else {}
        own_bytes = sum(len(piece.delta.payload) if piece.delta else piece.payload.nbytes for piece in pieces.values())
        return Announcement(version, num_pieces, whole.digest(), probed), num_bytes, own_bytes

    def _announce(self, announcement: Announcement, own_bytes: int) -> int:
        """[all] Say so once all ranks have their share; the sum of `own_bytes`. RunFailed if they saw other weights."""
        told = self._world.gather("publish: staged", (announcement.digest, own_bytes), tuple[bytes, int])  # [all]
        digests = [digest for digest, _ in told]
        odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if odd:
            raise RunFailed(f"publish of version {announcement.version}: ranks {odd} have other weights than rank 0")
        if self._world.rank == 0:
            self._store.set(NEWEST, msgspec.msgpack.encode(announcement))
        return sum(count for _, count in told)

    def _probe(self, version: int) -> float:
        """[all] The largest difference between an engine's logprobs and the trainer's, in nats."""
        delivered = self._delivered(version)
        answers = {sender: msgspec.msgpack.decode(payload, type=ProbePart) for sender, payload in delivered.items()}
        parts = self._world.gather("publish: probe", sorted(answers.items()), list[tuple[int, ProbePart]])  # [all]
        by_sender = dict(sorted(pair for theirs in parts for pair in theirs))
        with self._policy.awake():
            differences = probe.judge(self._policy, [part.answers for part in by_sender.values()])  # [all]
        assert self._dtype is not None, "a version has been staged"
        limit = probe.LIMITS[self._dtype]
        told = {str(rank): difference for rank, difference in differences.items()}
        verdicts = self._world.gather("publish: verdict", told, dict[str, float])  # [all]
        for theirs in verdicts:
            for rank, difference in theirs.items():
                if not difference <= limit:  # a NaN is no success
                    raise RunFailed(
                        f"publish of version {version}: the logprobs of generating rank {rank} are {difference:.3g} "
                        f"from the trainer's on average (limit {limit:g})"
                    )
        return max((difference for theirs in verdicts for difference in theirs.values()), default=0.0)

    def _delivered(self, version: int) -> dict[int, bytes]:
        """What the engines whose answers come to this rank have answered to the probe, by sender."""
        with self._world.journal.waiting("publish: answers of engines"):
            return self._exchange.take("probe", version, self._senders)


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, on the CPU; valid as long as the tensor is."""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
