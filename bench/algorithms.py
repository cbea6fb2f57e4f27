"""Eight recipes on the demo's task from the same start: held-out and training score, step by step.

    python -m bench.algorithms --ranks 2 --steps 8 --seed 0 --json a.json --svg docs/algorithms.svg

Each recipe is a run of the demo (`python -m spmd_rl.rlvr algorithm=...`) one after the other: same model, prompts,
noise, learning rate and number of updates. Two updates a step, for with one on fresh samples the ratio is 1 and grpo
and cispo, or rloo and topr, are the same gradient up to a factor. Left out: tuning; a recipe that learns slower here
may learn faster elsewhere.
"""

import subprocess
import sys
from typing import Any

from bench import show, work
from spmd_rl.track.metrics import read_lines

COMMON = ("+experiment=demo", "train.updates_per_step=2", "eval.every=1", "checkpoint.every=0")
"""Of all recipes; the only checkpoint is the one at the end."""
RECIPES: dict[str, tuple[str, ...]] = {
    # The value head starts at 0, so the first advantages are whitened returns, and no step goes into a warm-up. The
    # critic has farther to go than the policy, from 0 to the mean score, and a mistake of it costs less.
    "ppo": ("critic.lr=5e-5",),
    "grpo": (),
    "rloo": (),
    "reinforce_pp": (),
    # The published band, 3e-4, is for learning rates of 1e-6. At the demo's, thirty times as high, an update leaves it.
    "gspo": ("algorithm.clip_low=0.01", "algorithm.clip_high=0.01"),
    "cispo": (),
    "topr": (),
    "raft_pp": (),
}
"""What each says beside `algorithm=<name>`. AdamW takes out the size of a loss, so sums over tokens (rloo, topr) and
means share a learning rate. The task's scores are 0 and 1, as topr and raft_pp want them."""
SCORES = {"held-out": "val/score/mean", "training": "critic/score/mean"}


def curves(options: Any, recipe: str, seed: int) -> dict[str, Any]:
    """Run one recipe; the points (step, score) of each of `SCORES`, and seconds of all steps."""
    folder = options.dir.resolve() / f"algorithms-{recipe}-{seed}"
    work.fresh(folder)
    chosen = [f"algorithm={recipe}", *COMMON, f"seed={seed}", f"steps={options.steps}", f"run.dir={folder / 'run'}"]
    door = [*work.launcher(sys.executable, options.ranks), "-m", "spmd_rl.rlvr"]
    log = folder / "log"
    with open(log, "wb") as out:
        command = [*door, *chosen, *RECIPES[recipe], *options.settings]
        environment = work.environment(options.ranks)
        code = subprocess.run(command, env=environment, cwd=work.ROOT, stdout=out, stderr=out).returncode
    if code:
        raise SystemExit(f"{recipe} ended with exit code {code}, see {log}")
    lines = list(read_lines(folder / "run" / "metrics.jsonl"))
    points = {name: [[line["step"], line[key]] for line in lines if key in line] for name, key in SCORES.items()}
    return {"recipe": recipe, "seed": seed, **points, "seconds": sum(line["time/total"] for line in lines)}


def panel(runs: list[dict[str, Any]], color: str) -> list[show.Series]:
    """The lines of one recipe, a pair per seed."""
    colors = {"training": show.COLORS[2], "held-out": color}
    return [show.Series(name, colors[name], [tuple(point) for point in run[name]]) for name in colors for run in runs]


def main() -> None:
    parser = work.parser(__doc__, steps=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    options = parser.parse_args()
    runs = []
    for recipe in options.recipes:
        for seed in options.seed:
            runs.append(curves(options, recipe, seed))
            show.record(options.json, {"benchmark": "algorithms", "runs": runs})
            print(f"{recipe} seed {seed}:", *(f"{score:.2f}" for _, score in runs[-1]["held-out"]), flush=True)
    steps = [str(step) for step, _ in runs[0]["held-out"]]
    rows = []
    for run in runs:
        scores = [f"{score:.2f}" for _, score in (*run["held-out"], *run["training"][-1:])]
        rows.append([run["recipe"], str(run["seed"]), *scores, f"{run['seconds'] / options.steps:.1f}"])
    show.table("Held-out score by step", ["recipe", "seed", *steps, "training, last", "s a step"], rows)
    drawn = {name: panel([run for run in runs if run["recipe"] == name], show.COLORS[0]) for name in options.recipes}
    show.panels(options.svg, "Recipes from the same start", "mean score", drawn)


if __name__ == "__main__":
    sys.exit(main())
