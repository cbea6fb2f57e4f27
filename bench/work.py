"""The work that contestants share: the demo's, as our door reads it and as TRL is told it.

8 prompts of some 45 tokens x 8 answers of at most 12, one optimizer step on all of them. Our filter of groups without
variance and the tickets started beyond the step's 8 are switched off: TRL has neither, and both sides are then asked
the same prompts in the same order. Left out: what is measured.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gate import Contestant
from spmd_rl.config import RlvrConfig
from spmd_rl.config.load import load
from spmd_rl.data import Prompts
from spmd_rl.distributed.dtype import choose_dtype
from spmd_rl.types import Prompt

ROOT = Path(__file__).resolve().parents[1]
SAME = ("rollout.over_sample=0", "rollout.filter.zero_variance=false", "eval.every=0", "checkpoint.every=0")
SCORE = {"trl": "reward", "ours": "critic/score/mean"}
TOKENS = {"trl": "completions/mean_length", "ours": "rollout/response_length/mean"}
"""What each side calls the mean training reward and the mean answer length, in tokens."""
PATIENT = "journal.stall_seconds=100000"
"""A contestant that waits at the gate is no stall."""


def settings(overrides: Sequence[str], seed: int, steps: int, run_dir: Path) -> list[str]:
    """The overrides of our side; the user's come last and win."""
    return ["+experiment=demo", *SAME, PATIENT, f"seed={seed}", f"steps={steps}", f"run.dir={run_dir}", *overrides]


def loaded(overrides: Sequence[str]) -> RlvrConfig:
    """What these overrides stand for, on this machine."""
    cfg = load("rlvr", RlvrConfig, overrides)
    if cfg.policy.dtype == "auto":
        device = torch.accelerator.current_accelerator(check_available=True)
        cfg.policy.dtype, _ = choose_dtype(device or torch.device("cpu"))
    return cfg


def num_samples(cfg: RlvrConfig) -> int:
    """Samples of one step."""
    return cfg.rollout.prompts_per_step * cfg.rollout.answers_per_prompt


def threads(ranks: int) -> int:
    """OpenMP threads of each rank, alike for all contestants: the usable cores, dealt out."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def environment(ranks: int) -> dict[str, str]:
    """Of every contestant."""
    return {
        "OMP_NUM_THREADS": str(threads(ranks)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "PYTHONWARNINGS": "ignore",
    }


def launcher(python: Path | str, ranks: int) -> list[str]:
    """Torchrun at more than one rank, the plain interpreter at one."""
    alone = [str(python)]
    return alone if ranks == 1 else [*alone, *_TORCHRUN, "--nproc-per-node", str(ranks)]


_TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def ours(name: str, overrides: Sequence[str], ranks: int, directory: Path) -> Contestant:
    """Our door with these overrides."""
    command = [*launcher(sys.executable, ranks), "-m", "bench.our_side", *overrides]
    return Contestant.start(name, command, environment(ranks), ranks, directory)


def trl(
    name: str, cfg: RlvrConfig, ranks: int, directory: Path, python: Path, changes: Mapping[str, Any]
) -> Contestant:
    """TRL with the settings of `cfg`, and `changes` to its `GRPOConfig`."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps(for_trl(cfg, directory / name, changes)))
    command = [*launcher(python, ranks), "-m", "bench.trl_side", str(path)]
    return Contestant.start(name, command, environment(ranks), ranks, directory)


def bare(name: str, cfg: RlvrConfig, directory: Path) -> Contestant:
    """The bare loop with the settings of `cfg`."""
    path = directory / f"{name}.json"
    path.write_text(json.dumps(for_trl(cfg, directory / name, {})))
    command = [sys.executable, "-m", "bench.bare_side", str(path)]
    return Contestant.start(name, command, environment(1), 1, directory)


def for_trl(cfg: RlvrConfig, directory: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The work as plain JSON: settings, and the prompts in the order of our tickets."""
    prompts = Prompts.load(cfg.data)
    tickets = range(cfg.rollout.prompts_per_step * (cfg.steps + 1))
    (reward,) = cfg.reward.domains.values()
    return {
        "directory": str(directory),
        "model": cfg.policy.model,
        "dtype": cfg.policy.dtype,
        "seed": cfg.seed,
        "steps": cfg.steps,
        "prompts_per_step": cfg.rollout.prompts_per_step,
        "answers_per_prompt": cfg.rollout.answers_per_prompt,
        "max_new_tokens": cfg.rollout.max_new_tokens,
        "temperature": cfg.rollout.temperature,
        "clip": cfg.algorithm.clip_low,
        "lr": cfg.policy.lr,
        "betas": list(cfg.policy.betas),
        "weight_decay": cfg.policy.weight_decay,
        "max_grad_norm": cfg.policy.max_grad_norm,
        "reward": {"target": reward.target, "args": reward.args},
        "rows": [_row(prompts.ticket(ticket, cfg.seed)[1]) for ticket in tickets],
        "trl": dict(changes),
    }


def _row(prompt: Prompt) -> dict[str, Any]:
    return {
        "id": prompt.id,
        "messages": [{"role": m.role, "content": m.content} for m in prompt.messages],
        "domain": prompt.domain,
        "ground_truth": prompt.ground_truth,
        "extra": dict(prompt.extra),
    }


def parser(about: str, **defaults: Any) -> argparse.ArgumentParser:
    """The options that all benchmarks share: `--seed`, `--steps`, `--json`, `--svg`, and our settings as words."""
    made = argparse.ArgumentParser(description=about.strip().partition("\n")[0])
    made.add_argument("--seed", type=int, nargs="+", default=[0], help="each seed is a run of its own")
    made.add_argument("--steps", type=int, default=defaults["steps"], help="steps timed, after one that is not")
    made.add_argument("--json", type=Path, help="write the raw figures here")
    made.add_argument("--svg", type=Path, help="write the picture here")
    made.add_argument("--dir", type=Path, default=Path("runs/bench"), help="logs and run directories")
    made.add_argument("settings", nargs="*", metavar="key=value", help="our settings")
    return made


def add_trl(made: argparse.ArgumentParser) -> None:
    """The options of a benchmark that has TRL for a contestant."""
    made.add_argument("--trl-python", type=Path, default=ROOT / ".venv-trl/bin/python", help="`make bench` makes it")
    made.add_argument("--trl", type=json.loads, default={}, metavar="JSON", help="changes to TRL's GRPOConfig")


def fresh(folder: Path) -> None:
    """An empty directory: a finished or half-finished run of before would be resumed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
