"""The data of a run's page: replies to its script's requests, or all of them embedded in `report.html`.

The requests are `runs`, `run`, `overview`, `series`, `step`, `trajectories` and `compare`; a server also answers
`live`.
"""

import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from spmd_rl.base.errors import duration, plural
from spmd_rl.track import goodput
from spmd_rl.track.run_reader import RunData
from spmd_rl.track.samples import KINDS, merged_files
from spmd_rl.track.timeline import timeline_data
from spmd_rl.track.tokens import TokenTexts
from spmd_rl.track.trajectories import listed, marked, mean_score, rows, whole
from spmd_rl.types import ImagePart

TILES = {
    "val/score/mean": "score, held-out, sampled",
    "val/score_greedy/mean": "score, held-out, greedy",
    "critic/score/mean": "score, training",
    "val/loss": "loss, held-out",
}
"""Metrics with their first and last value"""
MEANS: dict[str, tuple[str, Callable[[float], str]]] = {
    "time/total": ("per step, mean", duration),
    "system/tps": ("tokens per second, mean", lambda speed: f"{speed:,.0f}"),
    "system/generated_tps": ("generated tokens per second, mean", lambda speed: f"{speed:.3g}"),
    "system/overhead": ("coordination between ranks", lambda share: f"{100 * share:.1f} %"),
}
"""Metrics with their mean over the steps"""
_TIMELINE_STEPS = 3
_SAMPLE_STEPS = 8
_SAMPLE_BYTES = 256 << 20
"""Bytes of samples files that a report reads"""
_TOKENS = 100_000
"""Tokens whose ids, logprobs and versions a report holds; further samples are texts"""


def title(run: RunData) -> str:
    """Return the name of a run for people."""
    return str(run.setting("run.name") or run.directory.resolve().name)


def files(run: RunData, kind: str) -> dict[int, Path]:
    """Return a run's sample files by step. KeyError for a kind outside of `KINDS`."""
    if kind not in KINDS:
        raise KeyError(f"no kind {kind!r} of samples")
    return dict(merged_files(run.directory / "samples", kind))


def summary(name: str, run: RunData) -> dict[str, Any]:
    """Return a run's entry in the list of runs."""
    scores = [points[-1][1] for key in ("val/score/mean", "critic/score/mean") if (points := run.series(key))]
    return {
        "run": name,
        "title": title(run),
        "pipeline": run.about.get("pipeline"),
        "model": run.setting("policy.model"),
        "seed": run.setting("seed"),
        "last": run.lines[-1]["step"] if run.lines else 0,
        "planned": run.setting("steps"),
        "score": scores[0] if scores else None,
    }


def outline(name: str, run: RunData) -> dict[str, Any]:
    """Return the reply to `run`: its summary, and the steps with samples."""
    return summary(name, run) | {
        "steps": {kind: list(files(run, kind)) for kind in KINDS},
        "no_tokenizer": TokenTexts(run.setting("policy.model")).missing,
    }


def overview(run: RunData) -> dict[str, Any]:
    """Return the reply to `overview`: all but curves and samples."""
    started = run.launch.get("t")
    return {
        "pipeline": run.about.get("pipeline", "run"),
        "seconds": duration(sum(y for _, y in run.series("time/total"))),
        "started": started and time.strftime("%Y-%m-%d %H:%M", time.localtime(started)),
        "revision": str(run.about.get("git_revision") or "")[:12],
        "launch": run.launch,
        "tiles": list(_tiles(run)),
        "timeline": timeline_data(run.directory / "journal", _TIMELINE_STEPS),
        "settings": (run.directory / "config.yaml").read_text(encoding="utf-8"),
        "drawn": f"Drawn {time.strftime('%Y-%m-%d %H:%M:%S %Z')} from {run.directory}.",
    }


def _tiles(run: RunData) -> Iterator[tuple[str, str]]:
    for key, words in TILES.items():
        if points := run.series(key):
            # An evaluation has one value.
            yield " \u2192 ".join(f"{value:.2f}" for _, value in points[:1] + points[1:][-1:]), words
    for key, (words, form) in MEANS.items():
        if points := run.series(key):
            yield form(sum(y for _, y in points) / len(points)), words
    if (account := goodput.read(run.directory)).useful:
        words = f"goodput of {duration(account.wall)}, {plural(account.starts, 'start')}"
        yield f"{100 * account.goodput:.1f} %", words


