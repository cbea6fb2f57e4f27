"""Named collectives over metadata as msgpack, never pickle. No tensors.

Each record names its rank's collective, so that an error can name ranks that have come apart.
"""

import reprlib
import struct
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Literal, NoReturn

import msgspec
import numpy as np
import xxhash

from spmd_rl.base.errors import RunFailed
from spmd_rl.distributed.host_groups import HostGroups

Meeting = Callable[[str], AbstractContextManager[int]]
Reduction = Literal["sum", "max", "mean"]

# Head of a record: sequence number and name.
_HEAD = struct.Struct("<q64s")
_LENGTH = struct.Struct("<Q")
_FRAME = 1024
"""Record size in bytes up to which one all-gather suffices"""
# A deterministic order of keys: equal values must have equal digests on all ranks.
_encode = msgspec.msgpack.Encoder(order="deterministic").encode
_decode = msgspec.msgpack.decode
_decoder = cache(msgspec.msgpack.Decoder)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.shape, value.tobytes()]
    raise NotImplementedError


_encode_arrays = msgspec.msgpack.Encoder(order="deterministic", enc_hook=_plain).encode


class _Brief(reprlib.Repr):
    def repr_ndarray(self, array: np.ndarray, level: int) -> str:
        """Return an array's beginning as a list."""
        return self.repr1(array[: self.maxlist + 1].tolist(), level)


class Collectives:
    """Metadata collectives of all ranks. Records are msgpack values; tuples arrive as lists."""

    def __init__(self, group: HostGroups | None, meeting: Meeting) -> None:
        """group: None for one rank. meeting: journals and numbers a name."""
        self._group, self._meeting = group, meeting
        self._rank, self._size = (group.rank, group.size) if group is not None else (0, 1)

    def gather(self, name: str, record: Any, type: Any = Any) -> list[Any]:
        """[all] Return each rank's record, by rank, as a `type` that msgspec knows. Sizes may differ."""
        payloads = self._meet("gather", name, _encode(record))
        decode = _decoder(type).decode
        return [decode(payload) for payload in payloads]

    def broadcast(self, name: str, record: Any, src: int = 0) -> Any:
        """[all] Return rank `src`'s record; others are ignored."""
        payload = _encode(record) if self._rank == src else b""
        return _decode(self._meet("broadcast", name, payload, src)[src])

    def agree(self, name: str, value: Any) -> None:
        """[all] Raise RunFailed on all ranks unless values, perhaps with arrays, are equal; name the ranks that
        differ from the most common."""
        digests = self.gather(name, _digest(value) if self._size > 1 else b"")
        common = max(digests, key=lambda d: (digests.count(d), -digests.index(d)))
        odd = [rank for rank, digest in enumerate(digests) if digest != common]
        if odd:
            # All ranks compare the same digests, so all of them reach this second gather, or none.
            shown = self.gather(name, _Brief().repr(value))
            found, expected = shown[odd[0]], shown[digests.index(common)]
            raise RunFailed(f"{name}: ranks {odd} differ from the others: {found} instead of {expected}")

    def reduce(self, name: str, values: Mapping[str, float], op: Reduction = "sum") -> dict[str, float]:
        """[all] Reduce element by element, in float64 and rank order; ranks must bring the same keys."""
        keys = sorted(values)
        digest = _digest(keys)
        records = self.gather(name, [digest, [float(values[key]) for key in keys]])
        odd = [rank for rank, (theirs, _) in enumerate(records) if theirs != records[0][0]]
        if odd:
            raise RunFailed(f"{name}: ranks {odd} bring other keys than rank 0; this rank has {reprlib.repr(keys)}")
        # Plain Python sums in rank order give every rank the same bits, which a backend's reduction does not promise.
        columns = zip(*(row for _, row in records), strict=True)
        reduced = (max(column) if op == "max" else sum(column) for column in columns)
        divisor = self._size if op == "mean" else 1
        return {key: value / divisor for key, value in zip(keys, reduced, strict=True)}

    def barrier(self, name: str) -> None:
        """[all] Wait for all ranks."""
        self._meet("barrier", name, b"")

    def _meet(self, kind: str, name: str, payload: bytes, src: int | None = None) -> list[bytes]:
        with self._meeting(name) as seq:
            if self._group is None:
                return [payload]
            head = _HEAD.pack(seq, f"{kind} {name}".encode()[:64])
            records = _gather(self._group, head + payload, src)  # [all]
            if any(not record.startswith(head) for record in records):
                self._fail_apart([_HEAD.unpack_from(record) for record in records])
            return [record[_HEAD.size :] for record in records]

    def _fail_apart(self, places: list[tuple[int, bytes]]) -> NoReturn:
        """Raise RunFailed, alike on all ranks, that names each rank's collective."""
        parts = []
        for seq, label in dict.fromkeys(places):
            ranks = [rank for rank, place in enumerate(places) if place == (seq, label)]
            parts.append(f"ranks {ranks} in '{label.rstrip(bytes(1)).decode(errors='replace')}' #{seq}")
        raise RunFailed("ranks are in different collectives: " + "; ".join(parts))


def _digest(value: Any) -> bytes:
    return xxhash.xxh3_128_digest(_encode_arrays(value))


def _gather(group: HostGroups, payload: bytes, src: int | None) -> list[bytes]:
    """[all] Return payloads by rank, in one operation if all fit a frame."""
    inline = _FRAME - _LENGTH.size
    # One fixed-size operation for short records: a first exchange of sizes would double the latency.
    frames = group.gather(_LENGTH.pack(len(payload)) + payload[:inline], _FRAME)
    lengths = [_LENGTH.unpack_from(frame)[0] for frame in frames]
    padded = [frame[_LENGTH.size :] for frame in frames]
    # Ranks in different collectives would wait for each other here: their heads alone are compared.
    if max(lengths) > inline and len({part[: _HEAD.size] for part in padded}) == 1:
        if src is None:
            padded = group.gather(payload, max(lengths))
        else:  # a gather would take room for one payload of this length from each rank
            padded[src] = group.broadcast(payload, lengths[src], src)
    return [part[:length] for part, length in zip(padded, lengths, strict=True)]
