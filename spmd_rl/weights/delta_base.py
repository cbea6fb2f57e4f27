"""`DeltaBase`: a generating rank's own copy of the weights that it has loaded last, to which deltas are applied.

It lies in host memory and takes as many bytes as the weights: engines may pack, cast or shard what they are given, and
a delta needs the very bits. Whatever `place` returns is never written to again: the next version is a new tensor.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from spmd_rl.errors import RunFailed
from spmd_rl.weights import delta, messages


class DeltaBase:
    """Complete only between `complete` and the first piece of the next version."""

    def __init__(self) -> None:
        self.version: messages.Base | None = None
        """The version that is here, whole and as its trainers announced it; or None."""
        self._tensors: dict[int, _Bytes] = {}

    def place(self, piece: messages.Piece, payload: memoryview) -> Tensor:
        """Return the tensor (on the CPU) of a piece that has arrived, and keep its bytes.

        RunFailed if it is the delta of another tensor than what is here, or does not lead to what the trainer has.
        """
        self.version, held = None, self._tensors.get(piece.index)
        if piece.base is None:
            data = bytearray(payload)
        else:
            if held is None or held.name != piece.name or messages.digest(held.data) != piece.base:
                raise RunFailed(f"version {piece.version} of {piece.name} is a delta of other bytes than are here")
            data = delta.decode(memoryview(held.data), payload, delta.word(piece.dtype))
            if messages.digest(data) != piece.whole:
                raise RunFailed(f"version {piece.version} of {piece.name}: its delta leads to other bytes")
        self._tensors[piece.index] = _Bytes(piece.name, data)
        return tensor_of(piece, data)

    def complete(self, version: int, digest: bytes) -> None:
        """Say that all pieces of this version are here, and that they are what was announced with this digest."""
        self.version = messages.Base(version, digest)


class _Bytes(NamedTuple):
    """One tensor."""

    name: str
    data: bytearray


def tensor_of(piece: messages.Piece, data: bytearray) -> Tensor:
    """Return the tensor that lies in these bytes, without a copy."""
    dtype = getattr(torch, piece.dtype)
    if not data:
        return torch.empty(piece.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(piece.shape)
