"""No sandbox: code from answers runs as a plain process with the user's rights, under resource limits alone
(`reward.<domain>.sandbox=none`).
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from spmd_rl.base.errors import tell
from spmd_rl.sandbox.forkserver import HostServer


class Unconfined(HostServer):
    """A sandbox without confinement, in a temporary directory."""

    def __init__(self, packages: Mapping[str, Path] | None = None) -> None:
        tell("warning: sandbox: none runs code from answers with all your permissions")
        self._directory = tempfile.TemporaryDirectory(prefix="spmd-box-", ignore_cleanup_errors=True)
        super().__init__(f"PlainServer, {self._directory.name!r}", packages)

    def close(self) -> None:
        """End the server and remove the temporary directory."""
        super().close()
        self._directory.cleanup()
