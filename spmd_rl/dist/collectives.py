"""Named collectives over a gloo group of their own: metadata as msgpack in uint8 tensors, and the bytes of samples.

No tensors of the model.

Each opens with one small all-gather of a frame that says which collective the rank believes to be in, so that ranks
that have come apart are told so by name; a record that fits the frame costs nothing more. Never pickle.
"""

import reprlib
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from hashlib import blake2b
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.errors import RunFailed

Meeting = Callable[[str], AbstractContextManager[int]]
Reduction = Literal["sum", "max", "mean"]

_HEAD = struct.Struct("<qq64s")  # sequence number, bytes of payload, name
_FRAME = 512
_INLINE = _FRAME - _HEAD.size
_encode = msgspec.msgpack.Encoder(order="deterministic").encode
_decode = msgspec.msgpack.decode


class Collectives:
    """All methods meet all ranks. Records are whatever msgpack can say; tuples come back as lists."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None, meeting: Meeting) -> None:
        """`group`: gloo over all ranks; None at size 1. `meeting` journals a name, and numbers it."""
        assert (group is None) == (size == 1)
        self._rank, self._size, self._group, self._meeting = rank, size, group, meeting

    def gather(self, name: str, record: Any) -> list[Any]:
        """[all] Each rank's record, by rank. Sizes may differ."""
        payloads = self._meet("gather", name, _encode(record))
        return [_decode(payload) for payload in payloads]

    def broadcast(self, name: str, record: Any, src: int = 0) -> Any:
        """[all] The record of rank `src`; what the others pass is ignored."""
        payload = _encode(record) if self._rank == src else b""
        return _decode(self._meet("broadcast", name, payload, src)[src])

    def agree(self, name: str, value: Any) -> None:
        """[all] RunFailed on all ranks, naming those that differ from the most common value, unless all are equal."""
        digest = blake2b(_encode(value), digest_size=16).digest()
        votes = self.gather(name, [digest, reprlib.repr(value)])
        digests = [vote for vote, _ in votes]
        common = max(digests, key=lambda d: (digests.count(d), -digests.index(d)))
        odd = [rank for rank, vote in enumerate(digests) if vote != common]
        if odd:
            shown, expected = votes[odd[0]][1], votes[digests.index(common)][1]
            raise RunFailed(f"{name}: ranks {odd} differ from the others: {shown} instead of {expected}")

    def reduce(self, name: str, values: Mapping[str, float], op: Reduction = "sum") -> dict[str, float]:
        """[all] Element by element, in float64 and in rank order; every rank must bring the same keys."""
        keys = sorted(values)
        digest = blake2b(_encode(keys), digest_size=16).digest()
        records = self.gather(name, [digest, [float(values[key]) for key in keys]])
        odd = [rank for rank, (theirs, _) in enumerate(records) if theirs != records[0][0]]
        if odd:
            raise RunFailed(f"{name}: ranks {odd} bring other keys than rank 0; this rank has {reprlib.repr(keys)}")
        columns = zip(*(row for _, row in records), strict=True)
        reduced = (max(column) if op == "max" else sum(column) for column in columns)
        divisor = self._size if op == "mean" else 1
        return {key: value / divisor for key, value in zip(keys, reduced, strict=True)}

    def barrier(self, name: str) -> None:
        """[all] Nobody returns before all have come."""
        self._meet("barrier", name, b"")

    def exchange(self, name: str, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """[all] One all-to-all: of `rows` [n, ...], the first `sent[0]` go to rank 0, the next `sent[1]` to rank 1, ...

        Returns `received[0]` rows of rank 0, then `received[1]` of rank 1, ... Everyone knows beforehand how many come,
        from a plan on which all ranks agree. On the CPU; any number may be 0.
        """
        assert len(sent) == len(received) == self._size and sum(sent) == len(rows)
        self._meet("exchange", name, b"")
        if self._group is None:
            return rows
        with self._meeting(f"{name}: rows"):
            arrived = rows.new_empty(sum(received), *rows.shape[1:])
            dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=self._group)
            return arrived

    def _meet(self, kind: str, name: str, payload: bytes, src: int | None = None) -> list[bytes]:
        """[all] Every rank's payload; with `src` only that rank's counts, and the others bring none."""
        with self._meeting(name) as seq:
            if self._group is None:
                return [payload]
            label = f"{kind} {name}".encode()[:64].ljust(64, b"\0")
            frame = _HEAD.pack(seq, len(payload), label) + payload[:_INLINE]
            frames = self._all_gather(frame, _FRAME)
            heads = [_HEAD.unpack_from(frame) for frame in frames]
            self._check([(theirs, their_seq) for their_seq, _, theirs in heads])
            lengths = [length for _, length, _ in heads]
            if max(lengths) <= _INLINE:
                padded = [frame[_HEAD.size :] for frame in frames]
            elif src is None:
                padded = self._all_gather(payload, max(lengths))
            else:
                padded = [b""] * self._size
                padded[src] = self._broadcast(payload, lengths[src], src)
            return [part[:length] for part, length in zip(padded, lengths, strict=True)]

    def _all_gather(self, payload: bytes, length: int) -> list[bytes]:
        mine = torch.frombuffer(bytearray(payload.ljust(length, b"\0")), dtype=torch.uint8)
        everyone = torch.empty(self._size, length, dtype=torch.uint8)
        dist.all_gather(list(everyone), mine, group=self._group)
        return [row.tobytes() for row in everyone.numpy()]

    def _broadcast(self, payload: bytes, length: int, src: int) -> bytes:
        buffer = torch.frombuffer(bytearray(payload.ljust(length, b"\0")), dtype=torch.uint8)
        dist.broadcast(buffer, group=self._group, group_src=src)
        return buffer.numpy().tobytes()

    def _check(self, places: list[tuple[bytes, int]]) -> None:
        """RunFailed, alike on all ranks, if they stand in different collectives."""
        if len(set(places)) > 1:
            told = []
            for label, seq in dict.fromkeys(places):
                ranks = [rank for rank, place in enumerate(places) if place == (label, seq)]
                told.append(f"ranks {ranks} in '{label.rstrip(bytes(1)).decode(errors='replace')}' #{seq}")
            raise RunFailed("ranks are in different collectives: " + "; ".join(told))
