"""Simulates what each policy of the scheduler is worth for your lengths of answers: steps an hour, idle time, bias.

    python -m bench.virtual.simulate
    python -m bench.virtual.simulate --replicas 8 64 512 4096
    python -m bench.virtual.simulate --lengths runs/rlvr/NAME/samples/step-000010.jsonl --replicas 64

Rounds, coordinators and claims are the scheduler's own code; engines, verdicts and the store are models on a virtual
clock. The defaults take seconds, 4096 replicas a few minutes.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.virtual.simulate.engine import Speed
from bench.virtual.simulate.lengths import Lengths, long_tail, recorded
from bench.virtual.simulate.policies import POLICIES, PolicyResult, play
from bench.virtual.simulate.scene import Scene
from spmd_rl.base.command_line import Parser, at_least, program
from spmd_rl.base.errors import UserError, reason, tell
from spmd_rl.config.schema import RolloutConfig
from spmd_rl.config.values import require


def work(name: str, about: str) -> Parser:
    """Return a parser of the options that say what is simulated.

    Defaults: 7B parameters, one GPU a replica; the longest answer is 20 times the median (arXiv 2509.21009).
    """
    made = Parser(name, description=about)
    made.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add, speed, whole, real = made.add_argument, Speed(), at_least(1), at_least(0, float)
    add("--replicas", type=whole, nargs="+", default=[8, 64], metavar="N", help="engines that share a store")
    add("--steps", type=whole, default=10, help="at least; defer goes on to its next long round")
    add("--prompts", type=whole, default=2, help="per replica and step")
    add("--answers", type=whole, default=8, help="per prompt")
    add("--extra", type=real, default=0.25, help="share of prompts started beyond those, except by static and store")
    add("--lengths", type=Path, metavar="PATH", help="take them from a file: a number a line, or samples of a run")
    add("--median", type=at_least(1, float), default=819.0, help="tokens of an answer")
    add("--sigma", type=real, default=1.0, help="of their logarithm, which is normal")
    add("--max-new-tokens", type=whole, default=16384, help="longer answers are cut off")
    add("--correlation", type=real, default=0.5, help="of the answers to one prompt (of the normal deviates)")
    add("--max-running", type=whole, default=64, help="requests that an engine runs at once")
    add("--step-seconds", type=at_least(1e-6, float), default=speed.base, help="of an engine step")
    add("--request-seconds", type=real, default=speed.per_request, help="more for each request that runs")
    add("--verdict-seconds", type=real, default=0.5, help="from an answer's end to its verdict")
    add("--train-seconds", type=real, default=60.0, help="of a step; nobody generates meanwhile")
    add("--qualify", type=real, default=1.0, help="share of the groups that train")
    add("--seed", type=int, default=0, help="of the lengths")
    return made


def parser() -> Parser:
    """Return `work` with a choice of policies."""
    made, names = work(program("simulate"), __doc__.split("\n")[0]), list(POLICIES)
    made.add_argument("--policies", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    return made


def scene(options: argparse.Namespace, replicas: int) -> Scene:
    """Return what is simulated at so many replicas. UserError for shares above one, or a file that holds no lengths."""
    o = options
    require(o.correlation <= 1, f"--correlation: must lie between 0 and 1, not {o.correlation:g}")
    require(0 < o.qualify <= 1, f"--qualify: must lie between 0, at which no group trains, and 1, not {o.qualify:g}")
    law = recorded(o.lengths) if o.lengths else long_tail(o.median, o.sigma, o.max_new_tokens)
    prompts = o.prompts * replicas
    settings = RolloutConfig(
        prompts_per_step=prompts,
        answers_per_prompt=o.answers,
        over_sample=round(o.extra * prompts),
        max_new_tokens=o.max_new_tokens,
        min_answers=1,
    )
    speed, seconds = Speed(o.step_seconds, o.request_seconds), (o.verdict_seconds, o.train_seconds)
    lengths = Lengths(law, o.seed, o.correlation)
    return Scene(settings, lengths, replicas, speed, o.max_running, *seconds, o.qualify, o.seed)


ASSUMPTIONS = """\
{prompts} prompts x {answers} answers per replica and step for every policy; those that over-sample start {extra:.0%} \
more prompts.
Engines run up to {max_running} requests at {base:g} + {per_request:g} x running ms a token; no prefill, no \
preemption, and all are equally fast.
Verdicts take {verdict_seconds:g} s, training {train_seconds:g} s a step; publishing weights and meetings take nothing.
Answers have {mean:.0f} tokens on average; an answer's length does not change from step to step. {qualify:.0%} of the \
groups qualify.
The store answers at once: no race is lost in it.

s/step    of generation and scoring; generate: against the first policy; step: the same with training
mean      tokens of the answers trained on, over the law's; waiting: prompts started and not used yet
stale     answers trained on that an older policy began; wasted: tokens computed and not used so far
store     operations per answer used; looks: whether the step has ended or more may start, the same"""


def table(results: Sequence[PolicyResult], mean_tokens: float) -> Table:
    """Return all policies at one number of replicas; the first is what the others are measured by."""
    first = results[0]
    shown = Table(title=f"{first.replicas} replicas", title_justify="left")
    names = "policy s/step steps/h generate step bubble mean waiting stale wasted store looks"
    for name in names.split():
        shown.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for r in results:
        speed = first.generate_seconds / r.generate_seconds, r.steps_per_hour / first.steps_per_hour
        cells = [r.policy, f"{r.generate_seconds:.1f}", f"{r.steps_per_hour:.1f}", *(f"{x:.2f}x" for x in speed)]
        cells += [f"{r.bubble:.0%}", f"{r.mean_tokens / mean_tokens:.3f}", str(r.waiting)]
        cells += [f"{r.stale:.0%}", f"{r.wasted:.0%}", f"{r.operations:.2f}", f"{r.looks:.0f}"]
        shown.add_row(*cells)
    return shown


def main(arguments: Sequence[str] | None = None) -> list[PolicyResult]:
    """Run it as said on the command line; all results, in order."""
    chosen = parser().parse_args(arguments)
    gc.set_threshold(300_000)  # thousands of small objects that live for a step
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 132)
    scenes = [scene(chosen, replicas) for replicas in chosen.replicas]
    told = vars(chosen) | {"base": 1e3 * chosen.step_seconds, "per_request": 1e3 * chosen.request_seconds}
    mean = scenes[0].lengths.mean()
    console.print(ASSUMPTIONS.format(**told, mean=mean), soft_wrap=True)
    results: list[PolicyResult] = []
    for setting in scenes:
        found = [play(policy, setting, chosen.steps) for policy in chosen.policies]
        console.print(table(found, mean))
        results += found
    return results


if __name__ == "__main__":
    try:
        main()
    except (UserError, OSError) as error:
        tell(f"error: {reason(error)}")
        sys.exit(2)
