"""Finds run directories, and reads them again when they change, to follow a run."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from spmd_rl.base.errors import UserError
from spmd_rl.track.page_data import summary
from spmd_rl.track.run_reader import RunData, read_run
from spmd_rl.track.trajectories import stamp

MAX_DEPTH = 3


class RunIndex:
    """Runs in a folder by name: their path below it, or `.`."""

    def __init__(self, root: Path) -> None:
        """Find the runs. UserError without any."""
        self.root = root
        if not root.is_dir():
            raise UserError(f"{root}: no such directory")
        if not self.names():
            raise UserError(f"{root}: no run in it: neither config.yaml with metrics or samples, nor folders with them")

    def names(self) -> list[str]:
        """Return all runs' names, the most recently written first."""
        folders = [self.root] if _is_run(self.root) else _below(self.root, MAX_DEPTH)
        found = sorted(folders, key=lambda folder: (-_changed(folder), folder))
        return [folder.relative_to(self.root).as_posix() for folder in found]

    def read(self, name: str) -> RunData:
        """Read a run. KeyError for an unknown name."""
        if name not in self.names():
            raise KeyError(f"no run {name!r}")
        return read(self.root / name)

    def summaries(self) -> list[dict[str, Any]]:
        """Return a summary of each run."""
        return [summary(name, self.read(name)) for name in self.names()]


def _is_run(folder: Path) -> bool:
    written = ("metrics.jsonl", "samples", "journal")
    return (folder / "config.yaml").is_file() and any((folder / name).exists() for name in written)


def _below(folder: Path, depth: int) -> list[Path]:
    found = []
    for path in folder.iterdir():
        if path.is_dir() and not path.name.startswith("."):
            found += [path] if _is_run(path) else _below(path, depth - 1) if depth > 1 else []
    return found


def _changed(folder: Path) -> float:
    path = folder / "metrics.jsonl"
    return (path if path.exists() else folder / "config.yaml").stat().st_mtime


def read(folder: Path) -> RunData:
    """Read a run directory, again if metrics or settings changed."""
    # The stamps are part of the cache's key, so a changed file is read again.
    return _read(folder, tuple(stamp(folder / name) for name in ("config.yaml", "metrics.jsonl")))


@lru_cache(64)
def _read(folder: Path, stamps: tuple[Any, ...]) -> RunData:
    return read_run(folder)
