"""Thousands of steps of the real door on a model of a million parameters: does any process grow?

    python -m bench.soak --steps 2000 --ranks 1 --seed 0 --json soak.json --svg soak.svg [key=value ...]

2 prompts x 4 answers of at most 8 tokens, no evaluation, one checkpoint at the end: many small steps, so that what a
step leaves behind shows. Resident memory of every process of the job, each 20 steps. "No growth": over the last three
quarters of the run, the straight line of least squares rises by less than 1 KiB a step in each process.
"""

import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from bench import show, work
from tests.e2e.runs import Running, Toy

MODEL = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 32}
"""1.05 million parameters."""
SMALL = (
    "rollout.prompts_per_step=2",
    "rollout.answers_per_prompt=4",
    "rollout.max_new_tokens=8",
    "checkpoint.export_hf=false",
)
EVERY = 20
LIMIT = 1024.0
"""bytes a step"""

Curve = list[tuple[float, float]]
"""(step, resident bytes)"""


def watch(run: Running, steps: int) -> dict[str, Curve]:
    """Resident memory by process over the steps of a run; the last one, which saves, is left out."""
    curves: dict[tuple[str, int], Curve] = defaultdict(list)
    due = EVERY
    for step in finished_steps(run):
        if due <= step < steps:
            for process in run.processes():
                try:
                    if name := role(process):
                        curves[name, process.pid].append((step, float(process.memory_info().rss)))
                except psutil.NoSuchProcess:
                    continue
            due = step - step % EVERY + EVERY
    names = [name for name, _ in curves]
    return {
        name if names.count(name) == 1 else f"{name} {pid}": curve
        for (name, pid), curve in curves.items()
        if len(curve) > 3  # else it was replaced, or came at the very end
    }


def finished_steps(run: Running) -> Iterator[int]:
    """The number of the last finished step, again and again, until the job has ended."""
    step, read = -1, 0  # step 0 has a line too
    path = run.run_dir / "metrics.jsonl"
    while run.process.poll() is None:
        if path.exists():
            with open(path, "rb") as lines:
                lines.seek(read)
                new = lines.read()
            read, step = read + len(new), step + new.count(b"\n")
        yield step
        time.sleep(0.01)


def role(process: psutil.Process) -> str | None:
    """`rank N`, `sidecar host`, `sidecar fork server` or `sidecar worker`; None for what starts or is about to go."""
    words = process.cmdline()
    if "spmd_rl.rlvr" in words and "torch.distributed.run" not in words:
        return f"rank {process.environ().get('RANK', '0')}"
    if "spmd_rl.sidecar.forkserver" in words:
        parent = process.parent()
        forked = parent is not None and "spmd_rl.sidecar.forkserver" in parent.cmdline()
        return "sidecar worker" if forked else "sidecar fork server"
    return "sidecar host" if "spmd_rl.sidecar" in words else None


def slope(curve: Curve) -> float:
    """Bytes a step over the last three quarters, by least squares."""
    late = curve[len(curve) // 4 :]
    return statistics.linear_regression(*zip(*late, strict=True)).slope


def quarter(curve: Curve, number: int) -> float:
    """Mean of one of its four quarters, in bytes."""
    bounds = [len(curve) * i // 4 for i in range(5)]
    return statistics.fmean(rss for _, rss in curve[bounds[number] : bounds[number + 1]])


def settings(steps: int, seed: int, overrides: Sequence[str]) -> list[str]:
    """Of the run; the user's come last and win."""
    return [*work.SAME, *SMALL, f"steps={steps}", f"seed={seed}", *overrides]


def main() -> None:
    parser = work.parser(__doc__, steps=2000)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    curves: dict[str, Curve] = {}
    for seed in options.seed:
        folder = Path(tempfile.mkdtemp(prefix="soak-"))
        began = time.perf_counter()
        run = Toy(folder, **MODEL).start(
            *settings(options.steps, seed, options.settings),
            ranks=0 if options.ranks == 1 else options.ranks,
            torchrun=True,
        )
        found = watch(run, options.steps)
        if run.wait() != 0:
            sys.exit(run.text()[-3000:])
        seconds = time.perf_counter() - began
        several = f", seed {seed}" if len(options.seed) > 1 else ""
        curves |= {f"{name}{several}": curve for name, curve in sorted(found.items())}
        figures = {"benchmark": "soak", "steps": options.steps, "ranks": options.ranks, "seconds": seconds}
        show.record(options.json, figures | {"resident_bytes": curves})
        print(f"{options.steps} steps in {seconds:.0f} s; run directory: {run.run_dir}")
    rows = [
        [name, *(f"{quarter(curve, i) / 2**20:.1f}" for i in (0, 3)), f"{slope(curve):+.0f}"]
        for name, curve in curves.items()
    ]
    title = f"Resident memory over {options.steps} steps, {options.ranks} rank(s)"
    show.table(title, ("process", "first quarter, MiB", "last quarter, MiB", "slope, bytes a step"), rows)
    growing = [name for name, curve in curves.items() if slope(curve) >= LIMIT]
    print(f"growth: {', '.join(growing)}" if growing else "no growth")
    drawn = [
        show.Series(name, show.COLORS[i % len(show.COLORS)], [(step, rss / 2**20) for step, rss in curve])
        for i, (name, curve) in enumerate(curves.items())
    ]
    show.lines(options.svg, title, "step", "MiB", drawn)


if __name__ == "__main__":
    main()
