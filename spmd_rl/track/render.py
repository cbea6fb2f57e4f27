"""`report.html`: a run on one self-contained page, with curves, times, a timeline and samples.

The page is made from the run directory alone, so `report.py` can rewrite it at any time. Long series are thinned and
journals read from their ends, so ten thousand steps take about a second.
"""

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from spmd_rl.base.png import data_url
from spmd_rl.track import goodput, timeline
from spmd_rl.track import html_page as page
from spmd_rl.track.charts import CHARTS, SCORES, Chart
from spmd_rl.track.run_reader import RunData, best_and_worst, plain_text, read_run
from spmd_rl.track.samples import merged_files
from spmd_rl.track.svg import Series, duration, label, line_chart, stacked_bars, thin
from spmd_rl.track.tokens import TokenTexts
from spmd_rl.types import SUSPECT

PHASES = ("generate", "score", "eval", "logprobs", "prepare", "train", "publish", "checkpoint", "coordination", "track")
COLORS = dict(zip(PHASES, (f"var(--c{n})" for n in (1, 2, 3, 7, 8, 4, 6, 5)), strict=False)) | {
    "coordination": "var(--axis)",
    "track": "var(--soft)",
    "other": "var(--rule)",
}
NAMES = {"update": "train", "save": "checkpoint"}
"""Phases of the journal that have another name in metrics"""
TILES = {
    "val/score/mean": "score, held-out, sampled",
    "val/score_greedy/mean": "score, held-out, greedy",
    "critic/score/mean": "score, training",
    "val/loss": "loss, held-out",
}
"""Metrics shown with their first and last value"""
BEST = "var(--c3)"
"""Colour of the best samples if their score is above 0."""
PICTURE = "min-width:128px;max-width:100%;image-rendering:pixelated"
_MAX_BARS = 120
_TIMELINE_STEPS = 3
_SAMPLES, _SAMPLE_STEPS = 3, 8


def write_report(directory: Path, steps: Sequence[int] | None = None) -> Path:
    """Write `directory/report.html`, completely or not at all, and return its path. OSError if that fails.

    steps: those whose samples are shown; by default some, evenly spread over the run.
    """
    path = directory / "report.html"
    # The name has process and thread: an exit callback may write the report at the same time.
    draft = path.with_name(f".report-{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        draft.write_text(render(read_run(directory), steps), encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def render(run: RunData, steps: Sequence[int] | None = None) -> str:
    """Return the HTML of the page. `steps`: see `write_report`."""
    body = [
        _header(run),
        _tiles(run),
        page.section("Scores", _chart(run, SCORES, width=1150, height=280)),
        page.section("Training", _charts(run)),
        page.section("Where the time goes", _times(run)),
        page.section("Timeline", _timeline(run)),
        page.section("Samples", _samples(run, "step", steps)),
        page.section("Held-out samples", _samples(run, "eval", steps)),
        page.section("Settings", _settings(run)),
        f"<footer>Drawn {time.strftime('%Y-%m-%d %H:%M:%S %Z')} from {escape(str(run.directory))}.</footer>",
    ]
    return page.document(f"{run.directory.name} - spmd_rl", "\n".join(body))


def _header(run: RunData) -> str:
    launch = run.launch
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(launch["t"])) if "t" in launch else None
    command = launch.get("command")
    shown = f'<pre class="command">{escape(command)}</pre>' if command else ""
    return (
        f"<h1>{escape(str(run.setting('run.name') or run.directory.name))}</h1>"
        f'<p class="lead">{escape(_summary(run))}</p>{shown}'
        + page.facts(
            [
                ("model", run.setting("policy.model")),
                ("seed", run.setting("seed")),
                ("started", began),
                ("machine", launch.get("machine")),
                ("ranks", launch.get("ranks")),
                ("revision", str(run.about.get("git_revision") or "")[:12]),
            ]
        )
    )


def _summary(run: RunData) -> str:
    last, planned = run.lines[-1]["step"] if run.lines else 0, run.setting("steps")
    seconds = sum(y for _, y in run.series("time/total"))
    # An evaluation plans no steps.
    steps = "" if planned is None else f", {last} of {planned} steps"
    return f"{run.about.get('pipeline', 'run')}{steps} in {duration(seconds)}"


