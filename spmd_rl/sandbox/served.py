"""The server that a sandbox owns: a process with the standard library loaded, which forks the confined ones."""

import fcntl
import io
import json
import os
import socket
import subprocess
import sys
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from spmd_rl.types import RunLimits

START_SECONDS = 120.0  # to load the standard library and the packages from a cold disk
GUEST = ["base/process", *(f"sandbox/{name}" for name in ("confine", "forkserver_main", "namespaces", "server"))]
"""Our modules that the server imports, besides `sandbox/guest`."""
# older interpreters cannot evaluate our annotations
LAZY = "from __future__ import annotations\n"
_SEALS = 0xF  # no more sealing, shrinking, growing, writing


class ServedSandbox(ABC):
    """The owner of one server, with at most two children at a time. RuntimeError where it cannot work."""

    own_bytes = 0
    """Address space for packages."""
    own_processes = 0
    """Processes that the kernel counts for each job."""
    python = sys.executable

    def __init__(self) -> None:
        self.open()

    @abstractmethod
    def launch(self, orders: int, guest: int, stack: ExitStack) -> subprocess.Popen:
        """Start the server with its socket and the archive of our modules; `stack` closes when it is ready or dead."""

    def start(self, slot: int, limits: RunLimits, fds: Sequence[int]) -> "Forked":
        """Start a job with copies of these descriptors from 0 on. `slot`: 0 or 1, another for each running job."""
        if self.process.poll() is not None:
            self.reopen()
        ours, theirs = socket.socketpair()
        order = {"slot": slot, "disk_bytes": limits.disk_bytes, "may_fork": limits.processes > 1}
        with theirs:
            socket.send_fds(self._orders, [json.dumps(order).encode()], [theirs.fileno(), *fds])
        return Forked(ours)

    def close(self) -> None:
        """End the server, which ends its children first."""
        self._orders.close()
        self.process.wait()

    def reopen(self) -> None:
        """Replace the server."""
        ServedSandbox.close(self)
        self.open()

    def open(self) -> None:
        """Start the server. RuntimeError where it cannot work."""
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ExitStack() as stack:
            guest = memory_file(archive_of_guest())
            stack.callback(os.close, guest)
            with theirs:
                self.process = self.launch(theirs.fileno(), guest, stack)
            for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
                stack.enter_context(stream)
            self._orders.settimeout(START_SECONDS)
            try:
                reply = self._orders.recv(1 << 12).decode()
            except TimeoutError:
                self.process.kill()
                reply = f"its process was not ready after {START_SECONDS:g} s"
            if reply != "ready":
                self.close()
                words = self.process.stderr.read().decode(errors="replace").strip()[-300:]
                raise RuntimeError(reply or words or "its process died at the start")
        self._orders.settimeout(None)


def spawn(command: list[str], start: str, fds: list[int], environment: dict[str, str], **user: Any) -> subprocess.Popen:
    """Start a process that calls `forkserver_main.start` with these arguments."""
    code = f"from spmd_rl.sandbox import forkserver_main as main; main.start({start})"
    # its children have pipes too, and inherit the interpreter's objects for them
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([*command, "-c", code], pass_fds=fds, env=environment, cwd="/", **pipes, **user)


def archive_of_guest() -> bytes:
    """Return a zip of our modules for the server's interpreter."""
    here, buffer = Path(__file__).parents[1], io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        # our `__init__` files import too much
        for package in ("spmd_rl", "spmd_rl/base", "spmd_rl/sandbox"):
            archive.writestr(f"{package}/__init__.py", "")
        # without LAZY, which the code that they compile would inherit; they have no annotations
        for path in here.glob("sandbox/guest/*.py"):
            archive.writestr(str(path.relative_to(here.parent)), path.read_text())
        for name in GUEST:
            archive.writestr(f"spmd_rl/{name}.py", LAZY + (here / f"{name}.py").read_text())
    return buffer.getvalue()


def memory_file(content: bytes) -> int:
    """Return a descriptor that can only be read."""
    fd = os.memfd_create("job", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


class Forked:
    """A child of a server, known by the socket that reports its end."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def fileno(self) -> int:
        """Return a descriptor that is readable once the child has ended."""
        return self._control.fileno()

    def kill(self) -> None:
        """Kill the child and all that it has started."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)

    def wait(self) -> tuple[int, float]:
        """Return the wait status and seconds of processor time. RuntimeError if it never began."""
        with self._control:
            reply = self._control.recv(1 << 12)
        if not reply:
            raise RuntimeError("the fork server died, or could not start a child")
        report = json.loads(reply)
        return report["status"], report["cpu"]
