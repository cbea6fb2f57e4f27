"""Starts and restarts the sidecar host of this node: what local rank 0 does for the others."""

import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from spmd_rl import wire
from spmd_rl.errors import RunFailed, UserError
from spmd_rl.sidecar.channel import receive, send
from spmd_rl.sidecar.host import clean

if TYPE_CHECKING:  # a host starts without Hydra
    from spmd_rl.config.schema import RewardsConfig

START_SECONDS = 30.0
"""Beyond a domain's own `start_seconds`, until the host must have all servers, and one worker ready in each pool."""
STOP_SECONDS = 1.0


class HostProcess:
    """The host, started now. It ends when we close its socket, when we die, or at the latest by `stop`."""

    def __init__(self, address: str, rewards: "RewardsConfig", keys: str = "") -> None:
        self._address, self._keys = address, keys
        for domain, reward in rewards.domains.items():
            if missing := set(reward.cpu_numbers) - os.sched_getaffinity(0):
                raise UserError(f"reward.{domain}.cpus={reward.cpus}: this run may not use processor {min(missing)}")
        self._lock = threading.Lock()  # the event loop and the client's watch may both find it dead
        self._pools = {
            domain: wire.Pool(
                reward.target,
                dict(reward.args),
                reward.workers,
                reward.sandbox,
                reward.cpu_numbers,
                reward.start_seconds,
            )
            for domain, reward in rewards.domains.items()
        }
        self._servers = {
            domain: wire.Server(reward.server_command, reward.devices.replace("cpu", ""), reward.start_seconds)
            for domain, reward in rewards.domains.items()
            if reward.devices is not None
        }
        slowest = max((reward.start_seconds for reward in rewards.domains.values()), default=0.0)
        self._start_seconds = slowest * (2 if self._servers else 1) + START_SECONDS
        self._start()

    @property
    def alive(self) -> bool:
        """Whether the process runs (it may still be stuck)."""
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Block until every pool has a worker. UserError, in one line, if one cannot be had."""
        self._line.settimeout(self._start_seconds)
        try:
            reply = receive(self._line, wire.FROM_HOST)
        except TimeoutError:
            reply = wire.Failed(f"the sidecar was not ready after {self._start_seconds:g} s")
        if not isinstance(reply, wire.Ready):
            self._end()
            if reply is None:
                raise RunFailed(f"the sidecar host died at its start with code {self._process.returncode}")
            raise UserError(reply.detail)

    def restart(self) -> None:
        """A new host at the same address, whatever became of the old one. Does not wait until it is ready. OSError if
        there can be no new process."""
        with self._lock:
            self._process.kill()
            self._process.wait()
            self._line.close()
            self._start()

    def stop(self) -> None:
        """End the host and its workers, and remove its socket."""
        self._end()
        clean(self._address)

    def _end(self) -> None:
        self._line.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        self._line, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "spmd_rl.sidecar", str(theirs.fileno())]
        # what can be imported here can be imported there
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
        with theirs:
            fds = [theirs.fileno()]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, env=environment)
        # The parent-death signal follows the thread that forks; from a passing one, the closing socket must do.
        lasting = threading.current_thread() is threading.main_thread()
        try:
            parent = os.getpid() if lasting else 0
            send(self._line, wire.Start(parent, self._address, self._pools, self._servers, self._keys))
        except wire.WireError as error:
            self._end()
            raise UserError(f"reward.<domain>.args {error}") from None
        except (BrokenPipeError, ConnectionResetError):
            pass  # dead already: whoever asks finds out
