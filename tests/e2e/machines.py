"""Two machines of one: network namespaces, and between them a link that can be cut, mended and slow.

with Machines(delay=0.1) as machines:              # seconds, each way
    process = machines.start(0, ["python", ...])   # on the first of them, a `subprocess.Popen`
    machines.is_cut = True                         # from here on every packet is lost, either way

A packet goes through a thread of this process, so that neither needs a kernel module for it.
"""

import fcntl
import os
import secrets
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001


def missing() -> str:
    """Why there can be no such machines here; empty where there can."""
    if os.geteuid() or not shutil.which("ip"):
        return "network namespaces need root and iproute2"
    try:
        Machines().close()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {error}"
    return ""


class Machines:
    """Both of them, at `addresses`; their end of the link is called `device`."""

    addresses = ("10.77.0.1", "10.77.0.2")
    device = "link0"

    def __init__(self, delay: float = 0.0) -> None:
        """delay: of every packet, in seconds."""
        self.is_cut, self._delay = False, delay
        self._names: list[str] = []
        self._ends: list[int] = []
        self._over = threading.Event()
        try:
            for address in self.addresses:
                self._add(f"m{secrets.token_hex(4)}", address)
        except BaseException:
            self._remove()
            raise
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Machines":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, machine: int, command: Sequence[str], **options: Any) -> subprocess.Popen:
        """Start a process there. options: of `subprocess.Popen`."""
        return subprocess.Popen(["ip", "netns", "exec", self._names[machine], *command], **options)

    def close(self) -> None:
        """Remove both."""
        self._over.set()
        self._thread.join()
        self._remove()

    def _add(self, name: str, address: str) -> None:
        _ip("netns", "add", name)
        self._names.append(name)
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._ends.append(end)
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", name.encode(), _TUN_WITHOUT_HEADER))
        _ip("link", "set", name, "netns", name, "name", self.device)
        _ip("-n", name, "address", "add", f"{address}/24", "dev", self.device)
        for device in ("lo", self.device):
            _ip("-n", name, "link", "set", device, "up")

    def _remove(self) -> None:
        for end in self._ends:
            os.close(end)
        for name in self._names:
            _ip("netns", "delete", name)

    def _carry(self) -> None:
        to = dict(zip(self._ends, reversed(self._ends), strict=True))
        under_way: deque[tuple[float, int, bytes]] = deque()
        while not self._over.is_set():
            pause = max(0.0, under_way[0][0] - time.monotonic()) if under_way else 0.1
            for end in select.select(self._ends, [], [], min(pause, 0.1))[0]:
                under_way.append((time.monotonic() + self._delay, to[end], os.read(end, 1 << 16)))
            while under_way and under_way[0][0] <= time.monotonic():
                _, end, packet = under_way.popleft()
                if not self.is_cut:
                    os.write(end, packet)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
