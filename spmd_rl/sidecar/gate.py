"""The gate of a server: it accepts connections, and relays their bytes to its ROUTER up to a limit for each.

The servers are sidecar hosts and those of training ranks.

libzmq limits the size of a frame, not of a message: parts that are no message yet are kept without a limit, and nobody
sees them. It also aborts the process when descriptors run out (`ipc_listener.cpp`), and when a connection hangs up
whose input has stopped at a high-water mark, as soon as a heartbeat is due (`!_io_error`, `stream_engine_base.cpp`).
So the ROUTER listens at an address that only this process can reach, without a high-water mark for what comes in, and
the gate counts what a connection has sent and the server has not read. It never hangs up on the ROUTER, but ends its
own direction and waits until the ROUTER closes.
"""

import errno
import resource
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import zmq

from spmd_rl.curve_keys import LOST_MS
from spmd_rl.errors import tell
from spmd_rl.sidecar.event_loop import EventLoop
from spmd_rl.sidecar.frame_counter import BadFrame, FrameCounter
from spmd_rl.sidecar.sockets import listen

TOTAL_BYTES = 32 << 20
"""What all connections together may have sent that is not read; twice the largest frame where that is more."""
STALLED_SECONDS = 1.0
"""A connection at its limit of which no message was read for this long is cut off: what it sends is none."""
CROWDED_SECONDS = 0.1
"""The same, for the connections that hold the most while `TOTAL_BYTES` are reached."""
CHUNK_BYTES = 1 << 18
MAX_CONNECTIONS = 1024
MAX_SILENT = 256
"""The number of connections from which no message has come yet; the oldest goes first."""
ACCEPTS_PER_ROUND = 16
SPARE_FILES = 16
"""The descriptors that connections leave to workers, and to the ROUTER, which would abort without one."""
OWN_FILES, FILES_PER_CONNECTION = 128, 3
"""Descriptors of this process: without connections and workers, and for a connection."""
NO_DESCRIPTORS_SECONDS = 0.2
"""The pause before the next connection is accepted, where descriptors or memory are short."""
CLOSE_SECONDS = 10.0
"""The time that the ROUTER may take to close a connection; its own limit for a handshake is shorter."""
FREE_SECONDS = 0.2
"""The time that the host may take to read what a connection left when it was closed."""
SAY_SECONDS = 10.0
"""The pause between two lines about connections that were cut off."""


class Connection:
    """A connection of a peer (`outer`) and ours to the ROUTER (`inner`), with what is on the way between them."""

    def __init__(self, outer: socket.socket, inner: socket.socket, counter: FrameCounter, now: float) -> None:
        self.outer, self.inner, self.counter = outer, inner, counter
        self.since = now
        """When it came, or was last read from."""
        self.spoke = False
        """Whether a message has come from it."""
        self.ended = False
        """Whether the peer will send no more."""
        self.close_at = float("inf")
        self.file = -1
        """The descriptor of the ROUTER's end, once a message has come."""
        self.waits = False
        """Whether it is at its limit, and has to wait until there is room."""
        self.unfed = self.to_inner = self.to_outer = memoryview(b"")

    @property
    def closing(self) -> bool:
        """Whether the peer's side is closed, and ours is left to the ROUTER."""
        return self.close_at < float("inf")


