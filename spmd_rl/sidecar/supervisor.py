"""The supervisor of a domain's server: starts the command, checks its health, restarts and ends it.

    python -m spmd_rl.sidecar.supervisor <fd of a socket to the host>

A separate process, so that a hanging server cannot block the host. The server sees only its devices. Its processes end
with it, since the supervisor adopts orphans. The last lines of its output are printed if it ends by itself.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

from spmd_rl.base.errors import tell
from spmd_rl.base.process import adopt_orphans, die_with_parent, kill_children
from spmd_rl.sidecar import wire
from spmd_rl.sidecar.frames import receive_frame, send_frame

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
"""Variables of NVIDIA, AMD and Ascend. ROCR_VISIBLE_DEVICES stays: HIP counts within it."""
RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "TORCHELASTIC_",
    "VLLM_ENABLE_V1_MULTIPROC",
)
"""Prefixes of variables that the server does not inherit."""
CHECK_SECONDS = 0.25
HEALTHY_SECONDS = 5.0
REPLY_SECONDS = 10.0
MAX_MISSED = 3
"""Missed replies after which the server is restarted."""
PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 60.0
"""Pause before a restart, doubled after each failure."""
TAIL_LINES = 40


class ServerSupervisor:
    """Supervisor of one server. Sends the host `Ready` at its first answer, or `StartFailed`."""

    def __init__(self, host: socket.socket, start: wire.StartServer) -> None:
        self._host, self._server, self._port = host, start.server, start.port
        self._name = f"reward.{start.domain}.server"
        self._command = [word.replace("{port}", str(start.port)) for word in start.server.command]
        self._process: subprocess.Popen | None = None
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)

    async def run(self) -> None:
        """Run until the host is gone or the first start has failed."""
        self._host.setblocking(False)
        gone = asyncio.create_task(asyncio.get_running_loop().sock_recv(self._host, 1))
        supervise = asyncio.create_task(self._supervise())
        await asyncio.wait((gone, supervise), return_when=asyncio.FIRST_COMPLETED)
        for task in (gone, supervise):
            task.cancel()
        await asyncio.gather(gone, supervise, return_exceptions=True)
        kill_children()

    async def _supervise(self) -> None:
        if failure := await self._start():
            send_frame(self._host, wire.StartFailed(f"{self._name}: {' '.join(self._command)}: {failure}"))
            return
        send_frame(self._host, wire.Ready())
        pause = PAUSE_SECONDS
        while True:
            since = time.monotonic()
            failure = await self._watch()
            pause = PAUSE_SECONDS if time.monotonic() - since > MAX_PAUSE_SECONDS else pause
            while failure:
                tell(f"sidecar: {self._name} {failure}; restart in {pause:g} s")
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
                failure = await self._start()

    async def _start(self) -> str:
        """Start the server. Return the failure, if any."""
        me = os.getpid()
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment(self._server.devices),
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(me),
            )
        except OSError as error:
            return str(error)
        os.set_blocking(self._process.stdout.fileno(), False)
        asyncio.get_running_loop().add_reader(self._process.stdout, self._read)
        self._tail.clear()
        deadline = time.monotonic() + self._server.start_seconds
        while time.monotonic() < deadline:
            await asyncio.sleep(CHECK_SECONDS)
            if self._process.poll() is not None:
                return self._end(f"ended with code {self._process.returncode}")
            if await answers(self._port, min(REPLY_SECONDS, self._server.start_seconds)):
                return ""
        return self._end(f"no answer within {self._server.start_seconds:g} s")

    async def _watch(self) -> str:
        missed = 0
        while missed < MAX_MISSED:
            checked = time.monotonic()
            while time.monotonic() - checked < HEALTHY_SECONDS:
                await asyncio.sleep(CHECK_SECONDS)
                if self._process.poll() is not None:
                    return self._end(f"ended with code {self._process.returncode}")
            missed = 0 if await answers(self._port, REPLY_SECONDS) else missed + 1
        return self._end(f"did not answer {missed} times")

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._process.stdout.fileno(), 1 << 16):
                unfinished = self._tail.pop() if self._tail else b""
                self._tail.extend((unfinished + chunk)[-(1 << 16) :].split(b"\n"))
            asyncio.get_running_loop().remove_reader(self._process.stdout)

    def _end(self, failure: str) -> str:
        self._process.kill()
        self._process.wait()
        kill_children()
        # All writers are dead, so this reads up to the end without blocking.
        self._read()
        self._process.stdout.close()
        lines = [line.decode(errors="replace").strip()[-300:] for line in self._tail if line.strip()]
        for line in lines:
            tell(f"{self._name} | {line}")
        last = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "")
        return f"{failure}: {last}" if last else failure


def environment(devices: str) -> dict[str, str]:
    """Return our environment with these devices (none if empty) and without a rank's variables."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(RANK_VARIABLES)}
    path = os.pathsep.join((str(Path(sys.executable).parent), ours.get("PATH", os.defpath)))
    return ours | dict.fromkeys(VISIBLE, devices) | {"PATH": path}


async def answers(port: int, seconds: float) -> bool:
    """Return True if the server answers at `/health` with a status below 500."""
    with contextlib.suppress(OSError, TimeoutError, ValueError, IndexError):
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.closing(writer):
                writer.write(b"GET /health HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
                return int((await reader.readline()).split()[1]) < 500
    return False


def main(fd: int) -> None:
    """Supervise a server until the host is gone."""
    # Ctrl-C reaches the whole process group, but is for the ranks, whose host ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    with socket.socket(fileno=fd) as host:
        if (start := receive_frame(host, wire.TO_CHILD)) is not None:
            asyncio.run(ServerSupervisor(host, start).run())


if __name__ == "__main__":
    main(int(sys.argv[1]))
