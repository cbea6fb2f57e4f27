"""What split placement is worth: steps an hour, idle shares and lags against colocated runs on as many ranks.

    python -m bench.virtual.placement
    python -m bench.virtual.placement --replicas 512 4096 --train-seconds 30 --picture docs/placement.svg

The rules are the run's own (`split.pace`, rounds, coordinators, claims); engines, updates and the transport of weights
are models on virtual clocks. The defaults take seconds, 4096 replicas some ten minutes.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.virtual import placement_picture
from bench.virtual.comparison import SYNCHRONOUS, Comparison, Outcome
from bench.virtual.simulate import __main__ as simulate
from bench.virtual.two_sides import Costs
from spmd_rl.base.errors import UserError
from spmd_rl.config.values import require


def parser() -> argparse.ArgumentParser:
    """The options; see `simulate.work` for what the defaults stand for."""
    made = simulate.work("python -m bench.virtual.placement", __doc__.split("\n")[0])
    add, costs = made.add_argument, Costs()
    names = ", ".join(SYNCHRONOUS)
    add("--policies", nargs="+", choices=SYNCHRONOUS, default=["store", "defer"], metavar="NAME", help=names)
    modes = ["carried", "lent"]
    add("--modes", nargs="*", choices=modes, default=modes, metavar="NAME", help="more placements: " + ", ".join(modes))
    add("--staleness", type=int, nargs="+", default=[0, 1, 2, 4], metavar="S", help="placement.max_staleness")
    shares = [1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 15 / 16]
    add("--train-shares", type=float, nargs="+", default=shares, metavar="X", help="of ranks; the best is shown")
    add("--stage-seconds", type=float, default=5.0, help="from an update's end until its weights can be fetched")
    add("--fetch-seconds", type=float, default=10.0, help="in which an engine takes new weights")
    add("--probe-every", type=int, default=costs.probe_every, help="publish.probe_every")
    add("--slow-share", type=float, default=costs.slow_share, help="share of the publishes that are slow")
    add("--slow-factor", type=float, default=costs.slow_factor, help="how many times as long these take")
    add("--failure-hours", type=float, default=inf, help="between two losses of a rank, of all ranks, on average")
    add(
        "--restart-seconds", type=float, default=costs.restart_seconds, help="from a loss until the job has begun again"
    )
    add("--picture", type=Path, metavar="PATH", help="write an SVG")
    add("--checkpoint-every", type=int, default=costs.checkpoint_every, help="steps")
    return made


def check(chosen: argparse.Namespace) -> argparse.Namespace:
    """Return the options, if they can be simulated; UserError names the first that cannot."""
    o = chosen
    require(min(o.replicas) > 1, "--replicas: split needs two ranks at least")
    require(min(o.staleness) >= 0, "--staleness: must not be negative")
    require(all(0 < x < 1 for x in o.train_shares), "--train-shares: must lie between 0 and 1")
    require(0 <= o.slow_share <= 1, f"--slow-share: must lie between 0 and 1, not {o.slow_share:g}")
    for name in ("failure_hours", "slow_factor", "checkpoint_every"):
        require(getattr(o, name) > 0, f"--{name.replace('_', '-')}: must be positive, not {getattr(o, name):g}")
    for name in ("stage_seconds", "fetch_seconds", "probe_every", "restart_seconds"):
        require(getattr(o, name) >= 0, f"--{name.replace('_', '-')}: must not be negative, not {getattr(o, name):g}")
    return o


def costs(chosen: argparse.Namespace) -> Costs:
    """Return what everything but generation takes."""
    return Costs(
        train=chosen.train_seconds,
        stage=chosen.stage_seconds,
        fetch=chosen.fetch_seconds,
        probe_every=chosen.probe_every,
        slow_share=chosen.slow_share,
        slow_factor=chosen.slow_factor,
        failure_seconds=3600 * chosen.failure_hours,
        restart_seconds=chosen.restart_seconds,
        checkpoint_every=chosen.checkpoint_every,
        seed=chosen.seed,
    )


def assumptions(chosen: argparse.Namespace) -> str:
    """What the figures rest on, and what the columns mean."""
    o = chosen
    return "\n".join(
        [
            f"{o.prompts} prompts x {o.answers} answers per rank and step, one replica a rank; {o.train_seconds:g} s "
            "of training on all ranks, on fewer in proportion.",
            f"Split: {o.stage_seconds:g} s to stage a version, in which training waits, {o.fetch_seconds:g} s to fetch "
            f"one, in which an engine waits; probed every {o.probe_every} versions. Colocated: nothing.",
            "",
            f"{'speed':9} steps an hour over those of the first row; train: share of the ranks that train, the best "
            "of those tried",
            f"{'idle':9} share of the time in which a side computes neither tokens nor updates",
            f"{'lags':9} versions between the policy that generated and the one that was trained: share of the steps",
        ]
    )


def outcomes(chosen: argparse.Namespace, replicas: int) -> list[Outcome]:
    """Return all runs at one number of replicas; the first is what the others are measured by."""
    scene, all_costs = simulate.scene(chosen, replicas), costs(chosen)
    found = []
    for policy in chosen.policies:
        comparison = Comparison(scene, policy, chosen.steps)
        found.append(comparison.colocated(all_costs))
        found += [comparison.best_split(all_costs, chosen.train_shares, s) for s in chosen.staleness]
    if chosen.modes:
        comparison = Comparison(scene, "store", chosen.steps)
        for lends in (mode == "lent" for mode in chosen.modes):
            ahead = [s for s in chosen.staleness if s > 0]
            found += [comparison.best_carried(all_costs, chosen.train_shares, s, lends) for s in ahead]
    return found


def table(found: Sequence[Outcome]) -> Table:
    """Return the runs at one number of replicas, a row each."""
    first = found[0]
    shown = Table(title=f"{first.replicas} ranks", title_justify="left")
    for name in ("policy", "placement", "train"):
        shown.add_column(name, no_wrap=True)
    for name in ("steps/h", "speed", "train idle", "generate idle", "lags", "starts", "ETTR"):
        shown.add_column(name, justify="right", no_wrap=True)
    for o in found:
        shown.add_row(
            o.policy,
            o.name,
            f"{o.num_train / o.replicas:.0%}",
            f"{o.steps_per_hour:.1f}",
            f"{o.steps_per_hour / first.steps_per_hour:.2f}x",
            f"{o.train_idle:.0%}",
            f"{o.generate_idle:.0%}",
            ", ".join(f"{lag}: {share:.0%}" for lag, share in o.lags.items()),
            str(o.lives),
            f"{o.goodput:.3f}",
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> list[Outcome]:
    """Run it as said on the command line; all runs, in order."""
    chosen = check(parser().parse_args(arguments))
    gc.set_threshold(300_000)  # thousands of small objects that live for a step
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(assumptions(chosen), soft_wrap=True)
    found: list[Outcome] = []
    for replicas in chosen.replicas:
        found += (here := outcomes(chosen, replicas))
        console.print(table(here))
    if chosen.picture:
        scene, law = simulate.scene(chosen, chosen.replicas[0]), (chosen.median, chosen.sigma)
        of = (chosen.train_shares, chosen.policies, chosen.steps, chosen.modes)
        placement_picture.draw(chosen.picture, scene, law, costs(chosen), *of)
        console.print(f"picture: {chosen.picture}")
    return found


if __name__ == "__main__":
    try:
        main()
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
