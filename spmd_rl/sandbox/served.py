"""Sandboxes whose confined processes are forked by a server of their own, which has the standard library loaded."""

import json
import socket
import subprocess
from abc import abstractmethod
from contextlib import ExitStack, suppress
from typing import Any

from spmd_rl.sandbox.base import BaseSandbox, ChildFiles
from spmd_rl.types import RunLimits

START_SECONDS = 120.0  # the time that a server has to load the standard library and the packages, on a cold disk


class ServedSandbox(BaseSandbox):
    """Owns one server (see `server.py`), with at most two children at a time. RuntimeError where it cannot work."""

    def __init__(self) -> None:
        super().__init__()
        self.open()

    @abstractmethod
    def launch(self, fd: int, stack: ExitStack) -> subprocess.Popen:
        """Start the server's process, which finds its socket at `fd`. `stack` closes when it is ready, or dead."""

    def last_words(self) -> str:
        """Return what a server that did not start has written about it, if that was kept."""
        return ""

    def start(self, slot: int, limits: RunLimits, files: ChildFiles) -> "Forked":
        """Start a job, as `BaseSandbox.start` says. A server that was killed is replaced."""
        if self.process.poll() is not None:
            self.close()
            self.open()
        ours, theirs = socket.socketpair()
        order = {"slot": slot, "disk_bytes": limits.disk_bytes, "processes": limits.processes}
        fds = [theirs.fileno(), files.stdin, files.stdout, files.stderr, files.job, files.report]
        with theirs:
            socket.send_fds(self._orders, [json.dumps(order).encode()], fds + [files.rpc][: files.rpc >= 0])
        return Forked(ours)

    def use(self, python: str) -> None:
        """Run code with another interpreter, as `Sandbox.use` says."""
        super().use(python)
        self.close()
        self.open()
        self.prove()

    def close(self) -> None:
        """End the server, which ends its children first."""
        self._orders.close()
        self.process.wait()

    def owner(self) -> int:
        """Return the process id of the server."""
        return self.process.pid

    def open(self) -> None:
        """Start the server. RuntimeError where it cannot work."""
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ExitStack() as stack:
            with theirs:
                self.process = self.launch(theirs.fileno(), stack)
            self._orders.settimeout(START_SECONDS)
            try:
                reply = self._orders.recv(1 << 12).decode()
            except TimeoutError:
                self.process.kill()
                reply = f"its process was not ready after {START_SECONDS:g} s"
            if not reply.startswith("ready "):
                self.close()
                raise RuntimeError(reply or self.last_words() or "its process died at the start")
        self._orders.settimeout(None)
        self.own_bytes = int(reply.split()[1])


def spawn(command: list[str], fds: list[int], environment: dict[str, str], **given: Any) -> subprocess.Popen:
    """Start the process of a server, which reads and writes nothing but these descriptors."""
    null = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=null, stdout=null, pass_fds=fds, env=environment, cwd="/", **given)


class Forked:
    """A child of a server, known by the socket on which its end is reported."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def fileno(self) -> int:
        """Return a descriptor that is readable once the child has ended."""
        return self._control.fileno()

    def kill(self) -> None:
        """Kill the child and all that it has started."""
        with suppress(OSError):  # it has ended
            self._control.shutdown(socket.SHUT_WR)

    def wait(self) -> tuple[int, float]:
        """Return the wait status and the seconds of processor time. RuntimeError if it never began."""
        with self._control:
            reply = self._control.recv(1 << 12)
        if not reply:
            raise RuntimeError("the fork server died, or could not start a child")
        report = json.loads(reply)
        return report["status"], report["cpu"]
