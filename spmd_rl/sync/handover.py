"""The stream of weights on its way from the trainer to the engine: counted, fingerprinted, timed, complete."""

import time
from collections.abc import Callable, Iterator

import torch
import xxhash
from torch import Tensor

from spmd_rl.model.fingerprint import fingerprint


class Handover:
    """One pass over the trainer's weights. Iterate once; `drain` what the engine left, for the other ranks' sake."""

    def __init__(self, weights: Iterator[tuple[str, Tensor]], device: torch.device, moved: Callable[[], None]) -> None:
        """`moved` is called for each tensor: progress, as the watchdog knows it."""
        self.fingerprints: dict[str, bytes] = {}
        """of the bytes handed over, by name"""
        self.doubled: list[str] = []
        """names that came twice"""
        self.dtype: torch.dtype | None = None
        """of the last floating tensor"""
        self.num_bytes = 0
        self.gather_seconds = 0.0
        """spent in the trainer, until each tensor was whole"""
        self.hash_seconds = 0.0
        self._weights, self._device, self._moved = weights, device, moved

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        began = time.perf_counter()
        for name, tensor in self._weights:
            tensor = tensor.to(self._device)
            gathered = time.perf_counter()
            self.gather_seconds += gathered - began
            if name in self.fingerprints:
                self.doubled.append(name)
            self.fingerprints[name] = fingerprint(tensor)
            self.num_bytes += tensor.nbytes
            self.dtype = tensor.dtype if tensor.is_floating_point() else self.dtype
            self._moved()
            self.hash_seconds += time.perf_counter() - gathered
            yield name, tensor
            began = time.perf_counter()

    def digest(self) -> bytes:
        """16 bytes over all names and fingerprints, in the order of the stream."""
        return xxhash.xxh3_128_digest(b"".join(name.encode() + value for name, value in self.fingerprints.items()))

    def drain(self) -> None:
        """Take what is left of the trainer's weights: its iteration is a series of collectives."""
        for _ in self._weights:
            pass
