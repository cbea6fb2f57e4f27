"""Reads a run directory for the page and for comparisons."""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from spmd_rl.base.errors import UserError
from spmd_rl.config.run_identity import saved_config
from spmd_rl.track.metrics import read_lines, with_warmup_named

Point = tuple[float, float]
MAX_POINTS = 300
"""Points of a curve; a longer one has means over equal ranges of steps."""


@dataclass(frozen=True, slots=True)
class RunData:
    """The metrics and settings of a run."""

    directory: Path
    lines: Sequence[dict[str, Any]]
    settings: dict[str, Any]
    """`config.yaml` without `about`"""
    about: dict[str, Any]
    launch: dict[str, Any]
    """Command, machine and time of the last start, if in the journal"""
    process: dict[str, Any] = field(default_factory=dict)
    """Time, host, pid of rank 0 and number of ranks in the last start, if in the journal"""

    def series(self, key: str) -> list[Point]:
        """Return (step, value) of each line with a number under `key`."""
        return [(line["step"], line[key]) for line in self.lines if isinstance(line.get(key), int | float)]

    def curves(self, last: int) -> dict[str, list[Point]]:
        """Return all series by key, for a drawing of steps up to `last`, with six digits."""
        keys = sorted({key for line in self.lines for key in line} - {"step"})
        return {key: thin(points, last) for key in keys if (points := self.series(key))}

    def setting(self, key: str) -> Any:
        """Return a setting by its dotted key, or None."""
        value: Any = self.settings
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value


def thin(points: Sequence[Point], last: int) -> list[Point]:
    """Return a series as at most `MAX_POINTS` means over equal ranges of steps."""
    width = 1 + last // MAX_POINTS
    ranges: dict[float, list[float]] = {}
    for step, value in points:
        ranges.setdefault(step // width, []).append(value)
    return [(at * width + (width - 1) / 2, float(f"{fmean(values):.6g}")) for at, values in ranges.items()]


def read_run(directory: Path) -> RunData:
    """Read a run directory. UserError if it has no run or cannot be read."""
    try:
        settings = saved_config(directory)
    except OSError as error:
        raise UserError(f"{directory}: {error.strerror}") from None
    if settings is None:
        raise UserError(f"{directory}: not a run: it has no config.yaml")
    about = settings.pop("about", None) or {}
    lines = [with_warmup_named(line) for line in read_lines(directory / "metrics.jsonl")]
    launch, process = (_last(directory / "journal" / "rank-0.jsonl", event) for event in ("run", "start"))
    return RunData(directory, lines, settings, about, launch, process)


def plain_text(content: str | Sequence[dict[str, Any]]) -> str:
    """Return a logged content as text, with a word for each image."""
    return content if isinstance(content, str) else "\n".join(part.get("text", "[image]") for part in content)


def _last(journal: Path, event: str) -> dict[str, Any]:
    try:
        # Mapped and searched from the end: journals of long runs have gigabytes.
        with open(journal, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            found = text.rfind(b'"event":"%s"' % event.encode())
            begin = text.rfind(b"\n", 0, max(found, 0)) + 1
            return msgspec.json.decode(text[begin : text.find(b"\n", begin)]) if found >= 0 else {}
    # A missing file, an empty one, or a truncated line.
    except (OSError, ValueError, msgspec.DecodeError):
        return {}
