"""`WeightClient`: a generating rank's connections to all training ranks, by which it fetches weights."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import zmq
from torch import Tensor

from spmd_rl.curve_keys import ClientKeys, limit_connection
from spmd_rl.errors import RunFailed
from spmd_rl.sidecar import wire
from spmd_rl.weights import messages
from spmd_rl.weights.delta import DeltaBase, tensor_of

AHEAD = 4
"""Pieces of each training rank that are asked for before the first of them has come."""
POLL_MS = 200


class WeightClient:
    """For one thread at a time, but for `give_up`."""

    codec = wire.Codec(*messages.REPLIES)
    """Decodes what training ranks send."""

    def __init__(
        self,
        addresses: Sequence[str],
        membership: messages.MemberId,
        progress: Callable[[], None],
        keys: ClientKeys | None = None,
    ) -> None:
        """addresses: of all training ranks, in order. membership: by which they know this rank.

        progress: called whenever bytes of something have come. keys: of its connections.
        """
        self.membership, self._progress = membership, progress
        self._context, self._given_up = zmq.Context(), False
        self._sockets = [self._context.socket(zmq.DEALER) for _ in addresses]
        for dealer, address in zip(self._sockets, addresses, strict=True):
            dealer.setsockopt(zmq.LINGER, 0)
            limit_connection(dealer, address)
            if keys is not None:
                keys.secure(dealer)
            dealer.connect(address)
        self.num_bytes = 0
        """Bytes of weights that the last `fetch` has received."""

    def hold(self, version: int) -> bool:
        """Have a version kept until `fetch` has ended; return whether all training ranks still keep it."""
        if all(reply.kept for reply in self._hold(version, None)):
            return True
        self.release(version)
        return False

    def release(self, version: int) -> None:
        """Say that a version which is held here need not be kept any longer."""
        for trainer in range(self.num_trainers):
            self.send(trainer, messages.Release(*self.membership, version))

    def _hold(self, version: int, base: messages.Base | None) -> list[messages.HoldReply]:
        """Ask every training rank to hold the version; collect every reply, refusals included."""
        for trainer in range(self.num_trainers):
            self.send(trainer, messages.Hold(*self.membership, version, base))
        return [self.receive(trainer, messages.HoldReply)[0] for trainer in range(self.num_trainers)]

    def fetch(self, version: int, num_tensors: int, base: DeltaBase | None) -> Iterator[tuple[str, Tensor, bytes]]:
        """Yield name, tensor (on the CPU, valid for good) and digest of each weight of a version, in order.

        base: what is kept of the last version. If all training ranks have deltas to that very version, these come.
        RunFailed if a tensor arrives damaged, or if a training rank does not have this version.
        """
        self.num_bytes = 0
        held = self._hold(version, base.version if base else None)
        for rank, reply in enumerate(held):
            if not reply.kept:
                self.refused(f"version {version} of the weights", rank)
        deltas = all(reply.deltas for reply in held)
        asked: deque[int] = deque()
        for index in range(num_tensors):
            while len(asked) < AHEAD * self.num_trainers and (following := index + len(asked)) < num_tensors:
                self.send(following, messages.FetchTensor(*self.membership, version, following, deltas))
                asked.append(following)
            asked.popleft()
            piece, payload = self.receive(index, messages.TensorMessage)
            assert (piece.version, piece.index) == (version, index), "pieces come in the order in which they are asked"
            if messages.digest(payload) != piece.digest:
                raise RunFailed(f"version {version} of {piece.name} arrived damaged")
            self.num_bytes += payload.nbytes
            tensor = base.place(piece, payload) if base else tensor_of(piece, bytearray(payload))
            yield piece.name, tensor, piece.whole
        self.release(version)

    def close(self) -> None:
        """Close all connections; idempotent."""
        self._context.destroy(linger=1000)

    def give_up(self) -> None:
        """Have whoever waits here, on another thread, end with RunFailed."""
        self._given_up = True

    @property
    def num_trainers(self) -> int:
        """The number of ranks that train."""
        return len(self._sockets)

    def send(self, trainer: int, message: wire.WireMessage, *payload: bytes) -> None:
        """Send to a training rank; `trainer` counts on beyond their number, so that tensors are dealt in turn.

        To one that has refused this rank's key nothing can be sent: this polls until `give_up`.
        """
        socket, frames = self._sockets[trainer % self.num_trainers], [wire.encode(message), *payload]
        while True:
            if socket.poll(POLL_MS, zmq.POLLOUT):
                with contextlib.suppress(zmq.Again):  # it has just been refused
                    socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
                    return
            self.check()

    def receive(self, trainer: int, kind: type) -> tuple:
        """Return the next message from a training rank, which is of this kind, and its payload if there is one."""
        socket = self._sockets[trainer % self.num_trainers]
        while not socket.poll(POLL_MS):
            self.check()
        header, *payload = socket.recv_multipart(copy=False)
        if payload:  # else it may only say that there is nothing yet, which is no progress
            self._progress()
        message = self.codec.decode(header.bytes)
        if isinstance(message, messages.Missing):
            self.refused(f"version {message.version} of the weights", trainer % self.num_trainers)
        assert isinstance(message, kind), f"{type(message).__name__} is no answer"
        return message, *(frame.buffer for frame in payload)

    def check(self) -> None:
        """RunFailed where there is nothing to wait for. A training rank that has died ends this process too; one may
        hang: a stall."""
        if self._given_up:
            raise RunFailed("nobody waits any longer for what training ranks were asked for")

    def refused(self, what: str, trainer: int) -> NoReturn:
        """RunFailed: a training rank has nothing more for this rank."""
        self.check()
        raise RunFailed(f"training rank {trainer} does not keep {what} for this rank: it has not come for it in time")
