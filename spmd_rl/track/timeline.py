"""The phases of each rank over the last steps, read from the ends of `journal/rank-N.jsonl` and drawn as a timeline.

Each moment of a phase is of one kind: compute, wait (for other ranks, or idle) or copy. Waits inside a library's own
collectives (FSDP's, the engine's) are invisible to a journal, and count as compute.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from spmd_rl.track.svg import label, rect, svg, text, ticks

KINDS = {"compute": "solid", "wait": "pale", "copy": "striped"}
"""Kinds of time, and the look of each (see `svg.rect`)"""
MAX_RANKS = 16
_TAIL_BYTES = 1 << 20
_BOUNDS = ("start", "step", "enter", "exit", "collective", "collective_done", "kind", "kind_done")
_MIN_WIDTH = 0.5
"""Width, in units of the drawing, below which a span is not drawn by itself"""
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
    """Return the spans of the last `num_steps` steps by rank, for at most `MAX_RANKS` ranks."""
    ranks: dict[int, list[Span]] = {}
    found = ((re.fullmatch(r"rank-(\d+)", path.stem), path) for path in directory.glob("rank-*.jsonl"))
    for rank, path in sorted((int(match[1]), path) for match, path in found if match)[:MAX_RANKS]:
        events = _tail(path)
        steps = sorted({event["step"] for event in events if event["event"] == "step"})[-num_steps:]
        ranks[rank] = [span for span in spans(events) if span.step in steps]
    return {rank: found for rank, found in ranks.items() if found}


def spans(events: Iterable[dict[str, Any]]) -> list[Span]:
    """Turn the events of a journal into spans. A nested phase, or kind of time, interrupts the outer one."""
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
    """Return the seconds of each kind of time."""
    seconds = dict.fromkeys(KINDS, 0.0)
    for span in row:
        seconds[span.kind] += span.seconds
    return seconds


def draw(ranks: dict[int, list[Span]], colors: dict[str, str], names: dict[str, str], width: float = 1150) -> str:
    """Draw one row a rank. `names`: phases that are shown under another name. `colors`: by shown name."""
    everything = [span for row in ranks.values() for span in row]
    if not everything:
        return ""
    begin, end = min(span.begin for span in everything), max(span.end for span in everything)
    left, right, top, row, gap = 58.0, 14.0, 24.0, 22.0, 6.0
    scale = (width - left - right) / max(end - begin, 1e-6)
    floor = top + len(ranks) * (row + gap)
    parts = []
    for value in ticks(0, max(end - begin, 1e-6), 10):
        x = left + value * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{floor}"/>')
        parts.append(text(x, floor + 16, label(value)))
    parts.append(text(left - 8, floor + 16, "seconds", "end"))
    for index, (rank, row_spans) in enumerate(ranks.items()):
        y = top + index * (row + gap) + gap / 2
        parts.append(text(left - 8, y + row / 2 + 4, f"rank {rank}", "end"))
        for span in coalesce(row_spans, _MIN_WIDTH / scale):
            name = names.get(span.phase, span.phase)
            tip = f"rank {rank}, step {span.step}: {name}, {span.kind} {span.seconds:.3f} s"
            x, wide = left + (span.begin - begin) * scale, span.seconds * scale
            parts.append(rect(x, y, wide, row, colors.get(name, "var(--other)"), tip, KINDS[span.kind]))
    for step in sorted({span.step for span in everything}):
        x = left + (min(span.begin for span in everything if span.step == step) - begin) * scale
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="8" y2="{floor}"/>')
        parts.append(text(x + 5, 16, f"step {step}", "start"))
    return svg(width, floor + 24, "".join(parts))


def coalesce(row: Iterable[Span], shortest: float) -> list[Span]:
    """Join neighbours of one phase and kind; a span shorter than `shortest` seconds joins the previous one."""
    result: list[Span] = []
    for span in row:
        last = result[-1] if result else None
        close = last is not None and last.step == span.step and span.begin - last.end < shortest
        if close and (span.seconds < shortest or (span.phase, span.kind) == (last.phase, last.kind)):
            result[-1] = replace(last, end=span.end)
        else:
            result.append(span)
    return result


def _tail(path: Path) -> list[dict[str, Any]]:
    """Return the events of the last start in the last `_TAIL_BYTES` of a journal."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        lines = file.read().split(b"\n")
    events: list[dict[str, Any]] = []
    for line in lines[int(size > _TAIL_BYTES) : -1]:
        # A line may be truncated by a full disk or a kill.
        with suppress(msgspec.DecodeError):
            event = _decode(line)
            if event["event"] == "start":
                events.clear()
            events.append(event)
    return events
