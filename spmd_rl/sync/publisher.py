"""`Publisher`: carries the trainer's weights to the engine, and proves that they arrived.

On every road: each name once, the same bytes on all ranks, the same bytes in the engine where it keeps them plain, and
logprobs of the engine's own answers as the trainer computes them. Nothing that one rank finds makes it leave alone:
findings are gathered, and all ranks stop with the same line.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import TypeVar

import torch

from spmd_rl.distributed import World
from spmd_rl.engine.base import Engine
from spmd_rl.errors import RunFailed
from spmd_rl.model.fingerprint import finish, start
from spmd_rl.sync import probe
from spmd_rl.sync.stream import WeightStream
from spmd_rl.sync.transport import Transport
from spmd_rl.train.base import Metrics, TrainBackend

T = TypeVar("T")


class Publisher:
    """Publishes the weights of one policy to the engines of all ranks. Call it with the version that they become."""

    def __init__(
        self,
        policy: TrainBackend | None,
        engine: Engine | None,
        world: World,
        transport: Transport,
        probe_every: int = 1,
    ) -> None:
        """`world` is all ranks that train or generate; `policy` and `engine` are None on a rank that has none.

        probe_every: the first publish is probed, and every one whose version is divisible by this; 0: the first alone.
        """
        self._policy, self._engine, self._world = policy, engine, world
        self._transport, self._probe_every = transport, probe_every
        self._probed_once = False

    def __call__(self, version: int) -> Metrics:
        """[all] Publish; later tokens are of `version`. RunFailed, on all ranks alike, if anything differs.

        Metrics, equal on all ranks (the slowest rank's seconds): `publish/bytes`, `publish/seconds` and its parts
        `publish/gather_seconds` (trainer and transport), `publish/copy_seconds` (the engine's loader),
        `publish/hash_seconds` and `publish/probe_seconds`; where it is probed, `publish/probe_abs_diff`, the mean
        absolute difference of the logprobs, in nats.
        """
        probed = not self._probed_once or (self._probe_every > 0 and version % self._probe_every == 0)
        answers, found = [], {}
        with self._world.phase("publish"):
            clock = [time.perf_counter()]
            with self._engine_awake():
                stream, fault = self._transfer(version)  # [all]
                clock.append(time.perf_counter())
                fault = fault or (difference(self._engine, stream, self._world.device) if self._engine else "")
                clock.append(time.perf_counter())
                self._agree(version, fault, stream.digest())  # [all]
                if probed and self._engine is not None:
                    answers, fault = probe.ask(self._engine, version)
            # From here on the engine may sleep: the trainer's weights never meet its KV cache on the device.
            if probed:
                by_rank = self._decide("publish: probe", version, fault, answers, list[probe.Answer])  # [all]
                abs_diff, fault = self._judge(by_rank, probe.LIMITS[stream.dtype])  # [all]
                found["publish/probe_abs_diff"] = abs_diff
                self._probed_once = True
            clock.append(time.perf_counter())
            load_seconds, compare_seconds, probe_seconds = (b - a for a, b in pairwise(clock))
            metrics = found | {
                "publish/bytes": float(stream.num_bytes),
                "publish/seconds": clock[-1] - clock[0],
                "publish/gather_seconds": stream.wait_seconds,
                "publish/copy_seconds": load_seconds - stream.wait_seconds - stream.hash_seconds,
                "publish/hash_seconds": stream.hash_seconds + compare_seconds,
                "publish/probe_seconds": probe_seconds,
            }
            of_ranks = self._decide("publish: verdict", version, fault, metrics, Metrics)  # [all]
            return {key: max(theirs[key] for theirs in of_ranks) for key in metrics}

    def _engine_awake(self) -> AbstractContextManager[None]:
        return self._engine.awake() if self._engine is not None else nullcontext()

    def _policy_awake(self) -> AbstractContextManager[None]:
        return self._policy.awake() if self._policy is not None else nullcontext()

    def _transfer(self, version: int) -> tuple[WeightStream, str]:
        """[all] Carry all weights here and load them; the stream, read to its end, and what went wrong or nothing."""
        fault = ""
        with self._world.journal.kind("copy"), self._policy_awake():
            weights = self._policy.weights() if self._policy is not None else None
            stream = WeightStream(self._transport.carry(weights), self._world.device, self._world.progress)
            try:
                if self._engine is not None:
                    self._engine.load(stream, version)  # [all]
            except RunFailed as error:
                fault = str(error)
            for _ in stream:  # [all] whatever our engine left: the other ranks gather with us
                pass
        return stream, fault or (f"{stream.repeated[0]} was handed over twice" if stream.repeated else "")

    def _agree(self, version: int, fault: str, digest: bytes) -> None:
        """[all] RunFailed on every rank if any found a fault, or if the ranks were handed different bytes."""
        digests = self._decide("publish: weights", version, fault, digest, bytes)  # [all]
        odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if odd:
            raise RunFailed(f"publish of version {version}: ranks {odd} were handed other weights than rank 0")

    def _judge(self, by_rank: list[list[probe.Answer]], limit: float) -> tuple[float, str]:
        """[all] The largest difference that this rank finds between engines and trainer, and what is wrong with it."""
        if self._policy is None:
            return 0.0, ""
        with self._policy_awake():
            differences = probe.judge(self._policy, by_rank)  # [all]
        for rank, difference in differences.items():
            if not difference <= limit:  # a NaN is no success
                told = f"the engine's logprobs are {difference:.3g} from the trainer's on average (limit {limit:g})"
                return difference, told if rank == self._world.rank else f"{told}, on rank {rank}"
        return max(differences.values(), default=0.0), ""

    def _decide(self, name: str, version: int, fault: str, record: T, type: type[T]) -> list[T]:
        """[all] Every rank's record, by rank; RunFailed on every rank if any found a fault."""
        records = self._world.gather(name, [fault, record], tuple[str, type])  # [all]
        for rank, (found, _) in enumerate(records):
            if found:
                raise RunFailed(f"publish of version {version}, rank {rank}: {found}")
        return [record for _, record in records]


def difference(engine: Engine, stream: WeightStream, device: torch.device) -> str:
    """Return the first difference between a stream and what the engine holds, as far as it shows that; or nothing."""
    given, held = stream.fingerprints, dict(engine.loaded_weights())
    found = finish({name: start(tensor.to(device)) for name, tensor in held.items() if tensor is not None})
    for name in held:
        if name not in given:
            return f"{name} was not handed over"
        if name in found and found[name] != given[name]:
            return f"the engine holds other bytes of {name} than it was given"
    return next((f"the engine holds no {name}" for name in given if name not in held), "")
