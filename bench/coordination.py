"""(d) What coordination costs per sample: the door with model compute stubbed out, on 1 to 8 ranks.

    python -m bench.coordination --ranks 1 2 4 8 --prompts 8 32 --rounds 20 --steps 10 --json d.json --svg d.svg

See `stub_side.py` for what is left in. Every rank has 8 prompts x 8 answers a step (the demo's work), then four times
as many: part of the cost is a step's, whatever it holds. One thread a rank, and nothing to wait for but its peers.
CPU-seconds are those of the ranks, summed, over the samples of all of them: what a sample costs wherever there is a
core per rank. The sidecar's are told apart. Wall time is of this machine: more ranks than cores take turns.

All sizes are started, and each gets a stretch of steps in every round, so that all see the same hours of the
machine. Others on it can only add to what a stretch takes (they share its caches and its cores' units), and did by a
factor of three: so the least of the stretches is told beside the median.
"""

import statistics
import sys
from contextlib import ExitStack
from itertools import product
from typing import Any

from bench import show, work
from bench.gate import Contestant, Timed
from bench.our_side import EVERY
from spmd_rl.track.metrics import read_lines

TARGET = 100.0
"""us a sample"""
PHASES = ("generate", "score", "prepare", "train", "publish", "coordination", "track", "other")


class Size:
    """A job of so many ranks with so many prompts a step for each; suspended between its stretches."""

    def __init__(self, options: Any, ranks: int, prompts: int, seed: int) -> None:
        self.ranks, self.prompts, self.seed, self.every = ranks, prompts, seed, options.steps
        self.folder = options.dir / f"coordination-{ranks}-{prompts}-{seed}"
        work.fresh(self.folder)
        size = [f"rollout.prompts_per_step={prompts * ranks}", f"engine.max_running={8 * prompts}", *options.settings]
        last = (1 + options.rounds) * self.every
        overrides = work.settings(size, seed, last + 2, self.folder / "run")
        self.samples = work.num_samples(work.loaded(overrides))
        self._command = [*work.launcher(sys.executable, ranks), "-m", "bench.stub_side", *overrides]
        self.stretches: list[Timed] = []

    def start(self, held: ExitStack) -> Contestant:
        """Up to the first stretch that is timed; `held` ends it."""
        env = {**work.environment(self.ranks), "OMP_NUM_THREADS": "1", EVERY: str(self.every)}
        job = held.enter_context(Contestant.start("stubs", self._command, env, self.ranks, self.folder))
        job.wait()
        for _ in range(2):  # step 0, which only evaluates, and a stretch that is not timed
            job.step()
        job.suspend()
        held.callback(job.resume)  # before it is told to end
        return job

    def told(self) -> dict[str, Any]:
        """What was measured so far."""
        first, last = self.every + 1, (1 + len(self.stretches)) * self.every
        lines = [line for line in read_lines(self.folder / "run" / "metrics.jsonl") if first <= line["step"] <= last]
        num_samples = self.every * self.samples
        return {
            "ranks": self.ranks,
            "prompts": self.prompts,
            "seed": self.seed,
            "samples": self.samples,
            "us_per_sample": [1e6 * s.rank_cpu_seconds / num_samples for s in self.stretches],
            "us_per_sample_sidecar": [1e6 * (s.cpu_seconds - s.rank_cpu_seconds) / num_samples for s in self.stretches],
            "ms_per_step": [1e3 * s.seconds / self.every for s in self.stretches],
            "phases_ms": {p: 1e3 * statistics.median(li.get(f"time/{p}", 0.0) for li in lines) for p in PHASES},
        }


def measure(options: Any, seed: int) -> list[dict[str, Any]]:
    """All sizes, in turns."""
    sizes = [Size(options, ranks, prompts, seed) for prompts in options.prompts for ranks in options.ranks]
    with ExitStack() as held:
        jobs = [size.start(held) for size in sizes]
        for _ in range(options.rounds):
            for size, job in zip(sizes, jobs, strict=True):
                job.resume()
                size.stretches.append(job.step())
                job.suspend()
        return [size.told() for size in sizes]


def main() -> None:
    parser = work.parser(__doc__, steps=10)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--prompts", type=int, nargs="+", default=[8, 32], help="a step, for each rank")
    parser.add_argument("--rounds", type=int, default=20, help="timed stretches of --steps steps, of each size")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for seed in options.seed:
        runs += measure(options, seed)
        show.record(options.json, {"benchmark": "coordination", "runs": runs})
    costs, drawn = [], []
    for prompts, ranks in product(options.prompts, options.ranks):
        mine = [run for run in runs if (run["ranks"], run["prompts"]) == (ranks, prompts)]
        cpu, sidecar, wall = (
            [value for run in mine for value in run[key]]
            for key in ("us_per_sample", "us_per_sample_sidecar", "ms_per_step")
        )
        head = [str(ranks), str(mine[0]["samples"])]
        costs.append([*head, f"{min(cpu):.0f}", f"{statistics.median(cpu):.0f}", f"{min(cpu) / TARGET:.2f}"])
        costs[-1] += [f"{statistics.median(sidecar):.0f}", f"{statistics.median(wall):.1f}"]
        costs[-1] += [f"{statistics.fmean(run['phases_ms'][phase] for run in mine):.1f}" for phase in PHASES]
        parts = [("least stretch", min(cpu)), ("more in the median", statistics.median(cpu) - min(cpu))]
        drawn.append(show.Bar(f"{ranks} rank(s), {mine[0]['samples']} samples", parts))
    columns = ["ranks", "samples", "least", "median", f"of {TARGET:.0f}", "sidecar's", "ms a step", *PHASES]
    show.table("Coordination: CPU-us per sample; wall per step and by phase, in ms", columns, costs)
    title = "What coordination costs, model compute stubbed out"
    show.bars(options.svg, title, "CPU us a sample", drawn, mark=(TARGET, f"{TARGET:.0f} us"))


if __name__ == "__main__":
    sys.exit(main())
