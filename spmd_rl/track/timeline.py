"""The phases of each rank over the last steps, from the ends of `journal/rank-N.jsonl`.

A moment is compute, wait (for other ranks, or idle) or copy. Waits inside a library's collectives count as compute: a
journal does not see them.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

KINDS = ("compute", "wait", "copy")
NAMES = {"update": "train", "save": "checkpoint"}
"""Phases with another name in metrics"""
MAX_RANKS = 16
SPANS_ACROSS = 2000
"""Spans that a drawing has room for"""
_TAIL_BYTES = 1 << 20
_BOUNDS = ("start", "step", "enter", "exit", "collective", "collective_done", "kind", "kind_done")
_decode = msgspec.json.Decoder(dict).decode


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time in which `phase` was the innermost one; times are seconds since the epoch."""

    phase: str
    kind: str
    step: int
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """Length of the span in seconds."""
        return self.end - self.begin


def read_journals(directory: Path, num_steps: int) -> dict[int, list[Span]]:
    """Return the spans of the last `num_steps` steps by rank, of at most `MAX_RANKS`."""
    ranks: dict[int, list[Span]] = {}
    found = ((re.fullmatch(r"rank-(\d+)", path.stem), path) for path in directory.glob("rank-*.jsonl"))
    for rank, path in sorted((int(match[1]), path) for match, path in found if match)[:MAX_RANKS]:
        events = read_tail(path)
        steps = sorted({event["step"] for event in events if event["event"] == "step"})[-num_steps:]
        ranks[rank] = [span for span in spans(events) if span.step in steps]
    return {rank: found for rank, found in ranks.items() if found}


def spans(events: Iterable[dict[str, Any]]) -> list[Span]:
    """Turn a journal's events into spans. A nested phase, or kind, interrupts the outer one."""
    result: list[Span] = []
    phases: list[str] = []
    kinds: list[str] = []
    since = 0.0
    for event in events:
        now, what = event["t"], event["event"]
        if what not in _BOUNDS:
            continue
        if phases and now > since:
            result.append(Span(phases[-1], kinds[-1] if kinds else "compute", event["step"], since, now))
        since = now
        if what == "enter":
            phases.append(event["phase"])
        elif what == "exit":
            del phases[-1:]
        elif what in ("collective", "kind"):
            kinds.append(event.get("kind", "wait"))
        elif what in ("collective_done", "kind_done"):
            del kinds[-1:]
    return result


def seconds_by_kind(row: Iterable[Span]) -> dict[str, float]:
    """Return the seconds of each kind."""
    seconds = dict.fromkeys(KINDS, 0.0)
    for span in row:
        seconds[span.kind] += span.seconds
    return seconds


def timeline_data(directory: Path, num_steps: int) -> list[dict[str, Any]]:
    """Return each rank's last `num_steps` steps for the page, in seconds since the first span.

    A span is [phase, kind, step, begin, end]. One too short to be seen joins the previous one.
    """
    ranks = read_journals(directory, num_steps)
    begin = min((row[0].begin for row in ranks.values()), default=0.0)
    end = max((row[-1].end for row in ranks.values()), default=0.0)
    return [
        {
            "rank": rank,
            "spans": [
                [NAMES.get(s.phase, s.phase), s.kind, s.step, round(s.begin - begin, 4), round(s.end - begin, 4)]
                for s in coalesce(row, (end - begin) / SPANS_ACROSS)
            ],
            "seconds": seconds_by_kind(row),
        }
        for rank, row in ranks.items()
    ]


def coalesce(row: Iterable[Span], shortest: float) -> list[Span]:
    """Join neighbours of one phase and kind; a span under `shortest` seconds joins the previous one."""
    result: list[Span] = []
    for span in row:
        last = result[-1] if result else None
        close = last is not None and last.step == span.step and span.begin - last.end < shortest
        if close and (span.seconds < shortest or (span.phase, span.kind) == (last.phase, last.kind)):
            result[-1] = replace(last, end=span.end)
        else:
            result.append(span)
    return result


def read_tail(path: Path, num_bytes: int = _TAIL_BYTES) -> list[dict[str, Any]]:
    """Return the events of the last start in a journal's last bytes."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - num_bytes))
        lines = file.read().split(b"\n")
    events: list[dict[str, Any]] = []
    # The first line is cut unless the file begins here; the last is empty or incomplete.
    for line in lines[int(size > num_bytes) : -1]:
        # A line may be truncated by a full disk or a kill.
        with suppress(msgspec.DecodeError):
            event = _decode(line)
            if event["event"] == "start":
                events.clear()
            events.append(event)
    return events
