"""Goodput (ETTR) of real runs of which every tenth step is killed: kill -9 of any rank at any moment of it.

    python -m bench.goodput [--placement split] [--steps 30] [--rate 0.1] [--longer 1] [--seed 0]

Four ranks under `torchrun --max-restarts`, as launch/slurm/run.sbatch starts them, with a checkpoint every step. A
tiny model sleeps beside its work, so that a step takes some 20 s (`goodput_side.py`). Two figures: what the run itself
says (`system/goodput`), and what a clock outside says that knows nothing of it: steps times the median undisturbed
step, over all the time from before the first process to the end of the last.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench import goodput_side, work
from spmd_rl.track import goodput
from tests.models import tiny

RANKS = 4
PLACEMENTS = {
    "colocated": (),
    "split": ("placement.mode=split", "placement.train=0-1", "placement.generate=2-3", "publish.probe_every=0"),
}


@dataclass(frozen=True, slots=True)
class Kill:
    """What happens to a step."""

    rank: int
    moment: float
    """Share of the step that has passed."""


def plan(steps: int, rate: float, seed: int) -> dict[int, Kill]:
    """Return the steps that are killed, each once."""
    rng = random.Random(seed)
    return {
        step: Kill(rng.randrange(RANKS), rng.random()) for step in rng.sample(range(1, steps + 1), round(rate * steps))
    }


def settings(folder: Path, run_dir: Path, steps: int, seed: int, placement: str) -> list[str]:
    """Return the overrides of the run."""
    data = folder / "data.jsonl"
    rows = [{"prompt": f"say {i}", "ground_truth": str(i), "domain": "toy"} for i in range(200)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"policy.model={tiny('llama', folder / 'model')}",
        "policy.dtype=float32",
        f"data.train={data}",
        "reward.toy.target=tests.e2e.toy_reward:ParityReward",
        "rollout.prompts_per_step=8",
        "rollout.answers_per_prompt=4",
        f"rollout.max_new_tokens={goodput_side.TOKENS}",
        "rollout.filter.zero_variance=false",
        "eval.every=0",
        "checkpoint.every=1",
        f"seed={seed}",
        f"steps={steps}",
        f"run.dir={run_dir}",
        *PLACEMENTS[placement],
    ]


def last_step(run_dir: Path) -> int:
    """Return the step that rank 0 is in."""
    journal, step = run_dir / "journal" / "rank-0.jsonl", 0
    for line in journal.read_text().splitlines() if journal.exists() else ():
        if '"event":"step"' in line and line.endswith("}"):
            step = json.loads(line)["step"]
    return step


def finished(run_dir: Path) -> int:
    """Return how many lines `metrics.jsonl` has."""
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill(agent: int, rank: int) -> None:
    """Kill a rank as the kernel does."""
    for process in psutil.Process(agent).children():
        if process.environ().get("RANK") == str(rank):
            process.kill()


def watch(agent: subprocess.Popen, run_dir: Path, kills: dict[int, Kill]) -> tuple[list[float], float]:
    """Kill what is to be killed; return the seconds of each undisturbed step, and those of the whole job."""
    began = time.monotonic()
    ended, times, left = 0, {}, dict(kills)
    while agent.poll() is None:
        time.sleep(0.1)
        now, count = time.monotonic(), finished(run_dir)
        if count > ended:
            times[count] = now
            ended = count
        step = last_step(run_dir)
        if step in left and step > ended - 1:  # lines begin with that of step 0
            hit = left.pop(step)
            usual = statistics.median([times[n] - times[n - 1] for n in times if n - 1 in times] or [15.0])
            time.sleep(hit.moment * usual)
            kill(agent.pid, hit.rank)
            print(f"  step {step}: rank {hit.rank} killed at {hit.moment:.0%}", flush=True)
    seconds = time.monotonic() - began
    undisturbed = [
        times[n] - times[n - 1] for n in times if n - 1 in times and n - 1 not in kills and n - 2 not in kills
    ]
    return undisturbed, seconds


def main() -> None:
    """Print what the run says and what the clock says."""
    parser = argparse.ArgumentParser("python -m bench.goodput")
    parser.add_argument("--placement", choices=PLACEMENTS, default="colocated")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rate", type=float, default=0.1, help="share of the steps that are killed")
    parser.add_argument("--longer", type=float, default=1.0, help="steps take so many times as long")
    parser.add_argument("--seed", type=int, default=0)
    o = parser.parse_args()
    kills = plan(o.steps, o.rate, o.seed)
    steps = f"{o.steps} steps, {o.longer:g} times as long"
    print(f"{o.placement}, {RANKS} ranks, {steps}, killed: {sorted(kills)}, seed {o.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-goodput-") as name:
        folder = Path(name)
        run_dir, log = folder / "run", folder / "log"
        words = settings(folder, run_dir, o.steps, o.seed, o.placement)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=100"]
        command = [sys.executable, *launcher, "-m", "bench.goodput_side", *words]
        with open(log, "ab") as out:
            environment = os.environ | {"GOODPUT_LONGER": str(o.longer)}
            agent = subprocess.Popen(command, cwd=work.ROOT, stdout=out, stderr=out, env=environment)
            undisturbed, seconds = watch(agent, run_dir, kills)
        assert agent.returncode == 0, log.read_text(errors="replace")[-4000:]
        account = goodput.read(run_dir)
        usual = statistics.median(undisturbed)
        print(f"{account.starts} starts, {seconds:.0f} s; an undisturbed step {usual:.1f} s")
        print(f"ETTR by the run itself  {account.goodput:.3f} ({account.useful:.0f} of {account.wall:.0f} s)")
        print(f"ETTR by a clock outside {o.steps * usual / seconds:.3f}", flush=True)


if __name__ == "__main__":
    main()
