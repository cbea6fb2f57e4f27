"""(c) Our step against a bare loop: the same decodes, forwards, backwards and updates without any framework.

    python -m bench.bare --engine native --steps 6 --seed 0 --json c.json --svg c.svg

Our door and `bare_side.py` compute in turn: our side a step, then the bare loop the very same tokens. World size 1,
same kernels of the model, same threads. The bare loop holds one copy of the weights in the compute dtype that it both
decodes and trains with, so it publishes nothing; it knows no rewards, no log, no second process. What our step costs
beyond it is the price of all that. Start and the first step of both are left out.
"""

import statistics
import sys
from typing import Any

from bench import show, work
from bench.gate import Timed

PHASES = ("generate", "score", "prepare", "train", "publish", "coordination", "track")


def compare(options: Any, seed: int) -> dict[str, Any]:
    """Both, step by step."""
    folder = options.dir / f"bare-{options.engine}-{seed}"
    work.fresh(folder)
    overrides = work.settings([f"engine={options.engine}", *options.settings], seed, options.steps + 2, folder / "run")
    cfg = work.loaded(overrides)
    timed: dict[str, list[Timed]] = {"ours": [], "bare": []}
    with work.ours("ours", overrides, 1, folder) as ours, work.bare("bare", cfg, folder) as bare:
        ours.wait()
        bare.wait()
        ours.step()  # step 0, which only evaluates
        for step in range(1, options.steps + 2):
            timed["ours"].append(ours.step())
            timed["bare"].append(bare.step(folder / "run" / "samples" / f"step-{step:06d}.jsonl"))
    figures: dict[str, Any] = {"seed": seed, "engine": options.engine}
    for name, (_, *steps) in timed.items():
        figures[name] = {
            "cpu_seconds": [step.cpu_seconds for step in steps],
            "seconds": [step.seconds for step in steps],
            "values": [step.values for step in steps],
        }
    return figures


def ratio(figures: dict[str, Any], key: str) -> float:
    """The bare loop's time over ours: 1 where our step costs nothing beyond it."""
    return sum(figures["bare"][key]) / sum(figures["ours"][key])


def main() -> None:
    parser = work.parser(__doc__, steps=6)
    parser.add_argument("--engine", default="native")
    options = parser.parse_args()
    runs = []
    for seed in options.seed:
        runs.append(compare(options, seed))
        show.record(options.json, {"benchmark": "bare", "runs": runs})
    rows = []
    for name in ("bare", "ours"):
        cpu, wall = ([statistics.fmean(run[name][key]) for run in runs] for key in ("cpu_seconds", "seconds"))
        rows.append([name, show.mean_and_range(cpu), show.mean_and_range(wall)])
    both = [show.mean_and_range([ratio(run, key) for run in runs]) for key in ("cpu_seconds", "seconds")]
    show.table("Our step against a bare loop", ["", "CPU-s a step", "s a step"], [*rows, ["bare / ours", *both]])
    shares = {
        phase: statistics.fmean(values.get(f"time/{phase}", 0.0) for run in runs for values in run["ours"]["values"])
        for phase in PHASES
    }
    show.table("Where our step's wall time goes", list(shares), [[f"{1e3 * s:.1f} ms" for s in shares.values()]])
    drawn = [
        show.Bar("bare loop", [("all", statistics.fmean(s for run in runs for s in run["bare"]["seconds"]))]),
        show.Bar(f"ours, {options.engine}", list(shares.items())),
    ]
    show.bars(options.svg, "Our step against a bare loop, 1 rank", "seconds a step", drawn)


if __name__ == "__main__":
    sys.exit(main())
