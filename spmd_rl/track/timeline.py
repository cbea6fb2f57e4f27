"""Who did what when: the phases of each rank over the last steps, from the tails of `journal/rank-N.jsonl`."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from spmd_rl.track.svg import label, svg, ticks

MAX_RANKS = 16
_TAIL_BYTES = 1 << 20
_decode = msgspec.json.Decoder(dict).decode


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time in which `phase` was the innermost one. Seconds since the epoch."""

    phase: str
    step: int
    begin: float
    end: float


def read_journals(directory: Path, num_steps: int) -> dict[int, list[Span]]:
    """Spans of the last `num_steps` steps by rank, for at most `MAX_RANKS` ranks."""
    ranks: dict[int, list[Span]] = {}
    found = ((re.fullmatch(r"rank-(\d+)", path.stem), path) for path in directory.glob("rank-*.jsonl"))
    for rank, path in sorted((int(match[1]), path) for match, path in found if match)[:MAX_RANKS]:
        events = _last_start(_tail(path))
        steps = sorted({event["step"] for event in events if event["event"] == "step"})[-num_steps:]
        ranks[rank] = [span for span in spans(events) if span.step in steps]
    return {rank: found for rank, found in ranks.items() if found}


def spans(events: Iterable[dict[str, Any]]) -> list[Span]:
    """Journal lines as spans: a nested phase interrupts the one around it."""
    result: list[Span] = []
    phases: list[str] = []
    since = 0.0
    for event in events:
        now = event["t"]
        if phases and now > since and event["event"] in ("enter", "exit", "step"):
            result.append(Span(phases[-1], event["step"], since, now))
        if event["event"] == "enter":
            phases.append(event["phase"])
        elif event["event"] == "exit" and phases:
            phases.pop()
        elif event["event"] not in ("step", "start"):
            continue
        since = now
    return result


def draw(ranks: dict[int, Sequence[Span]], colors: dict[str, str], names: dict[str, str], width: float = 1150) -> str:
    """One row a rank; `colors` by shown name, `names` where the shown name is not the journal's."""
    everything = [span for row in ranks.values() for span in row]
    if not everything:
        return ""
    begin, end = min(span.begin for span in everything), max(span.end for span in everything)
    left, right, top, row, gap = 58.0, 14.0, 24.0, 22.0, 6.0
    scale = (width - left - right) / max(end - begin, 1e-6)
    height = top + len(ranks) * (row + gap) + 24
    floor = height - 24
    parts = []
    for value in ticks(0, end - begin, 10):
        x = left + value * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{floor}"/>')
        if x < width - 60:
            parts.append(f'<text class="num" x="{x:.1f}" y="{floor + 16}" text-anchor="middle">{label(value)}</text>')
    parts.append(f'<text class="num" x="{width - right}" y="{floor + 16}" text-anchor="end">seconds</text>')
    for index, (rank, row_spans) in enumerate(ranks.items()):
        y = top + index * (row + gap) + gap / 2
        parts.append(f'<text class="num" x="{left - 8}" y="{y + row / 2 + 4}" text-anchor="end">rank {rank}</text>')
        for span in row_spans:
            name = names.get(span.phase, span.phase)
            wide = (span.end - span.begin) * scale
            if wide >= 0.15:
                tip = f"<title>rank {rank}, step {span.step}: {escape(name)} {span.end - span.begin:.3f} s</title>"
                parts.append(
                    f'<rect x="{left + (span.begin - begin) * scale:.2f}" y="{y}" width="{wide:.2f}" height="{row}" '
                    f'fill="{colors.get(name, "var(--other)")}">{tip}</rect>'
                )
    for step in sorted({span.step for span in everything}):
        x = left + (min(span.begin for span in everything if span.step == step) - begin) * scale
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="8" y2="{floor}"/>')
        parts.append(f'<text class="num" x="{x + 5:.1f}" y="16">step {step}</text>')
    return svg(width, height, "".join(parts))


def _tail(path: Path) -> list[dict[str, Any]]:
    """The last whole lines of a journal."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        lines = file.read().split(b"\n")
    first = 1 if size > _TAIL_BYTES else 0
    return [_decode(line) for line in lines[first:-1]]


def _last_start(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    starts = [i for i, event in enumerate(events) if event["event"] == "start"]
    return events[starts[-1] :] if starts else events
