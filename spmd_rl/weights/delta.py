"""What changed between two versions of a tensor, as bytes: where, and the new bits there.

A tensor is seen as a row of unsigned words, one for each element, so that -0.0 and every NaN are bits like others. A
delta is one byte, the width W of a gap (1 or 2 bytes), then N gaps, then N new words, all little-endian. A gap is how
many words lie between an entry and the one before it. Where it does not fit into W bytes, entries that repeat unchanged
words stand between. The smaller of the two widths is taken: 1 where more than some hundredth of the words changed.

    payload = encode(old, new, 2)  # None: the whole tensor is no larger
    assert decode(old, payload, 2) == new
"""

import sys

import numpy as np
import torch
from torch import Tensor

from spmd_rl.errors import RunFailed
from spmd_rl.weights import messages

WIDTHS = (1, 2)
MAX_WORD = 8

assert sys.byteorder == "little", "weights travel as they lie in memory"


def encode(base: memoryview, new: memoryview, word: int) -> bytes | None:
    """Return what makes `new` of `base`, bytes of equal length; None where that is not smaller than `new`.

    word: bytes of an element: 1, 2, 4 or 8.
    """
    assert base.nbytes == new.nbytes, "versions of one tensor are of equal size"
    words = _words(new, word)
    changed = _words(base, word) != words
    if _size(int(np.count_nonzero(changed)), min(WIDTHS), word) >= new.nbytes:
        return None
    gaps = np.diff(np.flatnonzero(changed), prepend=-1) - 1
    sizes = {width: _size(len(gaps) + int((gaps >> 8 * width).sum()), width, word) for width in WIDTHS}
    width = min(sizes, key=sizes.__getitem__)
    if sizes[width] >= new.nbytes:
        return None
    gaps = _filled(gaps, width)
    return bytes([width]) + gaps.astype(f"<u{width}").tobytes() + words[_positions(gaps)].tobytes()


def decode(base: memoryview, payload: memoryview, word: int) -> bytearray:
    """Return the bytes of the new version. RunFailed for a payload that `encode` does not make for so long a base."""
    width = payload[0] if payload.nbytes else 0
    if width not in WIDTHS:
        raise RunFailed(f"a delta of weights has gaps of {width} bytes, not of 1 or 2")
    count, left = divmod(payload.nbytes - 1, width + word)
    if left:
        raise RunFailed(f"a delta of weights has {left} bytes too many, or too few, after {count} entries")
    positions = _positions(np.frombuffer(payload, f"<u{width}", count, 1))
    new = bytearray(base)
    words = _words(memoryview(new), word)
    if count and positions[-1] >= len(words):
        raise RunFailed(f"a delta of weights changes word {positions[-1]} of a tensor of {len(words)}")
    words[positions] = np.frombuffer(payload, f"<u{word}", count, 1 + count * width)
    return new


def word(dtype: str) -> int:
    """Return the bytes of the words as which a tensor of this dtype, by its name in torch, is compared."""
    return min(getattr(torch, dtype).itemsize, MAX_WORD)


class DeltaBase:
    """A generating rank's own copy of the weights that it has loaded last, to which deltas are applied.

    It lies in host memory and takes as many bytes as the weights: engines may pack, cast or shard what they are given,
    and a delta needs the very bits. What `place` returns is never written to again: the next version is a new tensor.
    Complete only between `complete` and the first piece of the next version.
    """

    def __init__(self) -> None:
        self.version: messages.Base | None = None
        """The version that is here, whole and as its trainers announced it; or None."""
        self._tensors: dict[int, tuple[str, bytearray]] = {}

    def place(self, piece: messages.TensorMessage, payload: memoryview) -> Tensor:
        """Return the tensor (on the CPU) of a piece that has arrived, and keep its bytes.

        RunFailed if it is the delta of another tensor than what is here, or does not lead to what the trainer has.
        """
        self.version, (name, held) = None, self._tensors.get(piece.index, ("", b""))
        if piece.base is None:
            data = bytearray(payload)
        else:
            if name != piece.name or messages.digest(held) != piece.base:
                raise RunFailed(f"version {piece.version} of {piece.name} is a delta of other bytes than are here")
            data = decode(memoryview(held), payload, word(piece.dtype))
            if messages.digest(data) != piece.whole:
                raise RunFailed(f"version {piece.version} of {piece.name}: its delta leads to other bytes")
        self._tensors[piece.index] = piece.name, data
        return tensor_of(piece, data)

    def complete(self, version: int, digest: bytes) -> None:
        """Say that all pieces of this version are here, and that they are what was announced with this digest."""
        self.version = messages.Base(version, digest)


def tensor_of(piece: messages.TensorMessage, data: bytearray) -> Tensor:
    """Return the tensor that lies in these bytes, without a copy."""
    dtype = getattr(torch, piece.dtype)
    if not data:
        return torch.empty(piece.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(piece.shape)


def _words(data: memoryview, word: int) -> np.ndarray:
    return np.frombuffer(data, f"<u{word}")


def _size(count: int, width: int, word: int) -> int:
    """Bytes of a delta of so many entries."""
    return 1 + count * (width + word)


def _filled(gaps: np.ndarray, width: int) -> np.ndarray:
    """The gaps with entries between them wherever one does not fit: each such entry takes the greatest gap there is."""
    reach = 1 << 8 * width  # how far the greatest gap leads, its own entry included
    entries = gaps // reach + 1
    filled = np.full(int(entries.sum()), reach - 1)
    filled[np.cumsum(entries) - 1] = gaps % reach
    return filled


def _positions(gaps: np.ndarray) -> np.ndarray:
    return np.cumsum(gaps.astype(np.int64) + 1) - 1
