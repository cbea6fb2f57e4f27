"""`CheckpointDir`: the `checkpoints/` directory of a run: names, the atomic move, and pruning.

Only rank 0 changes it. A checkpoint is written as `.step-000010.tmp-<nonce>` and appears by one rename; `latest`, a
text file with its name, is replaced by another. A crash between any two system calls leaves the previous checkpoint and
`latest` as they were.
"""

import os
import re
import shutil
from pathlib import Path

from spmd_rl.checkpoint.manifest import flush

_STEP = re.compile(r"step-(\d{6,})")


class CheckpointDir:
    """The checkpoints of one run. Methods raise the file system's OSError."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        """Return the directory of the checkpoint of `step`."""
        return self.root / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Return the steps that have a directory, ascending."""
        if not self.root.is_dir():
            return []
        matches = (_STEP.fullmatch(entry.name) for entry in self.root.iterdir() if entry.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    def latest(self) -> int | None:
        """Return the step of `latest`; None if missing or invalid."""
        try:
            match = _STEP.fullmatch((self.root / "latest").read_text(encoding="ascii").strip())
        except (FileNotFoundError, UnicodeDecodeError):
            return None
        return int(match[1]) if match else None

    def candidates(self) -> list[int]:
        """Return the steps to resume from, best first: `latest`, then older ones; without `latest`, all."""
        # Newer ones are left out: their save did not complete.
        latest = self.latest()
        steps = self.steps()
        if latest is None:
            return steps[::-1]
        return [latest] + [step for step in reversed(steps) if step < latest]

    def temporary(self, step: int, nonce: str) -> Path:
        """Return the directory in which the checkpoint of `step` is written before `publish`."""
        return self.root / f".step-{step:06d}.tmp-{nonce}"

    def publish(self, temporary: Path, step: int) -> None:
        """Move a complete directory to its final name, then let `latest` name it."""
        final = self.path(step)
        replaced = temporary.with_name(temporary.name + "-old")
        pointer = temporary.with_name(temporary.name + "-latest")
        # Written before the move, so that a full disk cannot strike between the move and the pointer.
        with open(pointer, "w", encoding="ascii") as file:
            file.write(final.name + "\n")
            file.flush()
            os.fsync(file.fileno())
        # A damaged checkpoint of the same step, or one of an abandoned continuation.
        if final.exists():
            os.rename(final, replaced)
        os.rename(temporary, final)
        # The rename itself must be on the disk before `latest` names it.
        flush(self.root)
        os.replace(pointer, self.root / "latest")
        flush(self.root)
        shutil.rmtree(replaced, ignore_errors=True)

    def prune(self, keep: int, step: int) -> None:
        """Remove all but the newest `keep` checkpoints up to `step`, never that of `latest`."""
        latest = self.latest()
        older = [s for s in self.steps() if s <= step]
        for old in older[: -max(keep, 1)]:
            if old != latest:
                # One rename hides it first: a half-removed directory must not pass for a checkpoint.
                gone = self.root / f".{self.path(old).name}.tmp-gone"
                os.rename(self.path(old), gone)
                shutil.rmtree(gone)

    def clean(self) -> None:
        """Remove incomplete directories of a killed run."""
        if not self.root.is_dir():
            return
        for entry in self.root.glob(".step-*.tmp-*"):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
