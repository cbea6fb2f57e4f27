"""A sandbox by bubblewrap, which root is not needed for: the fork server runs inside it, with the system's Python.

bubblewrap starts once, with `/usr` as the only part of the host's files (read-only). The server in it (`namespaces.py`)
gives each job namespaces of its own, in which it has an empty root directory, no capabilities, no environment, hard
limits and, on x86-64, the same seccomp list as the fork server's (elsewhere there is none: `processes: 1` means 64, and
the kernel's memory has no limit). As root it runs under a user id that nobody else has. It needs a kernel that lets
bubblewrap's child keep its capabilities within its user namespace; a setuid bubblewrap does not.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from spmd_rl.sandbox.base import BaseSandbox
from spmd_rl.sandbox.forkserver import reserve_uids
from spmd_rl.sandbox.packages import ENVIRONMENT, ROOM, find_pytest
from spmd_rl.sandbox.served import spawn

PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
"""Interpreters below `/usr`; another user id could not run one in somebody's home directory."""
PACKAGES = "/packages"
"""Where code finds the packages that it may import."""


class Bubblewrap(BaseSandbox):
    """A server in bubblewrap that gives each child namespaces of its own. RuntimeError where it cannot work."""

    own_processes = 2

    def __init__(self, packages: Mapping[str, Path] | None = None) -> None:
        """`packages`: the files that code may import, as `find_packages` returns them; they are loaded before the
        first fork."""
        if (bwrap := shutil.which("bwrap")) is None:
            raise RuntimeError("bwrap is not installed")
        self._bwrap, self._packages = bwrap, packages
        known = next((path for path in PYTHONS if os.access(path, os.X_OK) and _suits(path, packages)), None)
        if known is None:
            which = f" of version {_VERSION}, for which the packages are installed," if packages else ""
            raise RuntimeError(f"there is no {' or '.join(PYTHONS)}{which} to run in it")
        self.python = known
        self.first_uid = reserve_uids() if os.geteuid() == 0 else None
        self._layout = ["--ro-bind", "/usr", "/usr"]
        for path in ("/dev/null", "/dev/urandom"):
            self._layout += ["--dev-bind", path, path]
        for name in ("lib", "lib32", "lib64", "bin"):  # sockets on a merged /usr
            path = f"/{name}"
            if os.path.islink(path):
                self._layout += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                self._layout += ["--ro-bind", path, path]
        for name, source in (find_pytest() | dict(packages or {})).items():
            self._layout += ["--ro-bind", str(source.resolve()), f"{PACKAGES}/{name}"]
        environment = {"PYTHONPATH": "/guest.zip", "PYTHONHASHSEED": "0", **(ENVIRONMENT if packages else {})}
        for name, value in environment.items():
            self._layout += ["--setenv", name, value]
        self.own_bytes = ROOM if packages else 0
        super().__init__()

    def launch(self, orders: int, guest: int, stack: ExitStack) -> subprocess.Popen:
        """Start the server, as `ServedSandbox.launch` says."""
        if not _suits(self.python, self._packages):
            raise RuntimeError(f"the packages are for Python {_VERSION}")
        prefix = str(Path(self.python).parents[1])
        own = [] if prefix.startswith("/usr") else ["--ro-bind", prefix, prefix]
        command = [self._bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
        command += [*self._layout, *own, "--ro-bind-data", str(guest), "/guest.zip"]
        command += ["--uid", "65534", "--gid", "65534", "--hostname", "box"]
        command += ["--dir", "/proc", "--remount-ro", "/", "--cap-add", "ALL", "--", self.python, "-s", "-S", "-B"]
        user = {} if self.first_uid is None else {"user": self.first_uid, "group": self.first_uid, "extra_groups": []}
        start = f"{orders}, {PACKAGES!r}, main.NamespaceServer"
        return spawn([*command, "-X", "utf8"], start, [orders, guest], {}, **user)


_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def _suits(python: str, packages: Mapping[str, Path] | None) -> bool:
    """Return whether an interpreter can import what is installed for ours."""
    if not packages:
        return True
    command = [python, "-I", "-S", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return subprocess.run(command, capture_output=True, text=True, env={}, timeout=60).stdout.strip() == _VERSION
