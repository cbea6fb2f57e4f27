"""`WeightStream`: weights on their way through a rank, each hashed, counted and timed."""

import time
from collections.abc import Callable, Iterable, Iterator

import torch
import xxhash
from torch import Tensor

from spmd_rl.engine.base import Engine
from spmd_rl.model.fingerprint import Fingerprints, fingerprints


class WeightStream:
    """One pass over gathered or received weights. A second loop goes on where the first ended."""

    def __init__(
        self, weights: Iterable[tuple[str, Tensor]], device: torch.device, progress: Callable[[], None]
    ) -> None:
        """Each tensor is moved to `device`, and `progress` called, so that a long pass is no stall."""
        self._names: set[str] = set()
        self._fingerprints = Fingerprints()
        self.repeated: list[str] = []
        self.dtype: torch.dtype | None = None
        """Dtype of the first floating tensor, of the computation; buffers come last and may differ"""
        self.num_bytes = 0
        self.wait_seconds = 0.0
        self.hash_seconds = 0.0
        self._weights, self._device, self._progress = iter(weights), device, progress

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        began = time.perf_counter()
        for name, tensor in self._weights:
            tensor = tensor.to(self._device)
            arrived = time.perf_counter()
            self.wait_seconds += arrived - began
            if name in self._names:
                self.repeated.append(name)
            self._names.add(name)
            self._fingerprints.add(name, tensor)
            self.num_bytes += tensor.nbytes
            if self.dtype is None and tensor.is_floating_point():
                self.dtype = tensor.dtype
            self._progress()
            self.hash_seconds += time.perf_counter() - arrived
            yield name, tensor
            began = time.perf_counter()

    @property
    def fault(self) -> str:
        """Line about a repeated name, or nothing."""
        return f"{self.repeated[0]} was given twice" if self.repeated else ""

    @property
    def fingerprints(self) -> dict[str, bytes]:
        """Fingerprint of each tensor by name, in order."""
        return self._fingerprints.finish()

    def digest(self) -> bytes:
        """Return 16 bytes over all names and fingerprints, in order."""
        return xxhash.xxh3_128_digest(b"".join(name.encode() + value for name, value in self.fingerprints.items()))

    def difference(self, engine: Engine) -> str:
        """Return the first difference from an engine's plain tensors; or nothing."""
        given, held = self.fingerprints, dict(engine.loaded_weights())
        found = fingerprints((name, tensor.to(self._device)) for name, tensor in held.items() if tensor is not None)
        for name in held:
            if name not in given:
                return f"{name} was not given"
            if name in found and found[name] != given[name]:
                return f"the engine holds other bytes of {name} than it was given"
        return next((f"the engine holds no {name}" for name in given if name not in held), "")
