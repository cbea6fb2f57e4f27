"""A domain's own server as the host sees it: a keeper process that is started, listened to and replaced.

Leaves out the server's whole life, which its keeper looks after (`keeper.py`).
"""

import selectors
import socket
import subprocess
import sys

from spmd_rl import wire
from spmd_rl.sidecar.channel import Channel, send

LATER_SECONDS = 1.0
"""Before a keeper that died is replaced."""
GRACE_SECONDS = 2.0
"""For a keeper to end what it keeps."""


class Server:
    """The host calls `tick` in every round of its loop, and `heed` when the keeper's socket wakes."""

    def __init__(self, domain: str, spec: wire.Server, selector: selectors.BaseSelector) -> None:
        self.ready = False
        """Whether it has ever answered. Afterwards, that it is down shows in the verdicts."""
        self.broken = ""
        """Why it could not be started, if so."""
        self._selector = selector
        self._keep = wire.Keep(domain, spec, free_port())
        self._process: subprocess.Popen | None = None
        self._not_before = 0.0

    @property
    def url(self) -> str:
        """Where it serves what OpenAI's API looks like; the same however often it is started."""
        return f"http://127.0.0.1:{self._keep.port}/v1"

    def tick(self, now: float) -> None:
        """Start a keeper where there is none. `now`: seconds of the host's own running time."""
        if self._process is None and not self.broken and now >= self._not_before:
            self._start()

    def heed(self, _: None, now: float) -> None:
        """Take in what the keeper has said, and its death."""
        messages, gone = self._channel.receive(wire.FROM_KEEPER)
        for message in messages:
            if isinstance(message, wire.Ready):
                self.ready = True
            elif not self.ready:
                self.broken = message.detail
        if gone:
            self.close()
            self._not_before = now + LATER_SECONDS

    def close(self) -> None:
        """Hang up, upon which the keeper ends the server; and see to it."""
        if self._process is not None:
            self._selector.unregister(self._channel.socket)
            self._channel.socket.close()
            try:
                self._process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "spmd_rl.sidecar.keeper", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        send(ours, self._keep)
        self._channel = Channel(ours)
        self._selector.register(ours, selectors.EVENT_READ, (self, None))


def free_port() -> int:
    """A port of the loopback that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
