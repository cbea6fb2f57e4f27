"""The keeper of one domain's own server: starts the command, sees that it answers, starts it again, ends it.

A process of its own, so that a server that hangs cannot hold up the host. The server sees the devices that it was
given, and no other. What it starts itself ends with it: the keeper adopts its orphans. What it prints is thrown away,
but for the last lines, which are shown where it ends by itself. All ends when the host hangs up or dies.

    python -m spmd_rl.sidecar.keeper <fd of a socket to the host>
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

from spmd_rl import wire
from spmd_rl.process import die_with_parent
from spmd_rl.sidecar.channel import receive, send

PR_SET_CHILD_SUBREAPER = 36
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
"""NVIDIA, AMD, Ascend; each maker's software reads its own. ROCR_VISIBLE_DEVICES stays: HIP counts within it."""
OF_A_RANK = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "VLLM_ENABLE_V1_MULTIPROC")
"""Variables of these beginnings tell the rank, not the server, what to do."""
CHECK_SECONDS = 0.25
"""Between two looks at a server that starts."""
HEALTHY_SECONDS = 5.0
"""The same once it has answered."""
REPLY_SECONDS = 10.0
"""For one reply to a look; a server that computes may be slow."""
MAX_MISSED = 3
"""So many looks in a row without a reply, and it is started anew."""
PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 60.0
"""Before a new start; doubled with each that fails."""
TAIL_LINES = 40


class Keeper:
    """One server. `host` hears `Ready` at its first answer, or `Failed` if there is none."""

    def __init__(self, host: socket.socket, keep: wire.Keep) -> None:
        self._host, self._server, self._port = host, keep.server, keep.port
        self._name = f"reward.{keep.domain}.server"
        self._command = [word.replace("{port}", str(keep.port)) for word in keep.server.command]
        self._process: subprocess.Popen | None = None
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)

    async def run(self) -> None:
        """Until the host is gone, or the first start has failed."""
        self._host.setblocking(False)
        gone = asyncio.create_task(asyncio.get_running_loop().sock_recv(self._host, 1))
        keep = asyncio.create_task(self._keep())
        await asyncio.wait((gone, keep), return_when=asyncio.FIRST_COMPLETED)
        for task in (gone, keep):
            task.cancel()
        await asyncio.gather(gone, keep, return_exceptions=True)
        kill_children()

    async def _keep(self) -> None:
        if why := await self._start():
            send(self._host, wire.Failed(f"{self._name}: {' '.join(self._command)}: {why}"))
            return
        send(self._host, wire.Ready())
        pause = PAUSE_SECONDS
        while True:
            since = time.monotonic()
            why = await self._watch()
            pause = PAUSE_SECONDS if time.monotonic() - since > MAX_PAUSE_SECONDS else pause
            while why:
                print(f"sidecar: {self._name} {why}; a new start in {pause:g} s", file=sys.stderr, flush=True)
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
                why = await self._start()

    async def _start(self) -> str:
        """Start the server and wait for its first answer. Why there is none, if so."""
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
        """Wait while the server is well. Why it is not."""
        missed = 0
        while missed < MAX_MISSED:
            looked = time.monotonic()
            while time.monotonic() - looked < HEALTHY_SECONDS:
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

    def _end(self, why: str) -> str:
        """Kill the server and all it has left behind; show what it said last. `why`, and its last error or line."""
        self._process.kill()
        self._process.wait()
        kill_children()
        self._read()  # up to the end: nobody holds the other side any more
        self._process.stdout.close()
        lines = [line.decode(errors="replace").strip()[-300:] for line in self._tail if line.strip()]
        for line in lines:
            print(f"{self._name} | {line}", file=sys.stderr)
        last = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "")
        return f"{why}: {last}" if last else why


def environment(devices: str) -> dict[str, str]:
    """Of the server: ours, with these devices (none if empty), without what a rank's launcher said to the rank."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(OF_A_RANK)}
    path = os.pathsep.join((str(Path(sys.executable).parent), ours.get("PATH", os.defpath)))
    return ours | dict.fromkeys(VISIBLE, devices) | {"PATH": path}


async def answers(port: int, seconds: float) -> bool:
    """Whether the server answers at `/health`: anything below 500, so that one that knows no such page is well too."""
    with contextlib.suppress(OSError, TimeoutError, ValueError, IndexError):
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.closing(writer):
                writer.write(b"GET /health HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
                return int((await reader.readline()).split()[1]) < 500
    return False


def kill_children() -> None:
    """Kill and reap until there is no child; orphans of ours become children of ours."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    while pids := children.read_text().split():
        for pid in map(int, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def main(fd: int) -> None:
    """Keep a server until the host is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ranks
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    with socket.socket(fileno=fd) as host:
        if (keep := receive(host, wire.TO_KEEPER)) is not None:
            asyncio.run(Keeper(host, keep).run())


if __name__ == "__main__":
    main(int(sys.argv[1]))
