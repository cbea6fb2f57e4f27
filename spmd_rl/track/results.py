"""Results of an evaluation: `evaluation.json` in its run directory, and a table."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from spmd_rl.base.errors import aligned, tell
from spmd_rl.track.metrics import Values

RESULTS = "evaluation.json"


def write_results(directory: Path, found: Mapping[str, Values], about: Mapping[str, Any]) -> None:
    """Write the numbers by domain, those of all as `all`, with `about`: completely or not at all.

    Those of an evaluation with another `about.key` are kept, in a file named by that key.
    """
    draft = (directory / RESULTS).with_suffix(".tmp")
    # No earlier file, or an unreadable one, needs no backup.
    with suppress(OSError, msgspec.DecodeError):
        earlier = msgspec.json.decode((directory / RESULTS).read_bytes(), type=dict)
        if (key := earlier.get("key")) != about.get("key"):
            kept = directory / f"evaluation-{key}.json"
            os.replace(directory / RESULTS, kept)
            tell(f"notice: {directory} holds an evaluation of {earlier.get('model')}; its numbers are now in {kept}")
    results = {domain or "all": values for domain, values in found.items()}
    draft.write_bytes(msgspec.json.format(msgspec.json.encode({**about, "results": results}), indent=2) + b"\n")
    os.replace(draft, directory / RESULTS)


def table(found: Mapping[str, Values]) -> str:
    """Return a line for each domain, and one for all if there are several.

    Columns: domain, prompts, means of greedy and sampled answers with 95 % intervals, then `eval.metrics`.
    """
    counted = [key for key in found[""] if key.startswith(("pass@", "maj@"))]
    domains = [domain for domain in found if domain] + [""] * (len(found) != 2)
    lines = [["domain", "prompts", "greedy", "sampled", *counted]]
    for domain in domains:
        values = found[domain]
        means = [_mean(values, name) for name in ("score_greedy", "score")]
        shown = [f"{values[key]:.3f}" if key in values else "-" for key in counted]
        lines.append([domain or "all", f"{values['num_prompts']:.0f}", *means, *shown])
    return aligned(lines)


def _mean(values: Values, name: str) -> str:
    if f"{name}/mean" not in values:
        return "-"
    half = values.get(f"{name}/ci95")
    return f"{values[f'{name}/mean']:.3f}" + (f" \N{PLUS-MINUS SIGN}{half:.3f}" if half is not None else "")
