"""`Courier`: a generating rank's connections to all training ranks, to fetch weights and deliver what it has made."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
import zmq
from torch import Tensor

from spmd_rl import wire
from spmd_rl.errors import RunFailed
from spmd_rl.split import messages

AHEAD = 4
"""Pieces of each training rank that are asked for before the first of them has come."""
POLL_MS = 200


class Courier:
    """Not for several threads."""

    def __init__(self, addresses: Sequence[str], sender: int, progress: Callable[[], None]) -> None:
        """addresses: of all training ranks' exchanges, in order. sender: index of this rank among the generating ones.

        progress: called whenever something has come.
        """
        self._sender, self._progress = sender, progress
        self._context = zmq.Context()
        self._sockets = [self._connect(address) for address in addresses]

    def _connect(self, address: str) -> zmq.Socket:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(address)
        return dealer

    @property
    def holder(self) -> int:
        """Index of the training rank to which this rank delivers."""
        return self._sender % len(self._sockets)

    def deliver(self, kind: str, number: int, payload: bytes) -> None:
        """Hand over to the training rank `holder`; returns once it is there."""
        socket = self._sockets[self.holder]
        header = messages.Delivery(kind, number, self._sender, messages.digest(payload))
        socket.send_multipart([wire.encode(header), payload], copy=False)
        self._receive(socket, messages.Received)

    def hold(self, version: int) -> bool:
        """Have a version kept until `fetch` has ended; return whether all training ranks still keep it."""
        for socket in self._sockets:
            socket.send(wire.encode(messages.Begin(version, self._sender)))
        replies = [self._receive(socket, messages.Begun)[0] for socket in self._sockets]  # of all, whatever they say
        if all(reply.kept for reply in replies):
            return True
        self._let_go(version)
        return False

    def _let_go(self, version: int) -> None:
        for socket in self._sockets:
            socket.send(wire.encode(messages.Fetched(version, self._sender)))

    def fetch(self, version: int, num_pieces: int) -> Iterator[tuple[str, Tensor, bytes]]:
        """Yield name, tensor (on the CPU, valid for good) and digest of each weight of a version, in order.

        RunFailed if a tensor arrives damaged, or if a training rank does not have this version.
        """
        for socket in self._sockets:
            socket.send(wire.encode(messages.Begin(version, self._sender)))
        for rank, socket in enumerate(self._sockets):
            if not self._receive(socket, messages.Begun)[0].kept:
                raise RunFailed(f"training rank {rank} does not keep version {version} of the weights")
        asked: deque[int] = deque()
        for index in range(num_pieces):
            while len(asked) < AHEAD * len(self._sockets) and (following := index + len(asked)) < num_pieces:
                self._socket_of(following).send(wire.encode(messages.GetPiece(version, following)))
                asked.append(following)
            asked.popleft()
            piece, payload = self._receive(self._socket_of(index), messages.Piece)
            assert (piece.version, piece.index) == (version, index), "pieces come in the order in which they are asked"
            if messages.digest(payload) != piece.digest:
                raise RunFailed(f"version {version} of {piece.name} arrived damaged")
            yield piece.name, _tensor(piece, payload), piece.digest
        self._let_go(version)

    def close(self) -> None:
        """Give up all connections; idempotent."""
        self._context.destroy(linger=1000)

    def _socket_of(self, index: int) -> zmq.Socket:
        """The connection to the training rank that keeps this piece."""
        return self._sockets[index % len(self._sockets)]

    def _receive(self, socket: zmq.Socket, kind: type) -> tuple:
        """The next message from a training rank, which is of this kind, and its payload if there is one."""
        while not socket.poll(POLL_MS):
            pass  # a training rank that has died ends this process too, and one that hangs is a stall
        header, *payload = socket.recv_multipart(copy=False)
        self._progress()
        message = messages.TO_GENERATOR.decode(header.bytes)
        assert isinstance(message, kind), f"{type(message).__name__} is no answer"
        return message, *(frame.buffer for frame in payload)


def _tensor(piece: messages.Piece, payload: memoryview) -> Tensor:
    dtype = getattr(torch, piece.dtype)
    if not payload.nbytes:
        return torch.empty(piece.shape, dtype=dtype)
    return torch.frombuffer(bytearray(payload), dtype=dtype).reshape(piece.shape)
