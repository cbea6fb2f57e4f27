"""Reads a file of the sample log: a short entry for each trajectory, and complete trajectories.

A trajectory is one or several lines: its segments (`Sample.last`), the last of which has the verdict.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from spmd_rl.types import SCORED, SUSPECT

STOP = "stop/"
"""Prefix of a verdict's parts for an episode's end: `stop/<reason>`."""
SEGMENT = ("answer", "advantage", "kept", "reject_reason", "turns")
"""Fields that may differ between a trajectory's segments."""
MARKED = 3
"""Number of best, worst and suspect samples of a step."""
PREVIEW = 160
"""Characters of a prompt and of an answer in the list."""


class _Step(msgspec.Struct):
    action: str | None = None


class _Turn(msgspec.Struct):
    text: str
    token_ids: list[int]
    versions: list[int]
    finish_reason: str
    step: _Step | None = None


class _Verdict(msgspec.Struct):
    status: str
    score: float | None = None
    parts: Mapping[str, float] = {}


class _Line(msgspec.Struct):
    ticket: int
    answer: int
    domain: str
    turns: list[_Turn]
    verdict: _Verdict
    kept: bool
    messages: list[dict[str, Any]] = []
    advantage: float | None = None
    reject_reason: str | None = None
    greedy: bool = False
    unit: int | None = None
    last: bool = True


class TrajectoryRow(msgspec.Struct, frozen=True):
    """The entry of a trajectory in the list."""

    ticket: int
    answer: int
    """Number of its first segment."""
    domain: str
    status: str
    score: float | None
    """None without a score."""
    end: str
    """Reason of its end: the environment's, the episode's, or its last turn's."""
    turns: int
    tokens: int
    """Sampled tokens of the policy."""
    segments: int
    advantage: float | None
    """Mean over the tokens of all turns."""
    kept: bool
    reject_reason: str | None
    greedy: bool
    suspect: bool
    """True if it was paid and looks like a cheat."""
    version: int | None
    """Latest version that sampled a token."""
    prompt: str
    text: str
    """Beginning of the last answer, or of an agent's actions; `prompt` is that of the prompt's last message."""
    offsets: tuple[int, ...]
    """Byte offsets of its segments' lines."""


def rows(path: Path, limit: int | None = None) -> Sequence[TrajectoryRow]:
    """Return a file's trajectories, in (ticket, answer) order; with `limit`, those of its first bytes.

    OSError; ValueError for an invalid file.
    """
    # The stamp is part of the cache's key, so a changed file is read again.
    return _rows(path, stamp(path), limit)


def stamp(path: Path) -> tuple[int, int] | None:
    """Return a file's modification time and size, which identify its content; None without a file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size


@lru_cache(8)
def _rows(path: Path, _: object, limit: int | None) -> Sequence[TrajectoryRow]:
    decode = msgspec.json.Decoder(_Line).decode
    lines: list[tuple[int, _Line]] = []
    offset = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                lines.append((offset, decode(line)))
            except msgspec.DecodeError as error:
                raise ValueError(f"{path.name}:{number}: {error}") from None
            offset += len(line)
            if limit is not None and offset >= limit:
                break
    return sorted([_row(segments) for segments in _trajectories(lines)], key=lambda row: (row.ticket, row.answer))


def mean_score(listed: Sequence[TrajectoryRow]) -> float | None:
    """Return the mean score of sampled answers, or of greedy ones if there are no others."""
    scores = [(row.score, row.greedy) for row in listed if row.score is not None]
    # The mean is that of the metrics, which count greedy answers apart.
    counted = [score for score, greedy in scores if not greedy] or [score for score, _ in scores]
    return fmean(counted) if counted else None


def marked(listed: Sequence[TrajectoryRow]) -> dict[str, list[TrajectoryRow]]:
    """Return the `best` and the `worst` samples by score, none of them in both, and `suspect` ones.

    If all scores are equal, `some` has samples instead.
    """
    scored = [(row.score, row) for row in listed if row.score is not None]
    falling = sorted(scored, key=lambda pair: -pair[0])
    rising = sorted(scored, key=lambda pair: pair[0])
    # Samples with the lowest score are never best, and those with the highest never worst.
    best = [row for score, row in falling[: min(MARKED, (len(scored) + 1) // 2)] if score > rising[0][0]]
    worst = [row for score, row in rising[: min(MARKED, len(scored) // 2)] if score < falling[0][0]]
    return {
        "best": best,
        "worst": worst,
        "some": [] if best else [row for _, row in falling[:MARKED]],
        "suspect": [row for row in listed if row.suspect][:MARKED],
    }


def _trajectories(lines: Sequence[tuple[int, _Line]]) -> Iterator[list[tuple[int, _Line]]]:
    """Group each trajectory's segments. Samples of one unit that are all `last` stay separate: a pair."""
    begun: dict[tuple[int, int], list[tuple[int, _Line]]] = defaultdict(list)
    # Lines are in (ticket, answer) order, in which segments of one unit follow each other.
    for offset, line in lines:
        key = (line.ticket, line.answer if line.unit is None else line.unit)
        begun[key].append((offset, line))
        if line.last:
            yield begun.pop(key)
    yield from begun.values()


