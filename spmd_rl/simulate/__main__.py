"""What a policy of the scheduler is worth: steps an hour, idle time, bias, staleness and store operations.

    python -m spmd_rl.simulate
    python -m spmd_rl.simulate --replicas 8 64 512 4096 --picture docs/tail.svg
    python -m spmd_rl.simulate --lengths runs/rlvr/NAME/samples/step-000010.jsonl --replicas 64

Rounds, coordinators and claims are the scheduler's own code; engines, verdicts and the store are
models on a virtual clock (`simulate/`). The defaults take seconds, 4096 replicas a few minutes.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from spmd_rl.config.schema import RolloutConfig
from spmd_rl.config.values import require
from spmd_rl.errors import UserError
from spmd_rl.simulate import POLICIES, Lengths, Result, Scene, Speed, long_tail, play, recorded
from spmd_rl.simulate.picture import draw


def parser() -> argparse.ArgumentParser:
    """Defaults: 7B parameters, one GPU a replica; the longest answer is 20 times the median (arXiv 2509.21009)."""
    made = argparse.ArgumentParser("python -m spmd_rl.simulate", description=__doc__.split("\n")[0])
    made.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add, speed = made.add_argument, Speed()
    add("--replicas", type=int, nargs="+", default=[8, 64], metavar="N", help="engines that share a store")
    add("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), metavar="NAME", help=", ".join(POLICIES))
    add("--steps", type=int, default=10, help="at least; defer goes on to its next long round")
    add("--prompts", type=int, default=2, help="per replica and step")
    add("--answers", type=int, default=8, help="per prompt")
    add("--extra", type=float, default=0.25, help="share of prompts started beyond those, except by static and store")
    add("--lengths", type=Path, metavar="PATH", help="take them from a file: a number a line, or samples of a run")
    add("--median", type=float, default=819.0, help="tokens of an answer")
    add("--sigma", type=float, default=1.0, help="of their logarithm, which is normal")
    add("--max-new-tokens", type=int, default=16384, help="longer answers are cut off")
    add("--correlation", type=float, default=0.5, help="of the answers to one prompt (of the normal deviates)")
    add("--max-running", type=int, default=64, help="requests that an engine runs at once")
    add("--step-seconds", type=float, default=speed.base, help="of an engine step")
    add("--request-seconds", type=float, default=speed.per_request, help="more for each request that runs")
    add("--verdict-seconds", type=float, default=0.5, help="from an answer's end to its verdict")
    add("--train-seconds", type=float, default=60.0, help="of a step; nobody generates meanwhile")
    add("--qualify", type=float, default=1.0, help="share of the groups that train")
    add("--seed", type=int, default=0, help="of the lengths")
    add("--picture", type=Path, metavar="PATH", help="write an SVG")
    return made


def check(options: argparse.Namespace) -> argparse.Namespace:
    """The options, if they can be simulated; UserError names the first that cannot."""
    o = options
    for name in ("correlation", "qualify"):
        require(0 <= getattr(o, name) <= 1, f"--{name}: must lie between 0 and 1, not {getattr(o, name):g}")
    require(o.qualify > 0, "--qualify: no group trains")
    for name in ("steps", "prompts", "answers", "median", "max_new_tokens", "max_running", "step_seconds"):
        require(getattr(o, name) > 0, f"--{name.replace('_', '-')}: must be positive, not {getattr(o, name):g}")
    for name in ("extra", "sigma", "request_seconds", "verdict_seconds", "train_seconds"):
        require(getattr(o, name) >= 0, f"--{name.replace('_', '-')}: must not be negative, not {getattr(o, name):g}")
    require(min(o.replicas) > 0, "--replicas: must be positive")
    return options


def scene(options: argparse.Namespace, replicas: int) -> Scene:
    """What is simulated at so many replicas. UserError for a file that holds no lengths."""
    o = options
    law = recorded(o.lengths) if o.lengths else long_tail(o.median, o.sigma, o.max_new_tokens)
    prompts = o.prompts * replicas
    settings = RolloutConfig(
        prompts_per_step=prompts,
        answers_per_prompt=o.answers,
        over_sample=round(o.extra * prompts),
        max_new_tokens=o.max_new_tokens,
        min_answers=1,
    )
    return Scene(
        settings=settings,
        lengths=Lengths(law, o.seed, o.correlation),
        replicas=replicas,
        speed=Speed(o.step_seconds, o.request_seconds),
        max_running=o.max_running,
        verdict_seconds=o.verdict_seconds,
        train_seconds=o.train_seconds,
        qualify=o.qualify,
        seed=o.seed,
    )


def assumptions(scene: Scene) -> str:
    """What the figures rest on, and what the columns mean."""
    s, speed = scene.settings, scene.speed
    ms, more = 1e3 * speed.base, 1e3 * speed.per_request
    return "\n".join(
        [
            f"{s.prompts_per_step // scene.replicas} prompts x {s.answers_per_prompt} answers per replica and step for "
            f"every policy; those that over-sample start {s.over_sample / s.prompts_per_step:.0%} more prompts.",
            f"Engines run up to {scene.max_running} requests at {ms:g} + {more:g} x running ms a token; no prefill, no "
            "preemption, and all are equally fast.",
            f"Verdicts take {scene.verdict_seconds:g} s, training {scene.train_seconds:g} s a step; publishing weights "
            "and meetings take nothing.",
            f"Answers have {scene.lengths.mean():.0f} tokens on average; an answer's length does not change from step "
            f"to step. {scene.qualify:.0%} of the groups qualify.",
            "The store answers at once: no race is lost in it.",
            "",
            f"{'s/step':9} of generation and scoring; generate: against the first policy; step: the same with training",
            f"{'mean':9} tokens of the answers trained on, over the law's; waiting: prompts started and not used yet",
            f"{'stale':9} answers trained on that an older policy began; wasted: tokens computed and not used so far",
            f"{'store':9} operations per answer used; looks: whether the step has ended or more may start, the same",
        ]
    )


def table(results: Sequence[Result], mean_tokens: float) -> Table:
    """All policies at one number of replicas; the first is what the others are measured by."""
    first = results[0]
    shown = Table(title=f"{first.replicas} replicas", title_justify="left")
    shown.add_column("policy", no_wrap=True)
    for name in (
        "s/step",
        "steps/h",
        "generate",
        "step",
        "bubble",
        "mean",
        "waiting",
        "stale",
        "wasted",
        "store",
        "looks",
    ):
        shown.add_column(name, justify="right", no_wrap=True)
    for r in results:
        shown.add_row(
            r.policy,
            f"{r.generate_seconds:.1f}",
            f"{r.steps_per_hour:.1f}",
            f"{first.generate_seconds / r.generate_seconds:.2f}x",
            f"{r.steps_per_hour / first.steps_per_hour:.2f}x",
            f"{r.bubble:.0%}",
            f"{r.mean_tokens / mean_tokens:.3f}",
            str(r.waiting),
            f"{r.stale:.0%}",
            f"{r.wasted:.0%}",
            f"{r.operations:.2f}",
            f"{r.looks:.0f}",
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Run it as said on the command line; all results, in order."""
    options = check(parser().parse_args(arguments))
    gc.set_threshold(300_000)  # thousands of small objects that live for a step
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 132)
    scenes = [scene(options, replicas) for replicas in options.replicas]
    console.print(assumptions(scenes[0]), soft_wrap=True)
    results: list[Result] = []
    for setting in scenes:
        found = [play(policy, setting, options.steps) for policy in options.policies]
        console.print(table(found, setting.lengths.mean()))
        results += found
    if options.picture:
        options.picture.write_text(draw(results))
        console.print(f"picture: {options.picture}")
    return results


if __name__ == "__main__":
    try:
        main()
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
