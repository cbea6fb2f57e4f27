"""`Courier`: a generating rank's connections to all training ranks, to fetch weights and deliver what it has made."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import zmq
from torch import Tensor

from spmd_rl import wire
from spmd_rl.curve_keys import ClientKeys, limit_connection
from spmd_rl.errors import RunFailed
from spmd_rl.split import messages
from spmd_rl.split.kept import Kept, tensor_of

AHEAD = 4
"""Pieces of each training rank that are asked for before the first of them has come."""
POLL_MS = 200


class Courier:
    """For one thread at a time, but for `give_up`."""

    def __init__(
        self, addresses: Sequence[str], sender: int, progress: Callable[[], None], keys: ClientKeys | None = None
    ) -> None:
        """addresses: of all training ranks' exchanges, in order. sender: index of this rank among the generating ones.

        progress: called whenever something has come. keys: what the exchanges know this rank by.
        """
        self._sender, self._progress, self._keys = sender, progress, keys
        self._context, self._given_up = zmq.Context(), False
        self._sockets = [self._connect(address) for address in addresses]
        self.num_bytes = 0
        """Bytes of weights that the last `fetch` has received."""

    def _connect(self, address: str) -> zmq.Socket:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        limit_connection(dealer, address)
        if self._keys is not None:
            self._keys.secure(dealer)
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
        self._send(socket, header, payload)
        self._receive(socket, messages.Received)

    def hold(self, version: int) -> bool:
        """Have a version kept until `fetch` has ended; return whether all training ranks still keep it."""
        for socket in self._sockets:
            self._send(socket, messages.Begin(version, self._sender, None))
        replies = [self._receive(socket, messages.Begun)[0] for socket in self._sockets]  # of all, whatever they say
        if all(reply.kept for reply in replies):
            return True
        self.let_go(version)
        return False

    def let_go(self, version: int) -> None:
        """Say that a version which is held here need not be kept any longer."""
        for socket in self._sockets:
            self._send(socket, messages.Fetched(version, self._sender))

    def fetch(self, version: int, num_pieces: int, kept: Kept | None) -> Iterator[tuple[str, Tensor, bytes]]:
        """Yield name, tensor (on the CPU, valid for good) and digest of each weight of a version, in order.

        kept: takes up what comes; where it has the very version of which all training ranks keep deltas, these come.
        RunFailed if a tensor arrives damaged, or if a training rank does not have this version.
        """
        self.num_bytes, base = 0, kept.base if kept else None
        for socket in self._sockets:
            self._send(socket, messages.Begin(version, self._sender, base))
        begun = [self._receive(socket, messages.Begun)[0] for socket in self._sockets]
        for rank, reply in enumerate(begun):
            if not reply.kept:
                raise RunFailed(f"training rank {rank} does not keep version {version} of the weights")
        deltas = all(reply.deltas for reply in begun)
        asked: deque[int] = deque()
        for index in range(num_pieces):
            while len(asked) < AHEAD * len(self._sockets) and (following := index + len(asked)) < num_pieces:
                self._send(self._socket_of(following), messages.GetPiece(version, following, deltas))
                asked.append(following)
            asked.popleft()
            piece, payload = self._receive(self._socket_of(index), messages.Piece)
            assert (piece.version, piece.index) == (version, index), "pieces come in the order in which they are asked"
            if messages.digest(payload) != piece.digest:
                raise RunFailed(f"version {version} of {piece.name} arrived damaged")
            self.num_bytes += payload.nbytes
            tensor = kept.place(piece, payload) if kept else tensor_of(piece, bytearray(payload))
            yield piece.name, tensor, piece.whole
        self.let_go(version)

    def take_slice(self, trainer: int, ticket: int, number: int) -> memoryview:
        """Return what a training rank, by its index, has begun of a slice. RunFailed if it arrives damaged."""
        socket = self._sockets[trainer]
        self._send(socket, messages.TakeSlice(ticket, number))
        header, payload = self._receive(socket, messages.LeftSlice)
        if (header.ticket, header.number) != (ticket, number) or messages.digest(payload) != header.digest:
            raise RunFailed(f"what training rank {trainer} had begun of ticket {ticket} arrived damaged")
        return payload

    def close(self) -> None:
        """Close all connections; idempotent."""
        self._context.destroy(linger=1000)

    def give_up(self) -> None:
        """Have whoever waits here, on another thread, end with RunFailed."""
        self._given_up = True

    def _socket_of(self, index: int) -> zmq.Socket:
        """The connection to the training rank that keeps this piece."""
        return self._sockets[index % len(self._sockets)]

    def _send(self, socket: zmq.Socket, message: wire.Message, *payload: bytes) -> None:
        """Send to a training rank; one that has refused this rank's key takes nothing, ever."""
        while not socket.poll(POLL_MS, zmq.POLLOUT):
            self._wait()
        socket.send_multipart([wire.encode(message), *payload], copy=False)

    def _receive(self, socket: zmq.Socket, kind: type) -> tuple:
        """The next message from a training rank, which is of this kind, and its payload if there is one."""
        while not socket.poll(POLL_MS):
            self._wait()
        header, *payload = socket.recv_multipart(copy=False)
        self._progress()
        message = self._understood(header.bytes)
        assert isinstance(message, kind), f"{type(message).__name__} is no answer"
        return message, *(frame.buffer for frame in payload)

    def _wait(self) -> None:
        """Go on waiting: a training rank that has died ends this process too; one may hang: a stall."""
        if self._given_up:
            raise RunFailed("nobody waits any longer for what training ranks were asked for")

    def _understood(self, header: bytes) -> wire.Message:
        """A message of a training rank."""
        return messages.TO_GENERATOR.decode(header)
