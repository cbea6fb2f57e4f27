"""The present of a run: its state, each rank's phase, and alarms, from the ends of its journals."""

import os
import platform
import time
from pathlib import Path
from typing import Any

from spmd_rl.base.errors import duration, one_line
from spmd_rl.track.alarms import alarms, slow_step
from spmd_rl.track.run_reader import RunData
from spmd_rl.track.timeline import NAMES, read_tail

TAIL_BYTES = 1 << 15
GONE_SECONDS = 5.0
"""Silence of all ranks after which a process that does not exist counts as gone."""


def live(run: RunData, now: float | None = None) -> dict[str, Any]:
    """Return the reply to `live`. now: seconds since the epoch."""
    now = time.time() if now is None else now
    folder, start = run.directory / "journal", run.process
    paths = [folder / f"rank-{rank}.jsonl" for rank in range(start.get("size", 1))]
    ranks = [{"rank": rank, **_present(path, now)} for rank, path in enumerate(paths) if path.exists()]
    state, why = _state(run, ranks, now)
    found = alarms(run)
    if state == "running" and ranks and (text := slow_step(run, ranks[0]["of_step"])):
        found["slow"] = text
    if state in ("silent", "killed", "failed"):
        found = {state: why, **found}
    return {"state": state, "why": why, "step": max((one["step"] for one in ranks), default=0)} | {
        "ranks": ranks if state in ("running", "silent") else [],
        "alarms": found,
    }


def _present(journal: Path, now: float) -> dict[str, Any]:
    phases: list[tuple[str, float]] = []
    kinds: list[str] = []
    call, event, began = "", {"event": "", "t": now, "step": 0}, now
    for event in read_tail(journal, TAIL_BYTES):
        what = event["event"]
        if what == "step":
            began = event["t"]
        elif what == "enter":
            phases.append((event["phase"], event["t"]))
        elif what == "exit":
            del phases[-1:]
        elif what in ("collective", "kind"):
            kinds.append(event["kind"])
            call = event.get("name", call)
        elif what in ("collective_done", "kind_done"):
            del kinds[-1:]
            call = call if kinds else ""
    phase, since = phases[-1] if phases else ("", event["t"])
    return {
        "phase": NAMES.get(phase, phase) if event["event"] != "end" else "end",
        "kind": kinds[-1] if kinds else "compute",
        "call": call,
        "step": event["step"],
        "seconds": round(now - since, 1),
        "of_step": round(now - began, 1),
        "silent": round(now - event["t"], 1),
    }


def _state(run: RunData, ranks: list[dict[str, Any]], now: float) -> tuple[str, str]:
    """Return `running`, `ended`, `failed`, `killed`, `silent` or `unknown`, and a line about it."""
    start, silent = run.process, min((one["silent"] for one in ranks), default=0.0)
    error = run.directory / "error.txt"
    if not ranks or not start:
        return "unknown", "no journal"
    if all(one["phase"] == "end" for one in ranks):
        return "ended", f"ended {duration(silent)} ago"
    if error.exists() and error.stat().st_mtime > start["t"]:
        return "failed", one_line(error.read_text(encoding="utf-8", errors="replace").partition("\n")[0])
    here = start.get("host") == platform.node()
    if here and silent > GONE_SECONDS and not _exists(start["pid"]):
        return "killed", f"its process {start['pid']} is gone, the last line is {duration(silent)} old"
    if silent > (run.setting("journal.stall_seconds") or 300.0):
        return "silent", f"no rank has written for {duration(silent)}: stalled, or killed on another machine"
    return "running", f"step {max(one['step'] for one in ranks)}"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
