"""`Publisher`: sends the trainer's weights to engines, and proves that they arrived.

Whatever the transport: each name once, the same bytes on all ranks, the same bytes in the engine where it keeps them
plain, and logprobs of the engine's own answers as the trainer computes them. Nothing that one rank finds makes it leave
alone: findings are gathered, and all ranks stop with the same line.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import TypeVar

from spmd_rl.distributed import World
from spmd_rl.errors import RunFailed
from spmd_rl.train.base import Metrics, PolicyRole
from spmd_rl.weights import probe
from spmd_rl.weights.quantized import quantized
from spmd_rl.weights.stream import WeightStream
from spmd_rl.weights.transport import Transport

T = TypeVar("T")
Answers = dict[str, list[probe.Answer]]


class Publisher:
    """Publishes the weights of one policy to engines. Call it with the version that they become."""

    def __init__(
        self,
        policy: PolicyRole,
        world: World,
        transports: Sequence[Transport],
        probe_every: int = 1,
        quantization: str | None = None,
    ) -> None:
        """world: of the ranks that train. transports: all weights go through each of them, in one pass.

        probe_every: the first publish is probed, and every one whose version is divisible by this; 0: the first alone.
        quantization: one of `quantized.FORMATS`, as which weights are rounded on their way.
        """
        assert not any(one.engine for one in transports[:-1]), (
            "only the last transport may have an engine, which leaves no weights to another"
        )
        self._policy, self._world, self._transports = policy, world, transports
        self._engines = [transport.engine for transport in transports if transport.engine]
        self._probe_every, self._probed_once = probe_every, False
        self._quantization, self._limit = quantization, probe.FIRST_QUANTIZED if quantization else 0.0

    def __call__(self, version: int) -> Metrics:
        """[all] Publish; later tokens are of `version`. RunFailed, on all ranks alike, if anything differs.

        Metrics, equal on all ranks (the slowest rank's seconds): `publish/bytes`, `publish/seconds` and its parts
        `publish/gather_seconds` (trainer), `publish/copy_seconds` (the engine's loader, or copies for those that
        fetch), `publish/hash_seconds` and `publish/probe_seconds`; where it is probed, `publish/probe_abs_diff`, the
        largest mean absolute difference of an engine's logprobs, in nats; and what transports add (`Served`).
        """
        probed = not self._probed_once or (self._probe_every > 0 and version % self._probe_every == 0)
        found: Metrics = {}
        with self._world.phase("publish"):
            clock = [time.perf_counter()]
            with ExitStack() as awake:
                for engine in self._engines:
                    awake.enter_context(engine.awake())
                stream, fault = self._send(version)  # [all]
                clock.append(time.perf_counter())
                for engine in self._engines:
                    fault = fault or stream.difference(engine)
                self._agree(version, fault, stream.digest())  # [all]
                clock.append(time.perf_counter())
                for transport in self._transports:
                    found |= transport.announce(version, probed, stream.num_bytes)  # [all]
                clock.append(time.perf_counter())
                answers, fault = self._ask(version) if probed else ({}, "")  # [all]
            # The engine may sleep again before the trainer's weights wake to judge its answers. In `_send` both are
            # awake, the native engine with its KV cache; vLLM's comes with the first request.
            if probed:
                of_ranks = self._decide("publish: probe", version, fault, answers, Answers)  # [all]
                limit = max(self._limit, probe.LIMITS[stream.dtype])
                found["publish/probe_abs_diff"], fault = self._judge(of_ranks, limit)  # [all]
                if self._quantization and not self._probed_once:
                    self._limit = probe.LATER_FACTOR * found["publish/probe_abs_diff"]
                self._probed_once = True
            clock.append(time.perf_counter())
            send_seconds, compare_seconds, announce_seconds, probe_seconds = (b - a for a, b in pairwise(clock))
            metrics = found | {
                "publish/bytes": float(stream.num_bytes),
                "publish/seconds": clock[-1] - clock[0],
                "publish/gather_seconds": stream.wait_seconds,
                "publish/copy_seconds": send_seconds - stream.wait_seconds - stream.hash_seconds + announce_seconds,
                "publish/hash_seconds": stream.hash_seconds + compare_seconds,
                "publish/probe_seconds": probe_seconds,
            }
            of_ranks = self._decide("publish: verdict", version, fault, metrics, Metrics)  # [all]
            return {key: max(theirs[key] for theirs in of_ranks) for key in metrics}

    def _send(self, version: int) -> tuple[WeightStream, str]:
        """[all] Send all weights; the stream, read to its end, and what went wrong or nothing."""
        fault = ""
        with self._world.journal.kind("copy"), self._policy.awake():
            given = quantized(self._policy.weights(), self._quantization)
            stream = WeightStream(given, self._world.device, self._world.progress)
            weights = iter(stream)
            for transport in self._transports:
                weights = transport.send(weights, version)
            try:
                for _ in weights:  # [all]
                    pass
            except RunFailed as error:
                fault = str(error)
            for _ in stream:  # [all] whatever was left after a fault: the other ranks gather with us
                pass
        return stream, fault or (f"{stream.repeated[0]} was handed over twice" if stream.repeated else "")

    def _agree(self, version: int, fault: str, digest: bytes) -> None:
        """[all] RunFailed on every rank if any found a fault, or if the ranks were handed different bytes."""
        digests = self._decide("publish: weights", version, fault, digest, bytes)  # [all]
        odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if odd:
            raise RunFailed(f"publish of version {version}: ranks {odd} were handed other weights than rank 0")

    def _ask(self, version: int) -> tuple[Answers, str]:
        """[all] What engines answer to the probe, as far as it comes to this rank, and what is wrong with it."""
        found = [transport.probe(version) for transport in self._transports]  # [all]
        answers = {name: theirs for answers, _ in found for name, theirs in answers.items()}
        return answers, next((fault for _, fault in found if fault), "")

    def _judge(self, of_ranks: list[Answers], limit: float) -> tuple[float, str]:
        """[all] The largest difference that this rank finds between engines and trainer, and what is wrong with it."""
        by_engine = {name: answers for theirs in of_ranks for name, answers in theirs.items()}
        with self._policy.awake():
            differences = probe.judge(self._policy, by_engine)  # [all]
        for name, difference in differences.items():
            if not difference <= limit:  # a NaN is no success
                fault = f"the engine's logprobs are {difference:.3g} from the trainer's on average (limit {limit:g})"
                return difference, fault if name == f"rank {self._world.rank}" else f"{fault}, on {name}"
        return max(differences.values(), default=0.0), ""

    def _decide(self, name: str, version: int, fault: str, record: T, type: type[T]) -> list[T]:
        """[all] Every rank's record, by rank; RunFailed on every rank if any found a fault."""
        records = self._world.gather(name, [fault, record], tuple[str, type])  # [all]
        for rank, (found, _) in enumerate(records):
            if found:
                raise RunFailed(f"publish of version {version}, rank {rank}: {found}")
        return [record for _, record in records]
