"""What coordination costs per sample where no neighbour can be felt: instructions and cache misses, counted.

    python -m bench.instructions --prompts 8 32 --steps 10 --json i.json

The same stubs as `coordination.py` on one rank, under valgrind's callgrind (which must be installed), with the first
cache level of today's processors and a second of 1 MiB; what misses that one goes to a cache shared with whoever else
is on the machine, or to memory. CPU time there depends on the hour; these counts repeat within two per cent. What a
step costs whatever it holds, and what a sample adds, follow from two sizes of step. Left out: the sidecar.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench import show, work
from bench.gate import Contestant
from bench.our_side import EVERY

LEVEL_2 = f"{1 << 20},16,64"
"""Bytes, ways, bytes a line."""
START_SECONDS = 1200
COUNTS = {
    "instructions": ("Ir",),
    "first-level misses": ("I1mr", "D1mr", "D1mw"),
    "second-level misses": ("ILmr", "DLmr", "DLmw"),
}
"""As callgrind counts them."""


def measure(options: Any, prompts: int, seed: int) -> dict[str, float]:
    """Counts of one step of `prompts` tickets, by name."""
    folder = options.dir / f"instructions-{prompts}-{seed}"
    work.fresh(folder)
    size = [f"rollout.prompts_per_step={prompts}", f"engine.max_running={8 * prompts}", *options.settings]
    overrides = work.settings(size, seed, 2 * options.steps + 2, folder / "run")
    out = folder / "callgrind.out"
    valgrind = ["valgrind", "--tool=callgrind", "--cache-sim=yes", f"--LL={LEVEL_2}", "--instr-atstart=no"]
    command = [*valgrind, f"--callgrind-out-file={out}", sys.executable, "-m", "bench.stub_side", *overrides]
    env = {**work.environment(1), "OMP_NUM_THREADS": "1", EVERY: str(options.steps)}
    with Contestant.start("stubs", command, env, 1, folder) as job:
        job.wait(START_SECONDS)
        for _ in range(2):  # step 0, which only evaluates, and the stretch that is not counted
            job.step()
        _tell("-i", "on", job.pid)
        job.step()
        _tell("-i", "off", job.pid)
        _tell("-d", "", job.pid)
    counted = _totals(Path(f"{out}.1"))
    return {name: sum(counted[event] for event in events) / options.steps for name, events in COUNTS.items()}


def _tell(option: str, value: str, pid: int) -> None:
    """To callgrind, of the process that stands at the gate."""
    order = ["callgrind_control", option, *([value] if value else []), str(pid)]
    subprocess.run(order, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _totals(path: Path) -> dict[str, int]:
    lines = dict(line.split(": ", 1) for line in path.read_text().splitlines() if line.startswith(("events", "totals")))
    return dict(zip(lines["events"].split(), map(int, lines["totals"].split()), strict=True))


def main() -> None:
    parser = work.parser(__doc__, steps=10)
    parser.add_argument("--prompts", type=int, nargs="+", default=[8, 32], help="a step")
    options = parser.parse_args()
    if shutil.which("valgrind") is None:
        parser.error("valgrind is not installed")
    runs = [
        {"samples": 8 * prompts, **measure(options, prompts, seed)}
        for prompts in options.prompts
        for seed in options.seed
    ]
    show.record(options.json, {"benchmark": "instructions", "runs": runs})
    rows = [[f"a sample of {run['samples']}", *_shown(run, run["samples"])] for run in runs]
    few, many = min(runs, key=lambda run: run["samples"]), max(runs, key=lambda run: run["samples"])
    if more := many["samples"] - few["samples"]:
        added = {name: (many[name] - few[name]) / more for name in COUNTS}
        step = {name: few[name] - few["samples"] * added[name] for name in COUNTS}
        rows += [["one sample more", *_shown(added, 1)], ["a step without samples", *_shown(step, 1)]]
    show.table("Coordination on one rank, counted", ["", *COUNTS], rows)


def _shown(counts: dict[str, float], samples: int) -> list[str]:
    return [f"{counts[name] / samples:,.0f}" for name in COUNTS]


if __name__ == "__main__":
    sys.exit(main())