class Gate:
    """Accepts and relays. The server calls `tick` in every round of its event loop, and `read` for each message."""

    def __init__(
        self,
        router: tuple[zmq.Socket, str],
        address: str,
        keyed: bool,
        loop: EventLoop,
        owner: str = "sidecar",
        num_files: int = 0,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        """router: see `open_router`. address: `tcp://HOST:0` is at any free port. keyed: only CURVE is let in.

        owner: for what is said of it. num_files: descriptors that this process needs for workers. UserError as in
        `listen`.
        """
        self.num_cut = 0
        """The number of connections that were cut off for what they sent."""
        self._max_bytes = router[0].getsockopt(zmq.MAXMSGSIZE)
        self._inner, self._keyed, self._loop, self._owner = router[1], keyed, loop, owner
        self._max_total = max(TOTAL_BYTES, 2 * self._max_bytes)
        self._limit = min(connection_limit(num_files), max_connections)
        self._listener, self.address = listen(address, owner)
        self._connections: dict[bytes, Connection] = {}  # by the name of our socket to the ROUTER, in order of arrival
        self._by_file: dict[int, Connection] = {}
        self._total = 0
        """The unread bytes of all connections and of `_freed`."""
        self._freed: deque[tuple[float, int]] = deque()
        self._num_full = 0
        self._accept_at = 0.0
        self._crowded = False
        self._say_at = 0.0
        self._watch_listener(True)

    @property
    def busy(self) -> bool:
        """Whether a connection waits for its time to be over."""
        return self._crowded or bool(self._freed or self._num_full)

    def close(self) -> None:
        """Close everything."""
        for name in list(self._connections):
            self._remove(name)
        self._watch_listener(False)
        self._listener.close()

    def read(self, frames: Sequence[zmq.Frame]) -> None:
        """Count a message that the host has read from the ROUTER: the peer's id, then its parts."""
        file = frames[0].get(zmq.SRCFD)
        connection = self._by_file.get(file) or self._find(file)
        if connection is None:
            return  # gone
        connection.spoke, connection.since = True, self._loop.now
        before = connection.counter.unread
        for frame in frames[1:]:
            connection.counter.read(len(frame))
        self._total += connection.counter.unread - before
        if connection.waits and connection.counter.has_room:
            self._relay(connection)

    def tick(self) -> None:
        """Cut off what stalls, and accept again after a pause."""
        now = self._loop.now
        if self._accept_at and now >= self._accept_at:
            self._accept_at = 0.0
            self._watch_listener(True)
        while self._freed and now >= self._freed[0][0]:
            self._total -= self._freed.popleft()[1]
        for name in [name for name, c in self._connections.items() if now >= c.close_at]:
            self._remove(name)
        full = [c for c in self._connections.values() if c.counter.full and not c.closing]
        self._num_full = len(full)
        for connection in full:
            if now - connection.since > STALLED_SECONDS:
                self._cut(connection, "sent more than one message may have")
        self._make_room()
        if self._crowded and self._total < self._max_total:
            self._crowded = False
            for connection in list(self._connections.values()):
                self._relay(connection)

    def _make_room(self) -> None:
        """While the limit of all is reached, cut off those that hold the most and of which nothing was read lately."""
        going = sum(size for _, size in self._freed)
        going += sum(c.counter.unread for c in self._connections.values() if c.closing)
        excess = self._total - going - self._max_total // 2
        if excess < self._max_total // 2:
            return
        self._crowded = True
        since = self._loop.now - CROWDED_SECONDS
        stalled = [c for c in self._connections.values() if c.since < since and c.counter.unread and not c.closing]
        for connection in sorted(stalled, key=lambda c: -c.counter.unread):
            if excess <= 0:
                break
            excess -= connection.counter.unread
            self._cut(connection, "sent much that is no message yet while others wait")

    # -- coming and going -----------------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_ROUND):
            try:
                outer, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.ECONNABORTED, errno.EPROTO, errno.EINTR):
                    continue
                self._pause()
                return
            try:
                self._admit(outer)
            except OSError:  # no descriptors, or the ROUTER cannot keep up
                outer.close()
                self._pause()
                return

    def _admit(self, outer: socket.socket) -> None:
        outer.setblocking(False)
        if outer.family != socket.AF_UNIX:
            outer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            outer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_MS)
            outer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            outer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        present = [connection for connection in self._connections.values() if not connection.closing]
        silent = [connection for connection in present if not connection.spoke]
        spare = SPARE_FILES + len(silent)  # of each of them, the ROUTER may have yet to accept its end
        if outer.fileno() > resource.getrlimit(resource.RLIMIT_NOFILE)[0] - spare:
            raise OSError(errno.EMFILE, "too few descriptors are left")  # the lowest free one is so high
        if len(silent) >= MAX_SILENT or len(present) >= self._limit:
            self._end(silent[0] if silent else min(present, key=lambda connection: connection.since))
        inner = socket.socket(socket.AF_UNIX)
        try:
            inner.setblocking(False)
            inner.bind("")  # the kernel gives it a name
            inner.connect("\0" + self._inner)
        except OSError:
            inner.close()
            raise
        connection = Connection(outer, inner, FrameCounter(self._keyed, self._max_bytes), self._loop.now)
        self._connections[inner.getsockname()] = connection
        self._relay(connection)

    def _pause(self) -> None:
        self._accept_at = self._loop.now + NO_DESCRIPTORS_SECONDS
        self._watch_listener(False)

    def _watch_listener(self, on: bool) -> None:
        if on:
            self._loop.watch(self._listener, self._accept)
        else:
            self._loop.unwatch(self._listener)

    def _find(self, file: int) -> Connection | None:
        """Return the connection that the ROUTER has at this descriptor, by the name of its other end."""
        try:
            end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=file)
            try:
                connection = self._connections.get(end.getpeername())
            finally:
                end.detach()
        except OSError:
            return None
        if connection is not None:
            connection.file = file
            self._by_file[file] = connection
        return connection

    def _cut(self, connection: Connection, why: str) -> None:
        """End a connection for what it sent, and say so now and then."""
        self.num_cut += 1
        if self._loop.now >= self._say_at:
            self._say_at = self._loop.now + SAY_SECONDS
            text = f"a connection is cut off: it {why} ({self.num_cut} so far)"
            tell(f"{self._owner}: {text}")
        self._end(connection)

    def _end(self, connection: Connection) -> None:
        """Close the peer's side, and let the ROUTER close ours."""
        if connection.closing:
            return
        connection.ended, connection.close_at = True, self._loop.now + CLOSE_SECONDS
        connection.unfed = connection.to_inner = connection.to_outer = memoryview(b"")
        self._loop.unwatch(connection.outer)
        connection.outer.close()
        self._loop.watch(connection.inner, lambda: self._drain(connection))
        with suppress(OSError):
            connection.inner.shutdown(socket.SHUT_WR)

    def _drain(self, connection: Connection) -> None:
        try:
            if connection.inner.recv(CHUNK_BYTES):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._remove(connection.inner.getsockname())

    def _remove(self, name: bytes) -> None:
        if (connection := self._connections.pop(name, None)) is None:
            return
        self._freed.append((self._loop.now + FREE_SECONDS, connection.counter.unread))
        if self._by_file.get(connection.file) is connection:
            del self._by_file[connection.file]
        for sock in (connection.outer, connection.inner):
            if sock.fileno() >= 0:
                self._loop.unwatch(sock)
                sock.close()

    # -- bytes ----------------------------------------------------------------------------------------------------

    def _relay(self, connection: Connection) -> None:
        """Move what can be moved in both directions, and wait for what cannot."""
        try:
            self._relay_in(connection)
            self._relay_out(connection)
        except BadFrame as error:
            self._cut(connection, f"sent {error}")
        except OSError:  # one end is gone
            self._end(connection)

    def _relay_in(self, c: Connection) -> None:
        """From the peer to the ROUTER: one chunk, and what was left of an earlier one."""
        may_read, c.waits = True, False
        with suppress(BlockingIOError):
            while not c.ended or c.unfed or c.to_inner:
                if c.to_inner:
                    c.to_inner = c.to_inner[c.inner.send(c.to_inner) :]
                elif c.counter.full or self._is_crowded():
                    c.waits = c.counter.full
                    break
                elif c.unfed:
                    fed = self._feed(c)
                    c.to_inner, c.unfed = c.unfed[:fed], c.unfed[fed:]
                elif may_read:
                    may_read = False
                    c.unfed = memoryview(c.outer.recv(CHUNK_BYTES))
                    c.ended = not c.unfed
                else:
                    break
        if c.ended and not c.unfed and not c.to_inner:
            self._end(c)

    def _feed(self, c: Connection) -> int:
        before = c.counter.unread
        try:
            return c.counter.feed(c.unfed)
        finally:
            self._total += c.counter.unread - before

    def _is_crowded(self) -> bool:
        self._crowded = self._crowded or self._total >= self._max_total
        return self._crowded

    def _relay_out(self, c: Connection) -> None:
        """From the ROUTER to the peer, likewise; then say what to wait for."""
        if c.closing:
            return
        with suppress(BlockingIOError):
            if not c.to_outer:
                c.to_outer = memoryview(c.inner.recv(CHUNK_BYTES))
                if not c.to_outer:
                    self._remove(c.inner.getsockname())
                    return
            c.to_outer = c.to_outer[c.outer.send(c.to_outer) :]
        idle = not (c.ended or c.unfed or c.to_inner or c.counter.full or self._crowded)
        self._loop.watch(c.outer, lambda: self._relay(c), read=idle, write=bool(c.to_outer))
        self._loop.watch(c.inner, lambda: self._relay(c), read=not c.to_outer, write=bool(c.to_inner))


def connection_limit(num_files: int) -> int:
    """Raise this process's limit of open files as far as it may; return how many connections fit beside `num_files`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = min(hard, 1 << 20) if hard != resource.RLIM_INFINITY else 1 << 20
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return max(8, (files - OWN_FILES - num_files) // FILES_PER_CONNECTION)
