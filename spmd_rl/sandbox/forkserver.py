"""A sandbox that forks. It needs root (to change user id and root directory), Landlock and x86-64.

The code is confined by an unused user id, an empty root directory, no network, no environment, Landlock, a seccomp list
and hard limits; see `forkserver_main.py`. A container need not be privileged: CAP_SETUID, CAP_SETGID and CAP_SYS_CHROOT
suffice. With CAP_SYS_ADMIN, the code can write files too.
"""

import os
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from spmd_rl.sandbox import confine
from spmd_rl.sandbox.base import BaseSandbox
from spmd_rl.sandbox.packages import link
from spmd_rl.sandbox.served import spawn

PYTHON = ["-s", "-S", "-P", "-B", "-X", "utf8"]
# no distribution assigns user ids from this range
FIRST_UID, LAST_UID = 0x70000000, 0x7FFEFFFF


class HostServer(BaseSandbox):
    """A sandbox whose server is a plain process of this machine."""

    def __init__(self, server: str, packages: Mapping[str, Path] | None) -> None:
        """server: a class of `forkserver_main` and its arguments, as text."""
        self._server = server
        super().__init__(packages)

    def launch(self, orders: int, guest: int, stack: ExitStack) -> subprocess.Popen:
        """Start the server with the packages in a temporary folder."""
        folder = stack.enter_context(link(self.packages))
        environment = self.environment | {"PYTHONPATH": f"/proc/self/fd/{guest}"}
        start = f"{orders}, {folder!r}, main.{self._server}"
        return spawn([self.python, *PYTHON], start, [orders, guest], environment)


class ForkServer(HostServer):
    """A sandbox whose server gives each child a separate user id. RuntimeError where it cannot work."""

    def __init__(self, mounts: bool = True, packages: Mapping[str, Path] | None = None) -> None:
        """mounts: use a mount namespace where that is allowed."""
        if os.geteuid() != 0:
            raise RuntimeError("it needs root")
        if not confine.seccomp_supported() or not confine.landlock_version():
            raise RuntimeError("it needs x86-64 and a kernel with Landlock")
        self.first_uid = reserve_uids()
        super().__init__(f"UserIdServer, {self.first_uid}, {mounts}", packages)


def reserve_uids() -> int:
    """Return the first of two unused user ids, made from our process id. RuntimeError in a user namespace without such
    ids.
    """
    first = FIRST_UID + 2 * os.getpid()
    with open("/proc/self/uid_map") as file:
        mapped = [tuple(map(int, line.split())) for line in file]
    if first + 1 > LAST_UID or not any(inside <= first < inside + count - 1 for inside, _, count in mapped):
        raise RuntimeError(f"there is no user id {first} in this container's user namespace")
    return first
