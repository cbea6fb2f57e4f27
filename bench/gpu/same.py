"""Compare two runs bit by bit: samples, metrics that they determine, checkpoints. Exit code 1 if anything differs.

python -m bench.gpu.same RUN RUN
"""

import json
import sys
from itertools import zip_longest
from pathlib import Path

MEASURED = ("critic/score/mean", "actor/grad_norm", "actor/pg_loss", "train_infer/abs_diff/mean", "val/score/mean")
"""Metrics that stand for all: others depend on timing too, such as the count of answers that a step's end stopped."""


def rows(path: Path) -> list[dict]:
    """Return the lines of a JSONL file without the fields that hold a time."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if "second" not in k and "time" not in k} for row in found]


def differences(one: Path, other: Path) -> list[str]:
    """Name the samples, metrics and files in which two runs differ."""
    samples = [
        sorted(json.dumps(row, sort_keys=True) for path in run.glob("samples/*.jsonl") for row in rows(path))
        for run in (one, other)
    ]
    found = [] if samples[0] and samples[0] == samples[1] else [f"samples: {len(samples[0])} and {len(samples[1])}"]
    for left, right in zip_longest(*(rows(run / "metrics.jsonl") for run in (one, other)), fillvalue={}):
        found += [f"{key}: {left.get(key)}, {right.get(key)}" for key in MEASURED if left.get(key) != right.get(key)]
    for path in sorted(one.rglob("*.safetensors")):
        twin = other / path.relative_to(one)
        if not twin.exists() or path.read_bytes() != twin.read_bytes():
            found.append(str(path.relative_to(one)))
    return found


if __name__ == "__main__":
    different = differences(*map(Path, sys.argv[1:]))
    print(*(different or ["equal"]), sep="\n")
    sys.exit(bool(different))
