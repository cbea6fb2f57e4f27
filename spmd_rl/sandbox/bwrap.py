"""A sandbox by bubblewrap, without root: the fork server runs inside it, with the system's Python.

bubblewrap starts once, with `/usr` as the only part of the host's files (read-only). The server in it (`namespaces.py`)
gives each job separate namespaces, an empty root directory, no capabilities, no environment, hard limits and, on
x86-64, the fork server's seccomp list (elsewhere `processes: 1` means 64, and the kernel's memory has no limit). The
kernel must let bubblewrap's child keep its capabilities within its user namespace; a setuid bubblewrap does not.
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
from spmd_rl.sandbox.served import spawn

PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
"""Interpreters below `/usr`: another user id cannot run one in a home directory."""
PACKAGES = "/packages"


class Bubblewrap(BaseSandbox):
    """A sandbox whose server runs in bubblewrap. RuntimeError where it cannot work."""

    own_processes = 2

    def __init__(self, packages: Mapping[str, Path] | None = None) -> None:
        if (bwrap := shutil.which("bwrap")) is None:
            raise RuntimeError("bwrap is not installed")
        self._bwrap, self._is_any = bwrap, not packages
        known = next((path for path in PYTHONS if os.access(path, os.X_OK) and self._suits(path)), None)
        if known is None:
            which = f" of version {_VERSION}, for which the packages are installed," if packages else ""
            raise RuntimeError(f"there is no {' or '.join(PYTHONS)}{which} to run in it")
        self.python = known
        self.first_uid = reserve_uids() if os.geteuid() == 0 else None
        super().__init__(packages)

    def launch(self, orders: int, guest: int, stack: ExitStack) -> subprocess.Popen:
        """Start bubblewrap with the server in it."""
        if not self._suits(self.python):
            raise RuntimeError(f"the packages are for Python {_VERSION}")
        prefix = str(Path(self.python).parents[1])
        own = [] if prefix.startswith("/usr") else ["--ro-bind", prefix, prefix]
        command = [self._bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
        command += [*self._layout(), *own, "--ro-bind-data", str(guest), "/guest.zip"]
        command += ["--uid", "65534", "--gid", "65534", "--hostname", "box"]
        command += ["--dir", "/proc", "--remount-ro", "/", "--cap-add", "ALL", "--", self.python, "-s", "-S", "-B"]
        user = {} if self.first_uid is None else {"user": self.first_uid, "group": self.first_uid, "extra_groups": []}
        start = f"{orders}, {PACKAGES!r}, main.NamespaceServer"
        return spawn([*command, "-X", "utf8"], start, [orders, guest], {}, **user)

    def _layout(self) -> list[str]:
        found = ["--ro-bind", "/usr", "/usr"]
        for path in ("/dev/null", "/dev/urandom"):
            found += ["--dev-bind", path, path]
        for path in ("/lib", "/lib32", "/lib64", "/bin"):  # links on a merged /usr
            if os.path.islink(path):
                found += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                found += ["--ro-bind", path, path]
        for name, source in self.packages.items():
            found += ["--ro-bind", str(source.resolve()), f"{PACKAGES}/{name}"]
        for name, value in (self.environment | {"PYTHONPATH": "/guest.zip"}).items():
            found += ["--setenv", name, value]
        return found

    def _suits(self, python: str) -> bool:
        if self._is_any:
            return True
        command = [python, "-I", "-S", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(command, capture_output=True, text=True, env={}, timeout=60)
        return done.stdout.strip() == _VERSION


_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
