"""`WeightReceiver`: a generator rank's side of a publish."""

import torch

from spmd_rl.base.errors import RunFailed
from spmd_rl.distributed import World
from spmd_rl.engine.base import Engine
from spmd_rl.weights import probe
from spmd_rl.weights.collective import Buckets
from spmd_rl.weights.publisher import PROBE, check_digests, gather_or_raise
from spmd_rl.weights.stream import WeightStream


class WeightReceiver:
    """A generator rank's engine, and the version it holds."""

    def __init__(self, engine: Engine, buckets: Buckets, everyone: World) -> None:
        """everyone: trainer and generator ranks together."""
        self._engine, self._buckets, self._everyone = engine, buckets, everyone
        self.version = -1
        """Version that the engine holds; -1 before the first"""

    def load(self, version: int, probed: bool) -> None:
        """[all] with `Publisher`: load a version into the idle engine, and take part in the checks.

        probed: trainers want answers. RunFailed, on all ranks, if anything differs.
        """
        fault = ""
        device = self._everyone.device
        with self._everyone.phase("publish"):
            if device.type != "cpu":
                # Waits for the engine, which may compute on separate streams, before its weights change.
                torch.accelerator.synchronize()
            weights = self._buckets.receive()
            stream = WeightStream(weights, device, self._everyone.progress)
            try:
                self._engine.load(stream, version)  # [all]
            except RunFailed as error:
                fault = str(error)
            for _ in stream:  # [all] whatever the engine left
                pass
            fault = fault or stream.fault or stream.difference(self._engine)
            check_digests(self._everyone, version, fault, stream.digest())  # [all]
            if probed:
                answers, fault = probe.ask(self._engine, version)
                gather_or_raise(self._everyone, PROBE, version, fault, answers, list[probe.Answer])  # [all]
            self._everyone.journal.note("loaded", version=version, bytes=stream.num_bytes)
        self.version = version
