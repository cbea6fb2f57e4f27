"""`Publisher`: sends the trainer's weights to engines, and proves that they arrived.

Every rank with an engine checks that each name came once, with equal bytes on all ranks and in the engine, if stored as
given (not fused, transposed or quantized); and that the engine's logprobs are the trainer's. Faults are gathered, so
that ranks raise together.
"""

import time
from contextlib import nullcontext
from itertools import pairwise
from typing import TypeVar

from spmd_rl.base.errors import RunFailed
from spmd_rl.distributed import World
from spmd_rl.engine.base import Engine
from spmd_rl.train.base import Metrics, PolicyRole
from spmd_rl.weights import probe
from spmd_rl.weights.collective import Buckets
from spmd_rl.weights.quantized import quantized
from spmd_rl.weights.stream import WeightStream

T = TypeVar("T")
WEIGHTS, PROBE, VERDICT = "publish: weights", "publish: probe", "publish: verdict"
"""Collectives of a publish after its buckets; the last is the trainer ranks'"""


class Publisher:
    """Publisher of a policy's weights; call it with their version."""

    def __init__(
        self,
        policy: PolicyRole,
        world: World,
        engine: Engine | None,
        probe_every: int = 1,
        quantization: str | None = None,
        buckets: Buckets | None = None,
        everyone: World | None = None,
    ) -> None:
        """world: trainer ranks. engine: of this process, which gets each tensor as it is gathered.

        probe_every: the first publish is probed, and versions divisible by this; 0: only the first. quantization: see
        `quantized`. buckets: to engines of other ranks, if any. everyone: trainer ranks and those; by default `world`.
        """
        self._policy, self._world, self._engine, self._buckets = policy, world, engine, buckets
        self._everyone = everyone or world
        self._probe_every, self._probed_once = probe_every, False
        self._quantization, self._limit = quantization, probe.FIRST_QUANTIZED if quantization else 0.0

    def is_probed(self, version: int) -> bool:
        """Return True if this version's publish is probed."""
        return not self._probed_once or (self._probe_every > 0 and version % self._probe_every == 0)

    def __call__(self, version: int) -> Metrics:
        """[all] Publish; later tokens are of `version`. RunFailed: for weights on all ranks, for logprobs on trainers.

        Returns the maximum over ranks of `publish/bytes`, `publish/seconds` with its parts `publish/gather_seconds`
        (trainer), `publish/copy_seconds` (engine's loader, broadcasts), `publish/hash_seconds` and
        `publish/probe_seconds`; if probed, `publish/probe_abs_diff`, the largest mean absolute difference of an
        engine's logprobs, in nats.
        """
        probed, everyone, engine = self.is_probed(version), self._everyone, self._engine
        found: Metrics = {}
        with self._world.phase("publish"):
            clock = [time.perf_counter()]
            with engine.awake() if engine else nullcontext():
                stream, fault = self._send(version)  # [all]
                clock.append(time.perf_counter())
                fault = fault or (stream.difference(engine) if engine else "")
                check_digests(everyone, version, fault, stream.digest())  # [all]
                clock.append(time.perf_counter())
                answers, fault = probe.ask(engine, version) if probed and engine else ([], "")
            # The KV cache is free again before `_judge` loads the trainer's weights; the native engine's weights are
            # too, others' stay until `sleep`.
            if probed:
                of_ranks = gather_or_raise(everyone, PROBE, version, fault, answers, list[probe.Answer])  # [all]
                limit = max(self._limit, probe.LIMITS[stream.dtype])
                found["publish/probe_abs_diff"], fault = self._judge(of_ranks, limit)  # [all]
                if self._quantization and not self._probed_once:
                    self._limit = probe.LATER_FACTOR * found["publish/probe_abs_diff"]
                self._probed_once = True
            clock.append(time.perf_counter())
            send_seconds, compare_seconds, probe_seconds = (b - a for a, b in pairwise(clock))
            metrics = found | {
                "publish/bytes": float(stream.num_bytes),
                "publish/seconds": clock[-1] - clock[0],
                "publish/gather_seconds": stream.wait_seconds,
                "publish/copy_seconds": send_seconds - stream.wait_seconds - stream.hash_seconds,
                "publish/hash_seconds": stream.hash_seconds + compare_seconds,
                "publish/probe_seconds": probe_seconds,
            }
            of_ranks = gather_or_raise(self._world, VERDICT, version, fault, metrics, Metrics)  # [all]
            return {key: max(theirs[key] for theirs in of_ranks) for key in metrics}

    def _send(self, version: int) -> tuple[WeightStream, str]:
        """[all] Send all weights; return the stream, read to its end, and a fault, if any."""
        fault = ""
        with self._world.journal.kind("copy"), self._policy.awake():
            given = quantized(self._policy.weights(), self._quantization)
            stream = WeightStream(given, self._world.device, self._world.progress)
            weights = self._buckets.send(stream) if self._buckets else iter(stream)
            try:
                if self._engine:
                    self._engine.load(weights, version)  # [all]
            except RunFailed as error:
                fault = str(error)
            # The gather is a collective: other ranks wait in it, so an engine's error must not end it early.
            for _ in weights:  # [all]
                pass
        return stream, fault or stream.fault

    def _judge(self, of_ranks: list[list[probe.Answer]], limit: float) -> tuple[float, str]:
        """[all] Return this rank's largest difference between engines and trainer, and a fault above the limit."""
        by_engine = {f"rank {rank}": answers for rank, answers in enumerate(of_ranks) if answers}
        with self._policy.awake():
            differences = probe.judge(self._policy, by_engine)  # [all]
        for name, difference in differences.items():
            # Not `difference > limit`, which a NaN would pass.
            if not difference <= limit:
                fault = f"the engine's logprobs are {difference:.3g} from the trainer's on average (limit {limit:g})"
                return difference, fault if name == f"rank {self._everyone.rank}" else f"{fault}, on {name}"
        return max(differences.values(), default=0.0), ""


def check_digests(everyone: World, version: int, fault: str, digest: bytes) -> None:
    """[all] Raise RunFailed on every rank for a fault, or if ranks got different bytes."""
    digests = gather_or_raise(everyone, WEIGHTS, version, fault, digest, bytes)  # [all]
    odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if odd:
        raise RunFailed(f"publish of version {version}: ranks {odd} got other weights than rank 0")


def gather_or_raise(everyone: World, name: str, version: int, fault: str, record: T, type: type[T]) -> list[T]:
    """[all] Gather records by rank; raise RunFailed on every rank for a fault."""
    records = everyone.gather(name, [fault, record], tuple[str, type])  # [all]
    for rank, (found, _) in enumerate(records):
        if found:
            raise RunFailed(f"publish of version {version}, rank {rank}: {found}")
    return [record for _, record in records]
