"""Named collectives: metadata as msgpack, and, over gloo, the bytes of samples. No tensors of the model.

Every record says which collective its rank believes to be in, so that ranks that have come apart are told so by name.
Never pickle. How records travel is `star.py`'s.
"""

import reprlib
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from hashlib import blake2b
from typing import Any, Literal, NoReturn

import msgspec
import torch.distributed as dist
from torch import Tensor

from spmd_rl.dist.star import Meet
from spmd_rl.errors import RunFailed

Meeting = Callable[[str], AbstractContextManager[int]]
Reduction = Literal["sum", "max", "mean"]

_HEAD = struct.Struct("<q64s")  # sequence number, name
_encode = msgspec.msgpack.Encoder(order="deterministic").encode
_decode = msgspec.msgpack.decode
_decoder = cache(msgspec.msgpack.Decoder)


class Collectives:
    """All methods meet all ranks. Records are whatever msgpack can say; tuples come back as lists."""

    def __init__(
        self, rank: int, size: int, meet: Meet | None, meeting: Meeting, group: dist.ProcessGroup | None = None
    ) -> None:
        """`meet` is None at size 1. `meeting` journals a name, and numbers it. `group`: gloo, for `exchange` alone."""
        assert (meet is None) == (size == 1)
        self._rank, self._size, self._meet_all, self._meeting, self._group = rank, size, meet, meeting, group

    def gather(self, name: str, record: Any, type: Any = Any) -> list[Any]:
        """[all] Each rank's record, by rank, as a `type` that msgspec knows. Sizes may differ."""
        payloads = self._meet("gather", name, _encode(record))
        decode = _decoder(type).decode
        return [decode(payload) for payload in payloads]

    def broadcast(self, name: str, record: Any, src: int = 0) -> Any:
        """[all] The record of rank `src`; what the others pass is ignored."""
        payload = _encode(record) if self._rank == src else b""
        return _decode(self._meet("broadcast", name, payload)[src])

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
        if self._size == 1:
            return rows
        with self._meeting(f"{name}: rows"):
            arrived = rows.new_empty(sum(received), *rows.shape[1:])
            dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=self._group)
            return arrived

    def _meet(self, kind: str, name: str, payload: bytes) -> list[bytes]:
        """[all] Every rank's payload."""
        with self._meeting(name) as seq:
            if self._meet_all is None:
                return [payload]
            head = _HEAD.pack(seq, f"{kind} {name}".encode()[:64])
            records = self._meet_all(head + payload)  # [all]
            if any(not record.startswith(head) for record in records):
                self._tell_apart([_HEAD.unpack_from(record) for record in records])
            return [record[_HEAD.size :] for record in records]

    def _tell_apart(self, places: list[tuple[int, bytes]]) -> NoReturn:
        """RunFailed, alike on all ranks: they stand in different collectives."""
        told = []
        for seq, label in dict.fromkeys(places):
            ranks = [rank for rank, place in enumerate(places) if place == (seq, label)]
            told.append(f"ranks {ranks} in '{label.rstrip(bytes(1)).decode(errors='replace')}' #{seq}")
        raise RunFailed("ranks are in different collectives: " + "; ".join(told))
