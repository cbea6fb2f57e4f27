"""The loop of a process that forks a confined child for each order and reports its end. Standard library only.

Subclasses confine the child: `forkserver_main.py` by user ids, `namespaces.py` by namespaces, `PlainServer` not at all.
"""

import array
import contextlib
import fcntl
import json
import os
import selectors
import signal
import socket
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from spmd_rl.sandbox import confine
from spmd_rl.sandbox.guest import main

FILTERS = {may_fork: confine.seccomp_program(may_fork) for may_fork in (False, True)}
FIRST_FREE_FD = 64  # descriptors from here on do not collide with those of a child


@dataclass(eq=False)
class Child:
    """A running job. `control` reports its end; the owner asks for it by a shutdown of this socket."""

    control: socket.socket
    slot: int
    may_fork: bool
    disk_bytes: int
    pid: int = 0
    pidfd: int = -1
    status_fd: int = -1
    """Pipe with the wait status, if that of `pid` is not the job's."""


class Server(ABC):
    """A process that forks a child for each order, until the owner of the socket is gone."""

    def __init__(self, orders: socket.socket) -> None:
        self.running: set[Child] = set()
        self.ended: dict[int, tuple] = {}
        """Results of wait4 by pid, until reported."""
        self._orders = orders
        self._selector = selectors.DefaultSelector()
        self._selector.register(orders, selectors.EVENT_READ, None)

    @abstractmethod
    def fork(self, child: Child, fds: list[int]) -> int:
        """Start a job in a confined process with these descriptors from 0 on; return its pid."""

    def end_others(self, child: Child) -> None:  # noqa: B027 - none can be known, or the kernel has done it
        """Kill and reap all processes that an ended child has left."""

    def run(self) -> None:
        """Serve until the socket closes, then end all children."""
        while True:
            for key, _ in self._selector.select():
                if (child := key.data) is None:
                    if (child := self._begin()) is None:
                        for left in self.running:
                            self._end(left)
                        return
                    self.running.add(child)
                elif child in self.running:
                    self.running.remove(child)
                    self._end(child)

    def _begin(self) -> "Child | None":
        text, data, _, _ = self._orders.recvmsg(1 << 16, socket.CMSG_SPACE(7 * 4))
        if not text:
            return None
        fds = array.array("i")
        for _, _, part in data:
            fds.frombytes(part)
        control, *others = fds
        child = Child(socket.socket(fileno=control), **json.loads(text))
        # without a process the owner sees that its socket closes
        with contextlib.suppress(OSError):
            child.pid = self.fork(child, others)
            child.pidfd = os.pidfd_open(child.pid)
            self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        self._selector.register(child.control, selectors.EVENT_READ, child)
        for fd in others:
            os.close(fd)
        return child

    def _end(self, child: Child) -> None:
        self._selector.unregister(child.control)
        with child.control, contextlib.ExitStack() as stack:
            if child.status_fd >= 0:
                stack.callback(os.close, child.status_fd)
            if child.pidfd < 0:
                return
            self._selector.unregister(child.pidfd)
            os.close(child.pidfd)
            if child.pid not in self.ended:
                os.kill(child.pid, signal.SIGKILL)
                self.ended[child.pid] = os.wait4(child.pid, 0)
            self.end_others(child)
            _, status, usage = self.ended.pop(child.pid)
            if child.status_fd >= 0:
                status = int(os.read(child.status_fd, 16) or status)
            report = {"status": status, "cpu": usage.ru_utime + usage.ru_stime}
            with contextlib.suppress(OSError):
                child.control.send(json.dumps(report).encode())


class PlainServer(Server):
    """A server whose children are not confined."""

    def __init__(self, orders: socket.socket, directory: str) -> None:
        super().__init__(orders)
        self._directory = directory

    def fork(self, child: Child, fds: list[int]) -> int:
        """Start a job in the directory."""
        if (pid := os.fork()) == 0:
            confined(self._become_child, fds)
        return pid

    def _become_child(self, fds: list[int]) -> None:
        take_descriptors(fds)
        os.setsid()
        os.chdir(self._directory)
        do_job()


def take_descriptors(fds: list[int]) -> None:
    """Make `fds` the descriptors 0, 1, 2, ..., and close all others."""
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, FIRST_FREE_FD) for fd in fds]
    for i, fd in enumerate(copies):
        os.dup2(fd, i)
    os.closerange(len(copies), os.sysconf("SC_OPEN_MAX"))


def confined(action: Callable[..., None], *args: object) -> NoReturn:
    """Call an action that ends this process. Exceptions go to stderr."""
    try:
        try:
            action(*args)
        finally:
            os.write(2, traceback.format_exc().encode())
    finally:
        # after a failure this process must not go on as a second server
        os._exit(1)


def confine_and_work(directory: str, may_fork: bool, give_up: Callable[[], None]) -> None:
    """Confine this process, do its job and end it. `give_up` drops rights or capabilities."""
    os.setsid()
    os.chdir(directory or "/")
    os.umask(0o077)
    give_up()
    confine.call("prctl", confine.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if confine.landlock_version():
        files = {"/": confine.READ, directory: confine.WRITE, "/dev/null": confine.WRITE} if directory else {}
        confine.landlock(files)
    if confine.seccomp_supported():
        confine.install_seccomp(FILTERS[may_fork])
    do_job()


def do_job() -> None:
    """Do the job of a process and end it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main.main(3, 4, 5)
