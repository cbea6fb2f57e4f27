"""`CheckpointDir`: the `checkpoints/` directory of a run, its names, the atomic move into place, and what is kept.

Only rank 0 changes it. A checkpoint is written as `.step-000010.tmp-<nonce>` and appears by one rename; `latest` is a
text file with its name, which another one replaces. A crash between any two system calls leaves the previous checkpoint
and `latest` as they were.
"""

import os
import re
import shutil
from pathlib import Path

from spmd_rl.checkpoint.manifest import flush

_STEP = re.compile(r"step-(\d{6,})")


class CheckpointDir:
    """The checkpoints of one run. Methods that touch the disk raise OSError as the file system gives it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        """The directory of the checkpoint of `step`, whether it exists or not."""
        return self.root / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """The steps that have a directory, ascending."""
        if not self.root.is_dir():
            return []
        matches = (_STEP.fullmatch(entry.name) for entry in self.root.iterdir() if entry.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    def latest(self) -> int | None:
        """The step that `latest` names; None where there is no such file or it names nothing."""
        try:
            match = _STEP.fullmatch((self.root / "latest").read_text(encoding="ascii").strip())
        except (FileNotFoundError, UnicodeDecodeError):
            return None
        return int(match[1]) if match else None

    def candidates(self) -> list[int]:
        """The steps to resume from, best first: the one that `latest` names, then older ones.

        A newer one than `latest` names is left out: the save that made it did not end. Without `latest`, all count.
        """
        latest = self.latest()
        steps = self.steps()
        if latest is None:
            return steps[::-1]
        return [latest] + [step for step in reversed(steps) if step < latest]

    def temporary(self, step: int, nonce: str) -> Path:
        """The directory in which the checkpoint of `step` is written before `publish` moves it."""
        return self.root / f".step-{step:06d}.tmp-{nonce}"

    def publish(self, temporary: Path, step: int) -> None:
        """Move a complete directory into its place, then let `latest` name it."""
        final = self.path(step)
        replaced = temporary.with_name(temporary.name + "-old")
        pointer = temporary.with_name(temporary.name + "-latest")
        with open(pointer, "w", encoding="ascii") as file:  # before the move: a full disk must not strike between them
            file.write(final.name + "\n")
            file.flush()
            os.fsync(file.fileno())
        if final.exists():  # a damaged checkpoint of the same step, or one of an abandoned continuation
            os.rename(final, replaced)
        os.rename(temporary, final)
        flush(self.root)
        os.replace(pointer, self.root / "latest")
        flush(self.root)
        shutil.rmtree(replaced, ignore_errors=True)

    def prune(self, keep: int, step: int) -> None:
        """Remove all but the newest `keep` checkpoints up to `step`, but never the one that `latest` names."""
        latest = self.latest()
        older = [s for s in self.steps() if s <= step]
        for old in older[: -max(keep, 1)]:
            if old != latest:
                # Out of sight by one rename first: a half-removed directory must not pass for a checkpoint.
                gone = self.root / f".{self.path(old).name}.tmp-gone"
                os.rename(self.path(old), gone)
                shutil.rmtree(gone)

    def clean(self) -> None:
        """Remove what a killed run left half-written."""
        if not self.root.is_dir():
            return
        for entry in self.root.glob(".step-*.tmp-*"):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
