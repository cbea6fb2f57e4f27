"""No sandbox: code from answers runs as a plain process with the user's rights, under resource limits alone.

For trusted code, on a machine that has nothing to lose: `reward.<domain>.sandbox=none`.
"""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from spmd_rl.errors import tell
from spmd_rl.sandbox.base import BaseSandbox, ChildFiles
from spmd_rl.sandbox.forkserver import BOOT, ENVIRONMENT, PACKAGE, PYTHON
from spmd_rl.sandbox.packages import ENVIRONMENT as packages_environment
from spmd_rl.sandbox.packages import find_pytest, link
from spmd_rl.types import RunLimits

PACKAGES_BYTES = 512 << 20  # the address space that code gets for packages


class Unconfined(BaseSandbox):
    """Starts a plain process for each job, in a temporary directory."""

    def __init__(self, packages: Mapping[str, Path] | None = None) -> None:
        """`packages`: the files that code may import, as `find_packages` returns them."""
        super().__init__()
        self._links = link(find_pytest() | dict(packages or {}))
        self._environment = ENVIRONMENT | (packages_environment if packages else {}) | {"PYTHONPATH": self._links.name}
        self.own_bytes = PACKAGES_BYTES if packages else 0
        tell("warning: sandbox: none runs code from answers with all that you may do yourself")
        self._directory = tempfile.TemporaryDirectory(prefix="spmd-box-", ignore_cleanup_errors=True)

    def start(self, slot: int, limits: RunLimits, files: ChildFiles) -> "Spawned":
        """Start a job, as `BaseSandbox.start` says."""
        numbers = (files.job, files.report, files.rpc)
        code = f"{BOOT}\nfrom spmd_rl.sandbox.guest.main import main\nmain{numbers}"
        given = {"stdin": files.stdin, "stdout": files.stdout, "stderr": files.stderr, "cwd": self._directory.name}
        given |= {"env": self._environment, "pass_fds": [fd for fd in numbers if fd >= 0]}
        return Spawned(subprocess.Popen([self.python, *PYTHON, code, str(PACKAGE)], **given))

    def close(self) -> None:
        """Remove the temporary directory."""
        self._directory.cleanup()
        self._links.cleanup()


class Spawned:
    """A process that is a child of ours."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)

    def fileno(self) -> int:
        """Return a descriptor that is readable once the process has ended."""
        return self._pidfd

    def kill(self) -> None:
        """Kill the process, not what it has started."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self) -> tuple[int, float]:
        """Return the wait status and the seconds of processor time."""
        _, status, usage = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        os.close(self._pidfd)
        return status, usage.ru_utime + usage.ru_stime
