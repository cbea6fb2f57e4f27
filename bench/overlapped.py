"""Overlapped placement on real processes: verdicts that come in during the update, against ranks that wait for them.

    python -m bench.overlapped [--steps 6] [--seed 0] [--verdicts 0 1 2 4] [--updates 0.5 2]

Engines and updates sleep (`split_side.py`), and so does the judge; all else is as in a run.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

from bench import split, split_side, work
from spmd_rl.types import AnswerInfo, Prompt, Verdict
from tests.models import tiny

RANKS, SETTLED = 2, 2
MODES = ("colocated", "overlapped")


class SlowJudge:
    """Takes so many seconds for a verdict, and judges any number of answers side by side."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    async def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        await asyncio.sleep(self.seconds)
        return Verdict("ok", float(sum(map(ord, answer)) % 2 == 0))


def measure(folder: Path, mode: str, verdict: float, update: float, o: argparse.Namespace) -> tuple[float, float]:
    """Return seconds a step, and the seconds of waiting that are left in it, over the measured steps of a run."""
    steps = SETTLED + o.steps
    data, run_dir = folder / "data.jsonl", folder / f"{mode}-{verdict}-{update}"
    rows = [{"prompt": f"say {i}", "ground_truth": str(i), "domain": "toy"} for i in range(split.PROMPTS * (steps + 2))]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        *split.base(tiny("llama", folder / "model"), data, run_dir, o.seed, steps + 1),
        f"placement.mode={mode}",
        "reward.toy.target=bench.overlapped:SlowJudge",
        f"reward.toy.args.seconds={verdict}",
        "reward.toy.workers=1",
    ]
    command = [*work.launcher(sys.executable, RANKS), "-m", "bench.split_side", *words]
    environment = os.environ | {"TRAIN_SECONDS": str(update)}
    with open(folder / "log", "ab") as log:
        done = subprocess.run(command, cwd=work.ROOT, stdout=log, stderr=log, env=environment, timeout=1800)
    assert done.returncode == 0, (folder / "log").read_text(errors="replace")[-3000:]
    ended = dict(map(json.loads, (run_dir / split_side.ENDED).read_text().splitlines()))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    waits = [line["time/score"] for line in lines if SETTLED < line["step"] <= steps]
    return (ended[steps] - ended[SETTLED]) / o.steps, fmean(waits)


def main() -> None:
    """Print a line for each run."""
    parser = argparse.ArgumentParser("python -m bench.overlapped")
    parser.add_argument("--steps", type=int, default=6, help="measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verdicts", type=float, nargs="+", default=[0.0, 1.0, 2.0, 4.0], metavar="SECONDS")
    parser.add_argument("--updates", type=float, nargs="+", default=[0.5, 2.0], metavar="SECONDS")
    o = parser.parse_args()
    print(f"{RANKS} ranks, {split.PROMPTS} prompts x {split.ANSWERS} answers a step, {o.steps} steps, seed {o.seed}")
    print("verdict  update   colocated: s/step  waits   overlapped: s/step  waits  steps/hour   speed")
    with tempfile.TemporaryDirectory(prefix="bench-overlapped-") as folder:
        for update in o.updates:
            for verdict in o.verdicts:
                (slow, waited), (fast, left) = (measure(Path(folder), mode, verdict, update, o) for mode in MODES)
                print(
                    f"{verdict:7g}{update:8g}{slow:20.2f}{waited:7.2f}{fast:21.2f}{left:7.2f}"
                    f"{3600 / slow:8.0f} -> {3600 / fast:4.0f}{slow / fast:6.2f}x",
                    flush=True,
                )


if __name__ == "__main__":
    main()
