"""`Publisher`: hand the trainer's weights to the engine, and prove that they arrived.

    publish = sync.build(policy, engine, world)
    track.add(publish(version=step))  # [all]

In process and tensor by tensor: gathered, fingerprinted, copied by the engine's own loader; then every tensor that the
engine keeps plain is fingerprinted again, all ranks compare, and the trainer judges a probe that the engine generates.
Nothing a rank finds makes it leave alone: findings are gathered, and all ranks stop with the same line.
"""

import time
from itertools import pairwise
from typing import TypeVar

from spmd_rl.batch import Batch
from spmd_rl.distributed import World
from spmd_rl.engine.base import Engine
from spmd_rl.errors import RunFailed
from spmd_rl.model.fingerprint import fingerprint
from spmd_rl.sync import probe
from spmd_rl.sync.handover import Handover
from spmd_rl.train.base import Metrics, TrainBackend

T = TypeVar("T")


class Publisher:
    """The road from one policy to this rank's engine."""

    def __init__(self, policy: TrainBackend, engine: Engine, world: World) -> None:
        self._policy, self._engine, self._world = policy, engine, world

    def __call__(self, version: int) -> Metrics:
        """[all] Publish; later tokens are of `version`. RunFailed, on all ranks alike, if anything differs.

        Metrics, equal on all ranks (the slowest rank's seconds): `publish/bytes`, `publish/seconds` and its parts
        `publish/gather_seconds` (the trainer), `publish/copy_seconds` (the engine's loader), `publish/hash_seconds`
        and `publish/probe_seconds`; `publish/probe_abs_diff`, the mean absolute difference of the probe's logprobs.
        """
        with self._world.phase("publish"):
            clock = [time.perf_counter()]
            with self._engine.awake():
                with self._world.journal.kind("copy"), self._policy.awake():
                    handover = Handover(self._policy.weights(), self._world.device, self._world.progress)
                    fault = self._load(handover, version)  # [all]
                clock.append(time.perf_counter())
                fault = fault or self._compare(handover)
                clock.append(time.perf_counter())
                self._agree(version, fault, handover.digest())  # [all]
                answers, fault = probe.ask(self._engine, version)
            # From here on the engine may sleep: the trainer's weights never meet its KV cache on the device.
            with self._policy.awake():
                abs_diff, fault = self._judge(answers, fault, probe.LIMITS[handover.dtype])  # [all]
            clock.append(time.perf_counter())
            load_seconds, compare_seconds, probe_seconds = (b - a for a, b in pairwise(clock))
            metrics = {
                "publish/bytes": float(handover.num_bytes),
                "publish/seconds": clock[-1] - clock[0],
                "publish/gather_seconds": handover.gather_seconds,
                "publish/copy_seconds": load_seconds - handover.gather_seconds - handover.hash_seconds,
                "publish/hash_seconds": handover.hash_seconds + compare_seconds,
                "publish/probe_seconds": probe_seconds,
                "publish/probe_abs_diff": abs_diff,
            }
            told = self._decide("publish: probe", version, fault, metrics)  # [all]
            return {key: max(theirs[key] for theirs in told) for key in told[0]}

    def _load(self, handover: Handover, version: int) -> str:
        """[all] Stream the weights through the engine's loader; what went wrong, or nothing."""
        fault = ""
        try:
            self._engine.load(handover, version)
        except RunFailed as error:
            fault = str(error)
        handover.drain()  # [all] whatever our engine made of them, the other ranks gather with us
        return fault or (f"{handover.doubled[0]} was handed over twice" if handover.doubled else "")

    def _compare(self, handover: Handover) -> str:
        """Whether the engine holds, under every name, the bytes handed over where it can show them; the first fault."""
        missing = dict(handover.fingerprints)
        for name, tensor in self._engine.loaded_weights():
            expected = missing.pop(name, None)
            if expected is None:
                return f"{name} was not handed over"
            if tensor is not None and fingerprint(tensor.to(self._world.device)) != expected:
                return f"the engine holds other bytes of {name} than it was given"
        return f"the engine holds no {next(iter(missing))}" if missing else ""

    def _judge(self, batch: Batch, fault: str, limit: float) -> tuple[float, str]:
        """[all] Mean absolute difference between the engine's and the trainer's logprobs of the probe's answers.

        And the first fault: the one found before, or that they are too far apart.
        """
        batch = batch.to(self._world.device)
        logprobs, _ = self._policy.logprobs(batch, temperature=1.0)  # [all]
        difference = (logprobs - batch.rollout_logprobs)[batch.loss_mask].abs()
        abs_diff = difference.mean().item() if len(difference) else 0.0
        if not fault and not abs_diff <= limit:  # a NaN is no success
            fault = f"the engine's logprobs are {abs_diff:.3g} from the trainer's on average (limit {limit:g})"
        return abs_diff, fault

    def _agree(self, version: int, fault: str, digest: bytes) -> None:
        """[all] RunFailed on every rank if any found a fault, or if the ranks were handed different bytes."""
        digests = self._decide("publish: weights", version, fault, digest)  # [all]
        odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if odd:
            raise RunFailed(f"publish of version {version}: ranks {odd} were handed other weights than rank 0")

    def _decide(self, name: str, version: int, fault: str, word: T) -> list[T]:
        """[all] Every rank's word, by rank; RunFailed on every rank if any found a fault."""
        records = self._world.gather(name, [fault, word])  # [all]
        for rank, (found, _) in enumerate(records):
            if found:
                raise RunFailed(f"publish of version {version}, rank {rank}: {found}")
        return [word for _, word in records]