def _tiles(run: RunData) -> str:
    tiles = []
    for key, name in TILES.items():
        if points := run.series(key):
            ends = points[:1] + points[1:][-1:]
            tiles.append(page.tile(" \u2192 ".join(f"{value:.2f}" for _, value in ends), name))
    if times := run.series("time/total"):
        tiles.append(page.tile(duration(sum(y for _, y in times) / len(times)), "per step, mean"))
    if speed := run.series("system/tps"):
        tiles.append(page.tile(label(round(sum(y for _, y in speed) / len(speed))), "tokens per second, mean"))
    if speed := run.series("system/generated_tps"):
        tiles.append(page.tile(f"{sum(y for _, y in speed) / len(speed):.3g}", "generated tokens per second, mean"))
    if overhead := run.series("system/overhead"):
        tiles.append(
            page.tile(f"{100 * sum(y for _, y in overhead) / len(overhead):.1f} %", "coordination between ranks")
        )
    if (account := goodput.read(run.directory)).useful:
        starts = f"{account.starts} start{'s' * (account.starts > 1)}"
        tiles.append(page.tile(f"{100 * account.goodput:.1f} %", f"goodput of {duration(account.wall)}, {starts}"))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _chart(run: RunData, chart: Chart, **size: int) -> str:
    lines = zip(chart.lines.items(), chart.colors, strict=True)
    shown = [Series(name, color, points) for (key, name), color in lines if (points := run.series(key))]
    keys = "".join(page.key(series.name, series.color) for series in shown) if len(chart.lines) > 1 else ""
    return page.figure(chart.title, chart.note, keys, line_chart(shown, **size))


def _charts(run: RunData) -> str:
    return _grid([drawn for chart in CHARTS if (drawn := _chart(run, chart))])


def _grid(figures: Sequence[str]) -> str:
    shown = "".join(figures)
    return f'<div class="grid2">{shown}</div>' if shown else ""


def _times(run: RunData) -> str:
    lines = [line for line in run.lines if "time/total" in line]
    if not lines:
        return ""
    named = {key.removeprefix("time/") for line in lines for key in line if key.startswith("time/")} - {"total"}
    order = [phase for phase in (*PHASES, "other") if phase in named] + sorted(named - {*PHASES, "other"})
    columns = []
    for phase in order:
        points = [(float(line["step"]), float(line.get(f"time/{phase}") or 0.0)) for line in lines]
        if any(y > 0 for _, y in points):
            columns.append(Series(phase, COLORS.get(phase, "var(--other)"), thin(points, _MAX_BARS)))
    steps = [x for x, _ in columns[0].points]
    total = sum(y for column in columns for _, y in column.points)
    share = {column.name: sum(y for _, y in column.points) / total for column in columns}
    keys = "".join(page.key(f"{c.name} {100 * share[c.name]:.1f} %", c.color) for c in columns)
    note = "seconds, mean over ranks" + (
        "" if len(lines) <= _MAX_BARS else f"; a bar is a mean of {len(lines) // _MAX_BARS} steps"
    )
    return page.figure("Time of each step", note, keys, stacked_bars(steps, columns))


def _timeline(run: RunData) -> str:
    ranks = timeline.read_journals(run.directory / "journal", _TIMELINE_STEPS)
    phases = {NAMES.get(span.phase, span.phase) for row in ranks.values() for span in row}
    order = [phase for phase in PHASES if phase in phases] + sorted(phases - set(PHASES))
    keys = "".join(page.key(phase, COLORS.get(phase, "var(--other)")) for phase in order)
    steps = sorted({span.step for row in ranks.values() for span in row})
    note = f"steps {steps[0]} to {steps[-1]}; waits inside a library count as compute" if steps else ""
    drawing = timeline.draw(ranks, COLORS, NAMES)
    return page.figure("Phases by rank", note, keys, drawing and drawing + _kinds(ranks))


def _kinds(ranks: dict[int, list[timeline.Span]]) -> str:
    """Return a table of each rank's seconds and share of each kind of time; its head is the legend of the timeline."""
    rows = []
    for rank, spans in ranks.items():
        seconds = timeline.seconds_by_kind(spans)
        total = sum(seconds.values())
        rows.append([f"rank {rank}", *(f"{s:.2f} s \u00b7 {100 * s / total:.1f} %" for s in seconds.values())])
    return page.table(["", *(page.key(kind, "var(--soft)", look) for kind, look in timeline.KINDS.items())], rows)


