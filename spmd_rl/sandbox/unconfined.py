"""No sandbox: code from answers runs as a plain process with the user's rights, under resource limits alone.

For trusted code, on a machine that has nothing to lose: `reward.<domain>.sandbox=none`.
"""

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from spmd_rl.sandbox.base import BaseSandbox, ChildFiles
from spmd_rl.sandbox.bwrap import PACKAGES_BYTES, Spawned
from spmd_rl.sandbox.forkserver import BOOT, ENVIRONMENT, PACKAGE, PYTHON
from spmd_rl.sandbox.packages import ENVIRONMENT as packages_environment
from spmd_rl.sandbox.packages import link
from spmd_rl.types import RunLimits


class Unconfined(BaseSandbox):
    """Starts a plain process for each job, in a temporary directory."""

    def __init__(self, packages: Mapping[str, Path] | None = None) -> None:
        """`packages`: the files that code may import, as `find_packages` returns them."""
        super().__init__()
        self._environment = dict(ENVIRONMENT)
        self._links = link(packages) if packages else None
        if self._links is not None:
            self._environment |= {**packages_environment, "PYTHONPATH": self._links.name}
            self.own_bytes = PACKAGES_BYTES
        print("warning: sandbox: none runs code from answers with all that you may do yourself", file=sys.stderr)
        self._directory = tempfile.TemporaryDirectory(prefix="spmd-box-", ignore_cleanup_errors=True)

    def start(self, slot: int, limits: RunLimits, files: ChildFiles) -> Spawned:
        """Start a job, as `BaseSandbox.start` says."""
        numbers = (files.job, files.report, files.rpc)
        process = subprocess.Popen(
            [*PYTHON, f"{BOOT}\nfrom spmd_rl.sandbox.guest.main import main\nmain{numbers}", str(PACKAGE)],
            stdin=files.stdin,
            stdout=files.stdout,
            stderr=files.stderr,
            pass_fds=[fd for fd in numbers if fd >= 0],
            env=self._environment,
            cwd=self._directory.name,
        )
        return Spawned(process)

    def close(self) -> None:
        """Remove the temporary directory."""
        self._directory.cleanup()
        if self._links is not None:
            self._links.cleanup()
