"""Router replay under noise: a small mixture learns while the engine's routers are not quite the trainer's.

    python -m bench.router_noise --noise 0 0.1 bf16 --replay false true --steps 40 --seed 0 1 2 --json r.json

Noise is added to the logits of the engine's routers, new for each token and each forward, or the routers compute in
bfloat16; everything else is float32. The task: write small letters. What is left out: kernels, which are what makes a
real engine's routers differ; an engine over many experts in low precision.
"""

import os
import subprocess
import sys
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from bench import show, work
from spmd_rl import rlvr
from spmd_rl.config import RlvrConfig
from spmd_rl.config import main as door
from spmd_rl.engine.native import engine as assemble
from spmd_rl.model.moe import router_class, weights_of_chosen
from spmd_rl.track.metrics import read_lines
from spmd_rl.weights import probe
from tests.e2e.runs import Toy

NOISE = "SPMD_RL_BENCH_ROUTER_NOISE"
KEYS = ("critic/score/mean", "train_infer/abs_diff/mean", "train_infer/ess", "moe/replay_changed", "actor/entropy")
SIZES = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_hidden_layers": 4}
SIZES |= {"initializer_range": 0.1, "norm_topk_prob": True}  # so large that experts matter before anything is learnt

TASK = """reward.toy.target=bench.router_noise:score algorithm=grpo eval.every=0 checkpoint.every=0
checkpoint.export_hf=false policy.dtype=float32 policy.lr=3e-3 rollout.max_new_tokens=8 rollout.answers_per_prompt=8
algorithm.bounds.max_abs_diff=null algorithm.bounds.min_ess=null"""


def score(answer: str) -> float:
    """The share of small letters in eight characters."""
    return sum("a" <= character <= "z" for character in answer) / 8


def add_noise(module: nn.Module, size: str) -> nn.Module:
    """The module with noise on its routers: a standard deviation of their logits, or `bf16`."""

    def noisy(router: nn.Module, args: tuple, output: tuple) -> tuple:
        logits, _, chosen = output
        if size == "bf16":
            logits = linear(args[0].bfloat16(), router.weight.bfloat16()).to(logits.dtype).view_as(logits)
        else:
            logits = logits + float(size) * torch.randn_like(logits)
        chosen = logits.topk(chosen.shape[1], -1).indices
        return logits, weights_of_chosen(router, logits, chosen), chosen

    for router in (m for m in module.modules() if isinstance(m, router_class(module))):
        router.register_forward_hook(noisy, prepend=True)  # before the engine notes what was chosen
    return module


def run(options: Any, noise: str, replay: str, seed: int) -> dict[str, Any]:
    """One run; the points of each of `KEYS` by step."""
    folder = options.dir.resolve() / f"router-{noise}-{replay}-{seed}"
    work.fresh(folder)
    toy = Toy(folder, "qwen3_moe", seed=seed, **SIZES)
    chosen = [f"policy.router_replay={replay}", f"steps={options.steps}", f"seed={seed}", f"run.dir={folder / 'run'}"]
    chosen = [*toy.settings(), *TASK.split(), *chosen, *options.settings]
    command = [sys.executable, "-m", "bench.router_noise", "door", *chosen]
    with open(folder / "log", "wb") as out:
        how = {"env": work.environment(2) | {NOISE: noise}, "cwd": work.ROOT, "stdout": out, "stderr": out}
        code = subprocess.run(command, **how).returncode
    lines = list(read_lines(folder / "run" / "metrics.jsonl"))
    points = {key: [line[key] for line in lines if key in line] for key in KEYS}
    return {"noise": noise, "replay": replay, "seed": seed, "code": code, **points}


def main() -> None:
    parser = work.parser(__doc__, steps=40)
    parser.add_argument("--noise", nargs="+", default=["0", "0.1", "bf16"])
    parser.add_argument("--replay", nargs="+", choices=("false", "true"), default=["false", "true"])
    options = parser.parse_args()
    runs = []
    for seed, noise, replay in ((s, n, r) for s in options.seed for n in options.noise for r in options.replay):
        runs.append(run(options, noise, replay, seed))
        show.record(options.json, {"benchmark": "router_noise", "runs": runs})
        print(noise, replay, seed, *(f"{key} {fmean(runs[-1][key] or [0]):.5f}" for key in KEYS), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["door"]:
        sys.argv.pop(1)
        empty = assemble.empty_module
        assemble.empty_module = lambda *args, **named: add_noise(empty(*args, **named), os.environ[NOISE])
        probe.LIMITS[torch.float32] = 100.0  # it would stop a run whose engine is not the trainer
        door("rlvr", RlvrConfig, rlvr.run)
    else:
        main()
