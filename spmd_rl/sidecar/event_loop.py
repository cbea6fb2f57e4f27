"""The event loop of a host: one thread for ZeroMQ sockets and plain sockets alike."""

import contextlib
import select
import socket
import time
from collections.abc import Callable

import zmq

BUSY_SECONDS, IDLE_SECONDS = 0.02, 0.25
"""Longest wait of a round, with work and without; then deadlines are checked."""
MAX_GAP = 0.25
"""Longest pause in seconds (a stopped process, an overloaded machine) that the clock counts."""


class EventLoop:
    """Dispatcher of ready sockets to callbacks, which must not block."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds in which this loop ran: the clock of all deadlines."""
        self._last = time.monotonic()
        self._poller = zmq.Poller()
        # With epoll, the cost of a round depends on the ready sockets and not on all, of which there are thousands.
        self._plain = select.epoll()
        self._poller.register(self._plain.fileno(), zmq.POLLIN)
        self._events: dict[int, int] = {}
        self._callbacks: dict[zmq.Socket | int, Callable[[], None]] = {}

    def watch(
        self,
        sock: zmq.Socket | socket.socket,
        callback: Callable[[], None],
        read: bool = True,
        write: bool = False,
    ) -> None:
        """Call `callback` whenever the socket is readable (`read`) or writable (`write`)."""
        if isinstance(sock, zmq.Socket):
            self._callbacks[sock] = callback
            self._poller.register(sock, (zmq.POLLIN if read else 0) | (zmq.POLLOUT if write else 0))
        else:
            self._callbacks[sock.fileno()] = callback
            self._expect(sock.fileno(), (select.EPOLLIN if read else 0) | (select.EPOLLOUT if write else 0))

    def unwatch(self, sock: socket.socket) -> None:
        """Forget a plain socket, before it is closed."""
        self._callbacks.pop(sock.fileno(), None)
        self._expect(sock.fileno(), 0)

    def _expect(self, file: int, events: int) -> None:
        before = self._events.pop(file, 0)
        if events:
            self._events[file] = events
        if events and before:
            if events != before:
                self._plain.modify(file, events)
        elif events:
            self._plain.register(file, events)
        elif before:
            with contextlib.suppress(OSError):  # closed already
                self._plain.unregister(file)

    def run_once(self, busy: bool) -> None:
        """Wait for a ready socket; advance the clock; run callbacks."""
        seconds = BUSY_SECONDS if busy else IDLE_SECONDS
        ready = self._poller.poll(1000 * seconds)
        now = time.monotonic()
        self.now += min(now - self._last, seconds + MAX_GAP)
        self._last = now
        keys = [key for key, _ in ready if key != self._plain.fileno()]
        if len(keys) < len(ready):
            keys += [file for file, _ in self._plain.poll(0)]
        for key in keys:
            # An earlier callback of this round may have closed the socket.
            if callback := self._callbacks.get(key):
                callback()
