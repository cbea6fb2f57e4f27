"""Reads a run directory for the report and for comparisons, during the run or later."""

import heapq
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from spmd_rl.base.errors import UserError
from spmd_rl.config.run_identity import saved_config
from spmd_rl.track.metrics import read_lines, with_warmup_named
from spmd_rl.track.svg import Point
from spmd_rl.types import SCORED, SUSPECT

_MAX_SAMPLE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class RunData:
    """The metrics and settings of a run."""

    directory: Path
    lines: Sequence[dict[str, Any]]
    settings: dict[str, Any]
    """Settings in `config.yaml`, without `about`"""
    about: dict[str, Any]
    """Pipeline, git revision and package versions"""
    launch: dict[str, Any]
    """Command, machine and time of the last start; empty if the journal lacks them"""

    def series(self, key: str) -> list[Point]:
        """Return (step, value) of each line that has a number under `key`."""
        return [(line["step"], line[key]) for line in self.lines if isinstance(line.get(key), int | float)]

    def setting(self, key: str) -> Any:
        """Return a setting by its dotted key; None if it is missing."""
        value: Any = self.settings
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value


def read_run(directory: Path) -> RunData:
    """Read a run directory. UserError, in one line, if it has no run or cannot be read."""
    try:
        settings = saved_config(directory)
    except OSError as error:
        raise UserError(f"{directory}: {error.strerror}") from None
    if settings is None:
        raise UserError(f"{directory}: not a run: it has no config.yaml")
    about = settings.pop("about", None) or {}
    lines = [with_warmup_named(line) for line in read_lines(directory / "metrics.jsonl")]
    return RunData(directory, lines, settings, about, _launch(directory / "journal" / "rank-0.jsonl"))


class Extremes(NamedTuple):
    """The best and the worst samples of a samples file, as its lines have them; no sample is in both."""

    mean: float
    """Mean score of all scored samples of the file, or of its beginning."""
    best: list[dict[str, Any]]
    worst: list[dict[str, Any]]
    """Worst samples; empty if all scores are equal, when `best` holds some samples."""
    suspect: list[dict[str, Any]]
    """Paid samples that look like cheats."""


def best_and_worst(path: Path, count: int) -> Extremes | None:
    """Return up to `count` best and worst scored samples of the first 32 MiB of a file; None if none is scored."""
    decode = msgspec.json.Decoder(_Scored).decode
    with open(path, "rb") as file:
        lines = file.readlines(_MAX_SAMPLE_BYTES)
    verdicts = [(decode(line).verdict, -index, line) for index, line in enumerate(lines)]
    scored = [(v.score, index, line) for v, index, line in verdicts if v.status in SCORED]
    if not scored:
        return None
    scores = [score for score, _, _ in scored]
    low, high = min(scores), max(scores)
    # Samples with the lowest score are never best, unless all scores are equal.
    better = [row for row in scored if row[0] > low or low == high]
    worse = [row for row in scored if row[0] < high]
    best = heapq.nlargest(min(count, (len(scored) + 1) // 2), better)
    worst = heapq.nsmallest(min(count, len(scored) // 2), worse, key=lambda row: (row[0], -row[1]))
    suspect = [row for row in verdicts if SUSPECT in row[0].parts][:count]
    rows = [[msgspec.json.decode(row[2]) for row in chosen] for chosen in (best, worst, suspect)]
    return Extremes(sum(scores) / len(scores), *rows)


def plain_text(content: str | Sequence[dict[str, Any]]) -> str:
    """Return the content of a logged message as text, with a word for each image."""
    return content if isinstance(content, str) else "\n".join(part.get("text", "[image]") for part in content)


class _LoggedVerdict(msgspec.Struct):
    status: str
    score: float | None
    parts: dict[str, float] = {}


class _Scored(msgspec.Struct):
    verdict: _LoggedVerdict


def _launch(journal: Path) -> dict[str, Any]:
    try:
        # Mapped and searched from the end: journals of long runs have gigabytes.
        with open(journal, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            found = text.rfind(b'"event":"run"')
            begin = text.rfind(b"\n", 0, max(found, 0)) + 1
            return msgspec.json.decode(text[begin : text.find(b"\n", begin)]) if found >= 0 else {}
    # A missing file, an empty one, or a truncated line.
    except (OSError, ValueError, msgspec.DecodeError):
        return {}
