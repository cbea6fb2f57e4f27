"""The real door, `spmd_rl.rlvr`, held at the gate before each step; else the same program.

    torchrun --nproc-per-node 2 -m bench.our_side key=value ...        # started by a benchmark

With `EVERY` in the environment it comes to the gate only before step 0, step 1, and every so many steps after that.
`SPMD_RL_BENCH_PIPELINE` names another pipeline.
"""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from safetensors.torch import save_file

from bench.gate import Gate
from spmd_rl import weights
from spmd_rl.config import main
from spmd_rl.config.pipelines import PIPELINES
from spmd_rl.track.run import Run
from spmd_rl.train.base import PolicyRole

EVERY = "SPMD_RL_BENCH_EVERY"


def hold() -> None:
    """Put the gate in front of the steps of this process."""
    step_of, build = Run.step, weights.build
    rank, every = int(os.environ.get("RANK", "0")), int(os.environ.get(EVERY, "1"))
    gate = Gate.connect(rank)
    policies: list[PolicyRole] = []

    @contextmanager
    def held(track: Run, step: int) -> Iterator[None]:
        if step == 0 or (step - 1) % every == 0:
            while (order := gate.arrive(step, track.line)).do == "export":
                save(policies[0], order.path, rank)
        with step_of(track, step):
            yield

    def noted(policy: PolicyRole, *others: object) -> weights.Publisher:
        policies.append(policy)
        return build(policy, *others)

    Run.step, weights.build = held, noted


def save(policy: PolicyRole, path: str, rank: int) -> None:
    """[all] Every weight once, in bfloat16, under its Hugging Face name."""
    with policy.awake():
        weights = {name: tensor.to(torch.bfloat16, copy=True) for name, tensor in policy.weights()}
    if rank == 0:
        save_file(weights, path)


if __name__ == "__main__":
    hold()
    PIPELINE = os.environ.get("SPMD_RL_BENCH_PIPELINE", "rlvr")
    main(PIPELINE, PIPELINES[PIPELINE], importlib.import_module(f"spmd_rl.{PIPELINE}").run)
