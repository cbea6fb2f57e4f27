"""Last metrics of runs as OpenMetrics, for Prometheus and others."""

import math
import re
from collections.abc import Mapping
from typing import Any

from spmd_rl.track.run_reader import RunData

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0"
Labels = Mapping[str, Any]


def open_metrics(runs: Mapping[str, tuple[RunData, Mapping[str, Any]]]) -> str:
    """Return the gauges of runs: name -> (its files, its reply to `live`).

    Metrics of `metrics.jsonl` are `spmd_rl_<metric>`; further ones are `spmd_rl_running`, `spmd_rl_step`, each rank's
    `spmd_rl_phase_seconds`, and `spmd_rl_alarm`, which is 1.
    """
    families: dict[str, list[tuple[Labels, float]]] = {}
    for name, (run, live) in runs.items():
        found = [("running", {}, live["state"] == "running"), ("step", {}, live["step"])]
        found += [
            ("phase_seconds", {key: one[key] for key in ("rank", "phase")}, one["seconds"]) for one in live["ranks"]
        ]
        found += [("alarm", {"name": alarm}, 1) for alarm in live["alarms"]]
        last = run.lines[-1] if run.lines else {}
        found += [(re.sub(r"\W", "_", key), {}, value) for key, value in last.items() if key != "step"]
        for family, labels, value in found:
            if value is not None and math.isfinite(value):
                families.setdefault(family, []).append(({"run": name} | labels, float(value)))
    lines = []
    for family, samples in families.items():
        lines.append(f"# TYPE spmd_rl_{family} gauge")
        unique = {
            ",".join(f'{key}="{_escaped(str(text))}"' for key, text in labels.items()): v for labels, v in samples
        }
        lines += [f"spmd_rl_{family}{{{labels}}} {value!r}" for labels, value in unique.items()]
    return "\n".join([*lines, "# EOF", ""])


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