def _row(segments: Sequence[tuple[int, _Line]]) -> TrajectoryRow:
    first, last = segments[0][1], segments[-1][1]
    turns = [turn for _, line in segments for turn in line.turns]
    versions = [turn.versions[-1] for turn in turns if turn.versions]
    kept = all(line.kept for _, line in segments)
    return TrajectoryRow(
        ticket=first.ticket,
        answer=first.answer,
        domain=first.domain,
        status=last.verdict.status,
        score=last.verdict.score if last.verdict.status in SCORED else None,
        end=_end(last.verdict.parts, turns),
        turns=len(turns),
        tokens=sum(len(turn.token_ids) for turn in turns),
        segments=len(segments),
        advantage=_advantage(segments),
        kept=kept,
        reject_reason=next((line.reject_reason for _, line in segments if not line.kept), None),
        greedy=last.greedy,
        suspect=SUSPECT in last.verdict.parts,
        version=max(versions, default=None),
        prompt=_prompt(first),
        text=_answer(turns),
        offsets=tuple(offset for offset, _ in segments),
    )


def _end(parts: Mapping[str, float], turns: Sequence[_Turn]) -> str:
    named = [key.removeprefix(STOP) for key, value in parts.items() if key.startswith(STOP) and value]
    return ", ".join(named) or (turns[-1].finish_reason if turns else "")


def _advantage(segments: Sequence[tuple[int, _Line]]) -> float | None:
    known = [line for _, line in segments if line.advantage is not None]
    tokens = [sum(len(turn.token_ids) for turn in line.turns) for line in known]
    total = sum(line.advantage * count for line, count in zip(known, tokens, strict=True) if line.advantage is not None)
    return total / sum(tokens) if sum(tokens) else None


def _prompt(line: _Line) -> str:
    content = line.messages[-1].get("content") if line.messages else ""
    return _begin(
        content if isinstance(content, str) else " ".join(str(part.get("text", "")) for part in content or [])
    )


def _answer(turns: Sequence[_Turn]) -> str:
    if any(turn.step for turn in turns):
        return _begin(" \u00b7 ".join((turn.step.action or "-")[:PREVIEW] for turn in turns if turn.step))
    return _begin(turns[-1].text) if turns else ""


def _begin(text: str) -> str:
    return " ".join(text[: 2 * PREVIEW].split())[:PREVIEW]


def whole(path: Path, row: TrajectoryRow) -> dict[str, Any]:
    """Return everything that the log has of a trajectory: row, task, verdict, and `segments` with their `turns` as in
    `SampleRow`.
    """
    lines = []
    with open(path, "rb") as file:
        for offset in row.offsets:
            # A file of samples may be large; only the lines of one trajectory are decoded in full.
            file.seek(offset)
            lines.append(msgspec.json.decode(file.readline()))
    task = {key: lines[0].get(key) for key in ("id", "messages", "ground_truth")}
    segments = [{key: line.get(key) for key in SEGMENT} for line in lines]
    return listed(row) | task | {"verdict": lines[-1]["verdict"], "segments": segments}


def listed(row: TrajectoryRow) -> dict[str, Any]:
    """Return a row for the list, without `offsets`."""
    return {name: getattr(row, name) for name in TrajectoryRow.__struct_fields__ if name != "offsets"}
