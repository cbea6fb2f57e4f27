"""(d) What coordination costs per sample: the door with model compute stubbed out, on 1 to 8 ranks.

    python -m tests.bench.coordination --ranks 1 2 4 8 --prompts 8 32 --steps 40 --json d.json --svg d.svg

See `stub_side.py` for what is left in. Every rank has 8 prompts x 8 answers a step (the demo's work), then four times
as many: part of the cost is a step's, whatever it holds. One thread a rank, and nothing to wait for but its peers.
CPU-seconds are those of the ranks, summed, over the samples of all of them: what a sample costs wherever there is a
core per rank. The sidecar's are told apart. Wall time is of this machine: more ranks than cores take turns.
"""

import statistics
import sys
from typing import Any

from spmd_rl.track.metrics import read_lines
from tests.bench import show, work
from tests.bench.gate import Contestant
from tests.bench.our_side import EVERY

TARGET = 100.0
"""us a sample"""
BLOCKS = 3
"""Timed stretches of `--steps` steps, after one that is not timed."""
COUNTS = {"store_operations": "store operations", "meetings": "meetings", "meeting_bytes": "bytes"}
"""What a run counts (see `dist/traffic.py`): each rank's part in a meeting counts, and so do the samples' own bytes."""
PHASES = ("generate", "score", "prepare", "train", "publish", "coordination", "track", "other")


def measure(options: Any, ranks: int, prompts: int, seed: int) -> dict[str, Any]:
    """One world size; `prompts` a step for each rank."""
    folder = options.dir / f"coordination-{ranks}-{prompts}-{seed}"
    work.fresh(folder)
    every, first, last = options.steps, options.steps + 1, (1 + BLOCKS) * options.steps
    size = [f"rollout.prompts_per_step={prompts * ranks}", f"engine.max_running={8 * prompts}", *options.settings]
    overrides = work.settings(size, seed, last + 2, folder / "run")
    cfg = work.loaded(overrides)
    command = [*work.launcher(sys.executable, ranks), "-m", "tests.bench.stub_side", *overrides]
    env = {**work.environment(ranks), "OMP_NUM_THREADS": "1", EVERY: str(every)}
    with Contestant.start("stubs", command, env, ranks, folder) as job:
        job.wait()
        for _ in range(2):  # step 0, which only evaluates, and the stretch that is not timed
            job.step()
        blocks = [job.step() for _ in range(BLOCKS)]
    lines = [line for line in read_lines(folder / "run" / "metrics.jsonl") if first <= line["step"] <= last]
    num_samples = every * work.num_samples(cfg)
    return {
        "ranks": ranks,
        "prompts": prompts,
        "seed": seed,
        "samples": num_samples // every,
        "us_per_sample": [1e6 * block.rank_cpu_seconds / num_samples for block in blocks],
        "us_per_sample_sidecar": [1e6 * (b.cpu_seconds - b.rank_cpu_seconds) / num_samples for b in blocks],
        "ms_per_step": [1e3 * block.seconds / every for block in blocks],
        "counts": {c: sum(line[f"system/{c}"] for line in lines) / num_samples / BLOCKS for c in COUNTS},
        "phases_ms": {p: 1e3 * statistics.fmean(line.get(f"time/{p}", 0.0) for line in lines) for p in PHASES},
    }


def main() -> None:
    parser = work.parser(__doc__, steps=40)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--prompts", type=int, nargs="+", default=[8, 32], help="a step, for each rank")
    options = parser.parse_args()
    cases: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for prompts in options.prompts:
        for ranks in options.ranks:
            cases[ranks, prompts] = [measure(options, ranks, prompts, seed) for seed in options.seed]
            show.record(
                options.json, {"benchmark": "coordination", "runs": [r for runs in cases.values() for r in runs]}
            )
    costs, counts, drawn = [], [], []
    for (ranks, _), runs in cases.items():
        cpu, sidecar, wall = (
            statistics.fmean(value for run in runs for value in run[key])
            for key in ("us_per_sample", "us_per_sample_sidecar", "ms_per_step")
        )
        samples = runs[0]["samples"]
        head = [str(ranks), str(samples)]
        phases = (statistics.fmean(run["phases_ms"][phase] for run in runs) for phase in PHASES)
        costs.append([*head, f"{cpu:.0f}", f"{cpu / TARGET:.2f}", f"{sidecar:.0f}", f"{wall:.1f}"])
        costs[-1] += [f"{ms:.1f}" for ms in phases]
        counts.append([*head, *(f"{statistics.fmean(run['counts'][count] for run in runs):.2f}" for count in COUNTS)])
        drawn.append(show.Bar(f"{ranks} rank(s), {samples} samples", [("ranks", cpu), ("sidecar", sidecar)]))
    columns = ["ranks", "samples", "CPU us/sample", f"of {TARGET:.0f}", "sidecar's", "ms a step", *PHASES]
    show.table("Coordination: CPU per sample; wall per step and by phase, in ms", columns, costs)
    show.table("Counts per sample, over all ranks", ["ranks", "samples", *COUNTS.values()], counts)
    title = "What coordination costs, model compute stubbed out"
    show.bars(options.svg, title, "CPU us a sample", drawn, mark=(TARGET, f"{TARGET:.0f} us"))


if __name__ == "__main__":
    sys.exit(main())
