"""How small records travel: through the first rank of each machine, and between these over gloo.

    meet = star.connect(me, store, "world", range(me.size), nodes)  # [those ranks]
    payloads = meet(b"mine")                                         # [those ranks] everyone's, in order

On one machine a record goes up a Unix socket and all records come down: two system calls a rank and no thread, where a
gloo ring wakes three threads a rank as many times as there are ranks. Across machines the ring is of machines, not of
ranks. Who waits, waits in the kernel, as long as it takes; a rank that is gone breaks its connection.

Left out: what the bytes mean, and whether all are in the same meeting (`collectives.py`); tensors.
"""

import os
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import torch
import torch.distributed as dist

from spmd_rl.errors import UserError

Meet = Callable[[bytes], list[bytes]]
"""[those ranks] Everyone's payload, in the order of ranks. Sizes may differ."""

_INDEX = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
_FRAME = 1024
"""Bytes of a machine's records that cost one gloo operation; more cost a second."""
_MAX_PATH_BYTES = 107
"""What the kernel allows for the path of a socket."""
_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(list[bytes]).decode


class Link:
    """One connection; whole payloads in both directions."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._reader = connection, connection.makefile("rb", buffering=1 << 16)

    def send(self, payload: bytes) -> None:
        """Blocks while the other end has not read."""
        self._connection.sendall(_LENGTH.pack(len(payload)) + payload)

    def receive(self) -> bytes:
        """The next payload. ConnectionError if the other end is gone."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._read(length)

    def _read(self, length: int) -> bytes:
        data = self._reader.read(length)
        if len(data) < length:
            raise ConnectionError("a rank of this machine is gone")
        return data


def through(leader: Link) -> Meet:
    """As the other ranks of a machine meet."""

    def meet(payload: bytes) -> list[bytes]:
        leader.send(payload)
        return _decode(leader.receive())

    return meet


def leading(peers: Sequence[Link], beyond: Callable[[list[bytes]], list[bytes]] = list) -> Meet:
    """As the first rank of a machine meets. `beyond`: from its machine's records to everyone's."""

    def meet(payload: bytes) -> list[bytes]:
        records = beyond([payload, *(peer.receive() for peer in peers)])
        told = _encode(records)
        for peer in peers:
            peer.send(told)
        return records

    return meet


def between(group: dist.ProcessGroup, records: list[bytes]) -> list[bytes]:
    """[first ranks] The records of all machines, from those of this one."""
    return [record for block in gather(group, _encode(records)) for record in _decode(block)]


def gather(group: dist.ProcessGroup, payload: bytes) -> list[bytes]:
    """[group] Everyone's payload, by rank, in one operation if all fit a frame."""
    inline = _FRAME - _LENGTH.size
    frames = _all_gather(group, _LENGTH.pack(len(payload)) + payload[:inline], _FRAME)
    lengths = [_LENGTH.unpack_from(frame)[0] for frame in frames]
    if max(lengths) <= inline:
        padded = [frame[_LENGTH.size :] for frame in frames]
    else:
        padded = _all_gather(group, payload, max(lengths))
    return [part[:length] for part, length in zip(padded, lengths, strict=True)]


def _all_gather(group: dist.ProcessGroup, payload: bytes, length: int) -> list[bytes]:
    mine = torch.frombuffer(bytearray(payload.ljust(length, b"\0")), dtype=torch.uint8)
    everyone = torch.empty(dist.get_world_size(group), length, dtype=torch.uint8)
    dist.all_gather(list(everyone), mine, group=group)
    return [row.tobytes() for row in everyone.numpy()]


def connect(
    store: dist.Store, name: str, rank: int, ranks: range, node: range, leaders: dist.ProcessGroup | None
) -> Meet:
    """[ranks] A way to meet for the neighbouring `ranks`, `rank` among them. `name` is theirs alone, in this start.

    node: the ranks of this machine. leaders: gloo over the first of `ranks` on each machine, None on the others and
    where all are on one.
    """
    mine = range(max(ranks.start, node.start), min(ranks.stop, node.stop))
    key = f"star/{name}/{mine.start}"
    if rank > mine.start:
        return through(_join(store, key, rank - mine.start))
    peers = _listen(store, key, len(mine) - 1) if len(mine) > 1 else []
    return leading(peers, partial(between, leaders)) if leaders is not None else leading(peers)


def _listen(store: dist.Store, key: str, count: int) -> list[Link]:
    """Connections of `count` ranks, in order. Their socket is in a directory of this user's, and gone afterwards."""
    folder = tempfile.mkdtemp(prefix="spmd-rl-")
    path = os.path.join(folder, "s")
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        os.rmdir(folder)
        raise UserError(
            f"TMPDIR={tempfile.gettempdir()}: {path} is longer than a socket's path may be ({_MAX_PATH_BYTES})"
        )
    links: dict[int, Link] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        try:
            listener.listen(count)
            store.set(key, path)
            while len(links) < count:
                connection, _ = listener.accept()
                if _ours(connection):
                    links[_INDEX.unpack(connection.recv(_INDEX.size, socket.MSG_WAITALL))[0]] = Link(connection)
        finally:
            os.unlink(path)
            os.rmdir(folder)
    return [links[index] for index in range(1, count + 1)]


def _join(store: dist.Store, key: str, index: int) -> Link:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(store.get(key).decode())
    connection.sendall(_INDEX.pack(index))
    return Link(connection)


def _ours(connection: socket.socket) -> bool:
    """Whether the other end is a process of this user; elsewhere than on Linux the directory alone sees to that."""
    if sys.platform != "linux":
        return True
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return uid == os.getuid()
