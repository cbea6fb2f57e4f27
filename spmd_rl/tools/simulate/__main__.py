"""Simulates what each policy of the scheduler is worth for your lengths of answers: steps an hour, idle time, bias.

    python -m spmd_rl simulate
    python -m spmd_rl simulate --replicas 8 64 512 4096
    python -m spmd_rl simulate --lengths runs/rlvr/NAME/samples/step-000010.jsonl --replicas 64

Rounds, coordinators and claims are the scheduler's own code; engines, verdicts and the store are
models on a virtual clock (`simulate/`). The defaults take seconds, 4096 replicas a few minutes.
"""

import argparse
import gc
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from spmd_rl.errors import UserError
from spmd_rl.tools.simulate import POLICIES, Result, Scene, options, play


def parser() -> argparse.ArgumentParser:
    """The options; see `options.work` for what the defaults stand for."""
    made = options.work("python -m spmd_rl simulate", __doc__.split("\n")[0])
    made.add_argument(
        "--policies", nargs="+", choices=POLICIES, default=list(POLICIES), metavar="NAME", help=", ".join(POLICIES)
    )
    return made


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
    chosen = options.check(parser().parse_args(arguments))
    gc.set_threshold(300_000)  # thousands of small objects that live for a step
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 132)
    scenes = [options.scene(chosen, replicas) for replicas in chosen.replicas]
    console.print(assumptions(scenes[0]), soft_wrap=True)
    results: list[Result] = []
    for setting in scenes:
        found = [play(policy, setting, chosen.steps) for policy in chosen.policies]
        console.print(table(found, setting.lengths.mean()))
        results += found
    return results


if __name__ == "__main__":
    try:
        main()
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
