"""(e) What a publish costs beside a plain copy of the same bytes, interleaved; medians of the slowest rank.

    python -m bench.publish --ranks 1 2 --engine native --steps 9 --json e.json --svg e.svg

`clone` allocates and copies (what a naive hand-over does), `copy` writes into memory that is there already. Each round
times both and then a publish, by its own clock: `gather` (the trainer's shards made whole, in the engine's dtype),
`load` (the engine's loader), `hashes` (of what was handed over and of what the engine holds), `probe` (a few tokens,
generated and judged). CPU-seconds are of the whole rank.
"""

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench import show, work
from spmd_rl import engine, train, weights
from spmd_rl.distributed import World
from tests.dist.harness import run_ranks

PARTS = {"gather": "gather_seconds", "load": "copy_seconds", "hashes": "hash_seconds", "probe": "probe_seconds"}


def rounds(world: World, overrides: Sequence[str], steps: int) -> dict[str, Any]:
    """[all] Seconds of each round, of the slowest rank; publish's CPU-seconds, of the mean rank."""
    cfg = work.loaded(overrides)
    policy = train.build_roles(cfg.roles, world).policy
    generator = engine.build(cfg.engine, cfg.policy, cfg.train.offload, world)
    publish = weights.build(policy, generator, world)
    publish(version=0)
    source = [tensor.clone() for _, tensor in policy.weights()]
    target = [tensor.clone() for tensor in source]
    seconds: dict[str, list[float]] = defaultdict(list)
    for version in range(1, steps + 1):
        own = {
            "clone": timed(lambda: [tensor.clone() for tensor in source]),
            "copy": timed(lambda: torch._foreach_copy_(target, source)),
        }
        began = time.process_time()
        told = publish(version=version)
        cpu = world.reduce("bench: cpu", {"publish: CPU": time.process_time() - began}, "mean")
        own = world.reduce("bench: copies", own, "max") | {name: told[f"publish/{key}"] for name, key in PARTS.items()}
        for name, value in (own | {"publish": told["publish/seconds"]} | cpu).items():
            seconds[name].append(value)
    generator.close()
    return {"bytes": told["publish/bytes"], "seconds": seconds}


def timed(work: Callable[[], object]) -> float:
    """Seconds it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def lines(run: dict[str, Any]) -> dict[str, float]:
    """Milliseconds by name, medians over the rounds; the sums are of each round's own parts."""
    seconds = run["seconds"]
    sums = {
        "gather + load": ("gather", "load"),
        "gather + load + hashes": ("gather", "load", "hashes"),
    }
    named = dict(seconds) | {
        name: [sum(parts) for parts in zip(*(seconds[part] for part in own), strict=True)] for name, own in sums.items()
    }
    order = ("clone", "copy", *PARTS, *sums, "publish", "publish: CPU")
    return {name: 1e3 * statistics.median(named[name]) for name in order}


def main() -> None:
    parser = work.parser(__doc__, steps=9)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--engine", default="native")
    options = parser.parse_args()
    runs = []
    for seed in options.seed:
        for ranks in options.ranks:
            folder = options.dir / f"publish-{ranks}-{seed}"
            chosen = [f"engine={options.engine}", "train.offload=false", *options.settings]
            overrides = work.settings(chosen, seed, 1, folder)
            env = work.environment(ranks)
            (run, *_) = run_ranks(ranks, rounds, overrides, options.steps, timeout=600, env=env)
            runs.append({"ranks": ranks, "seed": seed, "engine": options.engine, **run})
            show.record(options.json, {"benchmark": "publish", "runs": runs})
    drawn = []
    for run in runs:
        ms = lines(run)
        title = f"Publishing {run['bytes'] / 1e6:.0f} MB to {run['engine']}, {run['ranks']} rank(s)"
        rows = [[n, f"{v:.1f}", f"{v / ms['clone']:.2f}", f"{v / ms['copy']:.2f}"] for n, v in ms.items()]
        show.table(title, ("", "ms", "clones", "copies"), rows)
        drawn.append(show.Bar(f"clone, {run['ranks']} rank(s)", [("clone", ms["clone"])]))
        drawn.append(show.Bar(f"copy into place, {run['ranks']} rank(s)", [("copy", ms["copy"])]))
        parts = [(name, ms[name]) for name in ("gather", "load", "hashes")]
        note = f"({ms['gather + load + hashes'] / ms['clone']:.2f} clones)"
        drawn.append(show.Bar(f"publish to {run['engine']}, {run['ranks']} rank(s)", parts, note))
    show.bars(options.svg, "Publish beside a plain copy of the same bytes", "ms", drawn)


if __name__ == "__main__":
    from bench import publish  # ranks find `rounds` by the name of its module

    sys.exit(publish.main())
