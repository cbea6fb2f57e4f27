"""A sandbox that forks: 2 ms a run. Needs root (to change the user id and the root directory), Landlock and x86-64.

What keeps the code in: a user id that nobody has, an empty root directory, no network, no environment, Landlock, a
seccomp list of what is allowed, hard limits; see `zygote.py`, whose process this one owns. A container need not be
privileged: CAP_SETUID, CAP_SETGID and CAP_SYS_CHROOT do. With CAP_SYS_ADMIN there are files of a box's own, too.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from spmd_rl.sandbox import confine
from spmd_rl.sandbox.boxes import Boxes, Descriptors
from spmd_rl.types import RunLimits

PACKAGE = Path(__file__).parents[1]
BOOT = """
import os, sys, types
for name, path in ("spmd_rl", ""), ("spmd_rl.sandbox", "sandbox"):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [os.path.join(sys.argv[1], path)]
"""
"""Steps over our packages' own `__init__`, which load more than a box should hold."""
PYTHON = [sys.executable, "-s", "-S", "-P", "-B", "-X", "utf8", "-c"]
ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""The same program prints its sets in the same order each time."""
FIRST_UID, LAST_UID = 0x70000000, 0x7FFEFFFF
"""No distribution gives out user ids from this range."""


class ForkServer(Boxes):
    """One zygote, two boxes at most at a time. RuntimeError at construction where it cannot work."""

    def __init__(self, mounts: bool = True) -> None:
        """`mounts`: whether to use a mount namespace where that is allowed."""
        super().__init__()
        self._mounts = mounts
        if os.geteuid() != 0:
            raise RuntimeError("it needs root")
        if not confine.seccomp_supported() or not confine.landlock_version():
            raise RuntimeError("it needs x86-64 and a kernel with Landlock")
        self._first_uid = own_uids()
        self._start_zygote()

    def start(self, slot: int, limits: RunLimits, files: Descriptors) -> "_Forked":
        """As `Boxes.start`. A zygote that was killed is replaced."""
        if self._zygote.poll() is not None:
            self.close()
            self._start_zygote()
        ours, theirs = socket.socketpair()
        order = {"slot": slot, "disk": limits.disk_bytes, "processes": limits.processes}
        fds = [theirs.fileno(), files.stdin, files.stdout, files.stderr, files.job, files.report]
        with theirs:
            socket.send_fds(self._orders, [json.dumps(order).encode()], fds + [files.link][: files.link >= 0])
        return _Forked(ours)

    def close(self) -> None:
        """End the zygote, which ends its boxes first."""
        self._orders.close()
        self._zygote.wait()

    def _start_zygote(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        numbers = (theirs.fileno(), self._first_uid, self._mounts)
        code = f"{BOOT}\nfrom spmd_rl.sandbox.zygote import start\nstart{numbers}"
        with theirs:
            self._zygote = subprocess.Popen(
                [*PYTHON, code, str(PACKAGE)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=ENVIRONMENT,
                cwd="/",
            )
        if (reply := self._orders.recv(1 << 12)) != b"ready":
            self.close()
            raise RuntimeError(reply.decode() or "its process died at the start")


class _Forked:
    """A box, by the socket on which the zygote will tell how it ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def fileno(self) -> int:
        """As `Process.fileno`."""
        return self._control.fileno()

    def kill(self) -> None:
        """As `Process.kill`."""
        with contextlib.suppress(OSError):  # it has ended
            self._control.shutdown(socket.SHUT_WR)

    def wait(self) -> tuple[int, float]:
        """As `Process.wait`."""
        with self._control:
            reply = self._control.recv(1 << 12)
        if not reply:
            raise RuntimeError("the fork server died, or could not start a box")
        report = json.loads(reply)
        return report["status"], report["cpu"]


def own_uids() -> int:
    """The first of two user ids that nobody else on this machine uses: they follow from our process id.

    In a user namespace that has no such large ids, RuntimeError.
    """
    first = FIRST_UID + 2 * os.getpid()
    with open("/proc/self/uid_map") as file:
        mapped = [tuple(map(int, line.split())) for line in file]
    if first + 1 > LAST_UID or not any(inside <= first < inside + count - 1 for inside, _, count in mapped):
        raise RuntimeError(f"there is no user id {first} in this container's user namespace")
    return first
