"""The host's side of a domain's server, such as a judge: starts and replaces its supervisor (`supervisor.py`)."""

import contextlib
import socket
import subprocess

from spmd_rl.sidecar import wire
from spmd_rl.sidecar.event_loop import EventLoop
from spmd_rl.sidecar.frames import FrameSocket, start_child

RESTART_SECONDS = 1.0
STOP_SECONDS = 2.0


class RewardServer:
    """The supervisor of one server. The host calls `tick` in each round."""

    def __init__(self, domain: str, spec: wire.ServerSpec, loop: EventLoop) -> None:
        self.ready = False
        """True if the server has ever answered."""
        self.broken = ""
        """Reason why it could not start; empty if it could."""
        self._loop = loop
        self._message = wire.StartServer(domain, spec, free_port())
        self._process: subprocess.Popen | None = None
        self._not_before = 0.0

    @property
    def url(self) -> str:
        """Base URL of the server's OpenAI-compatible API."""
        return f"http://127.0.0.1:{self._message.port}/v1"

    def tick(self) -> None:
        """Start a supervisor unless one runs."""
        if self._process is None and not self.broken and self._loop.now >= self._not_before:
            self._process, sock = start_child("spmd_rl.sidecar.supervisor", self._message)
            self._frames = FrameSocket(sock)
            self._loop.watch(sock, self._receive)

    def close(self) -> None:
        """Hang up, and wait until the server has ended."""
        if self._process is not None:
            self._loop.unwatch(self._frames.socket)
            self._frames.socket.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
            self._process.kill()
            self._process.wait()
            self._process = None

    def _receive(self) -> None:
        messages, gone = self._frames.receive(wire.FROM_CHILD)
        for message in messages:
            if isinstance(message, wire.Ready):
                self.ready = True
            elif not self.ready:
                self.broken = message.detail
        if gone:
            self.close()
            self._not_before = self._loop.now + RESTART_SECONDS


def free_port() -> int:
    """Return an unused loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
