"""Ranks with different work on real processes: 2 train while 2 generate, or are lent, against 4 that take turns.

    python -m bench.split [--steps 20] [--seed 0]

Engines and updates sleep (`split_side.py`), all else is as in a run: torchrun, gloo, store, ticks, verdicts of a
sidecar, the exchange of weights and groups. Beside each figure stands what the simulator says of the same run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench import split_side, work
from bench.virtual.comparison import Comparison, Outcome
from bench.virtual.simulate.policies import POLICIES
from bench.virtual.simulate.scene import Scene
from bench.virtual.two_sides import Costs
from spmd_rl.config.schema import RolloutConfig
from tests.models import tiny

RANKS, PROMPTS, ANSWERS = 4, 48, 4
RANKS_OF = ("placement.train=0-1", "placement.generate=2-3")


class Run(NamedTuple):
    """What is compared."""

    policy: str
    mode: str = "colocated"
    staleness: int = 1
    probe_every: int = 1

    @property
    def name(self) -> str:
        """What a line calls it."""
        return self.mode if self.mode == "colocated" else f"{self.mode}, staleness {self.staleness}"


RUNS = [
    Run("store"),
    Run("defer"),
    Run("store", "split"),
    Run("defer", "split"),
    Run("defer", "split", 2, 0),
    Run("carried", "split", 1, 0),
    Run("carried", "lent", 1, 0),
    Run("carried", "lent", 2, 0),
]
SETTLED = 5
"""Steps that are not measured; the fifth is the first long one of `tail: defer`."""


def settings(run: Run) -> list[str]:
    """Return the overrides of one run."""
    carried = {"partial_rollout": "true", "over_sample": PROMPTS * run.staleness}
    chosen = carried if run.policy == "carried" else {"over_sample": PROMPTS // 4, **POLICIES[run.policy]}
    placement = [f"placement.mode={run.mode}", *RANKS_OF, f"placement.max_staleness={run.staleness}"]
    return [
        *(placement if run.mode != "colocated" else []),
        *(f"rollout.{key}={value}" for key, value in chosen.items()),
        f"publish.probe_every={run.probe_every}",
    ]


def base(model: Path, data: Path, run_dir: Path, seed: int, steps: int) -> list[str]:
    """Return the overrides of all runs."""
    return [
        f"policy.model={model}",
        "policy.dtype=float32",
        f"data.train={data}",
        "reward.toy.target=tests.e2e.toy_reward:ParityReward",
        f"rollout.prompts_per_step={PROMPTS}",
        f"rollout.answers_per_prompt={ANSWERS}",
        f"rollout.max_new_tokens={split_side.CAP}",
        "rollout.filter.zero_variance=false",
        "eval.every=0",
        "checkpoint.every=0",
        f"seed={seed}",
        f"steps={steps}",
        f"run.dir={run_dir}",
    ]


def measure(folder: Path, run: Run, seed: int, steps: int) -> tuple[float, dict[int, int], float]:
    """Return seconds a step, and how many answers had which lag, over the measured steps of a run; and a share.

    The share is that of tokens computed again, with prompts, in order to go on with an answer, in all tokens that
    engines computed. The run has a step more, at whose end it writes a checkpoint.
    """
    data = folder / "data.jsonl"
    rows = [{"prompt": f"say {i}", "ground_truth": str(i), "domain": "toy"} for i in range(2 * PROMPTS * (steps + 1))]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_dir = folder / "-".join(map(str, run))
    words = [*base(tiny("llama", folder / "model"), data, run_dir, seed, steps + 1), *settings(run)]
    command = [*work.launcher(sys.executable, RANKS), "-m", "bench.split_side", *words]
    with open(folder / "log", "ab") as log:
        done = subprocess.run(command, cwd=work.ROOT, stdout=log, stderr=log, timeout=1800)
    assert done.returncode == 0, (folder / "log").read_text(errors="replace")[-3000:]
    ended = dict(map(json.loads, (run_dir / split_side.ENDED).read_text().splitlines()))
    seconds = (ended[steps] - ended[SETTLED]) / (steps - SETTLED)
    recomputed, computed = map(
        sum, zip(*map(json.loads, (run_dir / split_side.RECOMPUTED).read_text().splitlines()), strict=True)
    )
    return seconds, lags(run_dir, range(SETTLED + 1, steps + 1)), recomputed / computed


def lags(run_dir: Path, steps: Sequence[int]) -> dict[int, int]:
    """Return lag, in versions -> answers, of the samples in a run's log; the oldest token of an answer counts."""
    found: dict[int, int] = {}
    for step in steps:
        for line in (run_dir / "samples" / f"step-{step:06d}.jsonl").read_text().splitlines():
            lag = step - 1 - min(version for turn in json.loads(line)["turns"] for version in turn["versions"])
            found[lag] = found.get(lag, 0) + 1
    return dict(sorted(found.items()))


def simulated(run: Run, seed: int, steps: int) -> Outcome:
    """Return the same run on virtual clocks."""
    rollout = RolloutConfig(
        prompts_per_step=PROMPTS,
        answers_per_prompt=ANSWERS,
        max_new_tokens=split_side.CAP,
        over_sample=PROMPTS // 4,
    )
    scene = Scene(rollout, split_side.lengths(seed), RANKS, split_side.SPEED, max_running=64, verdict_seconds=5e-3)
    policy = "store" if run.policy == "carried" else run.policy
    comparison = Comparison(scene, policy, steps - SETTLED)
    costs = Costs(train=split_side.TRAIN_SECONDS, probe_every=run.probe_every)
    if run.policy == "carried":
        return comparison.carried(costs, RANKS // 2, run.staleness, lends=run.mode == "lent")
    if run.mode == "colocated":
        return comparison.colocated(costs)
    return comparison.split(costs, RANKS // 2, run.staleness)


def main() -> None:
    """Print a line for each run."""
    parser = argparse.ArgumentParser("python -m bench.split")
    parser.add_argument("--steps", type=int, default=20, help="measured; whole cycles of tail: defer have 5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, nargs="+", default=list(range(len(RUNS))), help="which of them")
    o = parser.parse_args()
    steps = SETTLED + o.steps
    print(f"{RANKS} ranks, {PROMPTS} prompts x {ANSWERS} answers a step, {o.steps} steps, seed {o.seed}")
    print(f"{'policy':8}{'placement':22}  s/step  speed  recomputed  lag: answers            simulated: s/step, speed")
    first = None
    with tempfile.TemporaryDirectory(prefix="bench-split-") as folder:
        for run in (RUNS[number] for number in o.runs):
            seconds, found, recomputed = measure(Path(folder), run, o.seed, steps)
            virtual = simulated(run, o.seed, steps)
            expected = 3600 / virtual.steps_per_hour
            first = first or (seconds, expected)
            told = ", ".join(f"{lag}: {count}" for lag, count in found.items())
            print(
                f"{run.policy:8}{run.name:22}{seconds:8.3f}{first[0] / seconds:6.2f}x{recomputed:12.1%}  {told:24}"
                f"{expected:12.3f}{first[1] / expected:6.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    main()