def _samples(run: RunData, kind: str, steps: Sequence[int] | None) -> str:
    """Return the best and worst samples of some steps, the last one unfolded. `kind`: see `SampleLog`."""
    files, model = dict(merged_files(run.directory / "samples", kind)), run.setting("policy.model")
    chosen = spread(list(files), _SAMPLE_STEPS) if steps is None else [step for step in files if step in steps]
    blocks = []
    for step in chosen:
        found = best_and_worst(files[step], _SAMPLES)
        if found is None:
            continue
        titles = ("Best", "Worst", "Suspect") if found.worst else ("Some", "", "Suspect")
        columns = [
            f'<div><h3>{title} of step {step}</h3><div class="samples">'
            f"{''.join(_sample(row, color, model, run.directory) for row in rows)}</div></div>"
            for title, rows, color in zip(titles, found[1:], (BEST, "var(--c5)", "var(--c8)"), strict=True)
            if rows
        ]
        summary = f"step {step}: mean score {found.mean:.3g}{'' if found.worst else ', all scores are equal'}"
        summary += ", with suspect passes" if found.suspect else ""
        opened = " open" if step == chosen[-1] else ""
        blocks.append(f"<details{opened}><summary>{summary}</summary>{_grid(columns)}</details>")
    return "\n".join(blocks)


def spread(steps: Sequence[int], count: int) -> list[int]:
    """Return at most `count` of some steps, evenly spread, with the first and the last."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def _sample(row: dict[str, Any], color: str, model: str, folder: Path) -> str:
    verdict, turns = row["verdict"], row["turns"]
    count = sum(len(turn["token_ids"]) for turn in turns)
    facts = [f"ticket {row['ticket']}.{row['answer']}", *[f"{count} tokens"] * (count > 0)]
    if row.get("greedy"):
        facts.append("greedy")
    if row["advantage"] is not None:
        facts.append(f"advantage {row['advantage']:+.2f}")
    if not row["kept"] and row["reject_reason"] != "held out":
        facts.append(f"not trained on: {row['reject_reason']}")
    if verdict["status"] != "ok":
        facts.append(verdict["status"])
    if SUSPECT in verdict["parts"]:
        facts.append(f"suspect: {verdict['detail']}")
    color = "var(--other)" if color == BEST and verdict["score"] <= 0 else color
    boxes = "".join(_box(name, text, folder) for name, text in _told(row, model))
    return (
        f'<article class="sample" style="--c:{color}"><header><b>score {verdict["score"]:g}</b>'
        f"{''.join(f'<span>{escape(fact)}</span>' for fact in facts)}</header>"
        f"{boxes}</article>"
    )


def _box(name: str, text: str, folder: Path) -> str:
    """Return a text of a sample, or the picture if the answer is the path of one in the run directory `folder`."""
    picture = folder / text
    if name == "answer" and re.fullmatch(r"pictures/[\w-]+\.png", text) and picture.is_file():
        return f'<img src="{data_url(picture.read_bytes())}" alt="{escape(text)}" style="{PICTURE}">'
    return page.box(name, text, name == "answer")


def _told(row: dict[str, Any], model: str) -> Iterator[tuple[str, str]]:
    """Yield the texts of a sample with their names. A task of an environment has tokens instead of messages."""
    if row["messages"]:
        yield "prompt", "\n".join(plain_text(message["content"]) for message in row["messages"])
    else:
        texts, first = TokenTexts(model), row["turns"][0]["prompt_ids"] if row["turns"] else []
        yield "prompt", "".join(texts.texts(first) or [f"{len(first)} tokens ({texts.missing})"])
    for turn in row["turns"]:
        yield "answer", turn["text"] or "(empty)"
        if step := turn.get("step"):
            action = "no action" if step["action"] is None else step["action"]
            yield f"action, reward {step['reward']:+.3g}", action
            yield "observation", step["observation"]
    if row["ground_truth"]:
        yield "ground truth", row["ground_truth"]


def _settings(run: RunData) -> str:
    config = (run.directory / "config.yaml").read_text(encoding="utf-8")
    return f"<details><summary>config.yaml</summary><pre>{escape(config)}</pre></details>"