def samples(run: RunData, kind: str, step: int, limit: int | None = None) -> dict[str, Any]:
    """Return the reply to `step`: its trajectories, their mean score, and the (ticket, answer) of marked ones.

    KeyError if the step has no samples. `limit`: see `rows`.
    """
    found = rows(files(run, kind)[step], limit)
    return {
        "rows": [listed(row) for row in found],
        "total": len(found),
        "mean": mean_score(found),
        "marked": {mark: [(row.ticket, row.answer) for row in some] for mark, some in marked(found).items()},
    }


def trajectories(
    run: RunData, kind: str, step: int, places: Collection[tuple[int, int]], limit: int | None = None
) -> list[dict[str, Any]]:
    """Return the reply to `trajectories`: those at `places`, (ticket, answer), in full."""
    path = files(run, kind)[step]
    texts = TokenTexts(run.setting("policy.model"))
    chosen = [row for row in rows(path, limit) if (row.ticket, row.answer) in places]
    return [_shown(texts.add(whole(path, row)), run.directory) for row in chosen]


def _shown(trajectory: dict[str, Any], folder: Path) -> dict[str, Any]:
    contents = (message["content"] for message in trajectory["messages"])
    for part in (part for content in contents if isinstance(content, list) for part in content if "path" in part):
        part["url"] = _picture(folder / "samples", part["path"])
    for segment in trajectory["segments"]:
        for turn in segment["turns"]:
            turn["num_given"], turn["num_tokens"] = len(turn.pop("prompt_ids")), len(turn["token_ids"])
            if picture := _picture(folder, turn["text"]):
                turn["picture"] = picture
            if "pictures" in turn:
                found = (_picture(folder / "samples", path) for path in turn["pictures"])
                turn["pictures"] = [url for url in found if url]
    return trajectory


def _picture(folder: Path, path: str) -> str | None:
    if not re.fullmatch(r"pictures/[\w-]+\.(png|jpg|gif)", path) or not (folder / path).is_file():
        return None
    return ImagePart.of((folder / path).read_bytes()).url


def embedded(run: RunData, steps: Sequence[int] | None = None) -> dict[str, Any]:
    """Return all replies in a report, by request and name of the run.

    steps: those with samples; by default some, evenly spread.
    """
    name, by_step, by_trajectory, room = ".", {}, {}, _TOKENS
    found = outline(name, run)
    chosen = {
        kind: spread(known, _SAMPLE_STEPS) if steps is None else [step for step in known if step in steps]
        for kind, known in found["steps"].items()
    }
    limit = _SAMPLE_BYTES // max(1, sum(map(len, chosen.values())))
    # The last step comes first: its tokens are the most wanted.
    for kind, step in [(kind, step) for kind, some in chosen.items() for step in reversed(some)]:
        place, reply = f"{kind} {step}", samples(run, kind, step, limit)
        shown = {one for some in reply["marked"].values() for one in some}
        by_step[place] = reply | {"rows": [row for row in reply["rows"] if (row["ticket"], row["answer"]) in shown]}
        by_trajectory[place] = trajectories(run, kind, step, shown, limit)
        for trajectory in by_trajectory[place]:
            room = _trim(trajectory, room)
    return {
        "runs": [summary(name, run)],
        "run": {name: found | {"steps": chosen}},
        "overview": {name: overview(run)},
        "series": {name: run.curves(found["last"])},
        "step": {name: by_step},
        "trajectories": {name: by_trajectory},
    }


def _trim(trajectory: dict[str, Any], room: int) -> int:
    """Shorten logprobs, or drop tokens without room. Return the tokens of room left."""
    fits = trajectory["tokens"] <= room
    for segment in trajectory["segments"]:
        for turn in segment["turns"]:
            # An infinite one is null in the log.
            turn["logprobs"] = [logprob and round(logprob, 4) for logprob in turn["logprobs"]]
            if not fits:
                turn |= {"tokens": None, "token_ids": [], "logprobs": [], "versions": []}
    return room - trajectory["tokens"] * fits


def spread(steps: Sequence[int], count: int) -> list[int]:
    """Return at most `count` steps, evenly spread, with the first and the last."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]
