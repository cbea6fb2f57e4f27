"""The options that the fronts of the simulator share: the work, its lengths and its speeds."""

import argparse
from math import inf
from pathlib import Path

from spmd_rl.command_line import Parser
from spmd_rl.config.schema import RolloutConfig
from spmd_rl.config.values import require
from spmd_rl.tools.simulate.engine import Speed
from spmd_rl.tools.simulate.lengths import Lengths, long_tail, recorded
from spmd_rl.tools.simulate.scene import Scene


def work(program: str, about: str) -> Parser:
    """Return a parser of these. Defaults: 7B parameters, one GPU a replica; the longest answer is 20 times the median
    (arXiv 2509.21009)."""
    made = Parser(program, description=about)
    made.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add, speed = made.add_argument, Speed()
    add("--replicas", type=int, nargs="+", default=[8, 64], metavar="N", help="engines that share a store")
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
    return made


def check(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options, if they can be simulated; UserError names the first that cannot."""
    o = options
    for name in ("correlation", "qualify"):
        require(0 <= getattr(o, name) <= 1, f"--{name}: must lie between 0 and 1, not {getattr(o, name):g}")
    require(o.qualify > 0, "--qualify: no group trains")
    for name in ("steps", "prompts", "answers", "median", "max_new_tokens", "max_running", "step_seconds"):
        require(0 < getattr(o, name) < inf, f"--{name.replace('_', '-')}: must be positive, not {getattr(o, name):g}")
    for name in ("extra", "sigma", "request_seconds", "verdict_seconds", "train_seconds"):
        require(
            0 <= getattr(o, name) < inf, f"--{name.replace('_', '-')}: must not be negative, not {getattr(o, name):g}"
        )
    require(min(o.replicas) > 0, "--replicas: must be positive")
    return options


def scene(options: argparse.Namespace, replicas: int) -> Scene:
    """Return what is simulated at so many replicas. UserError for a file that holds no lengths."""
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
