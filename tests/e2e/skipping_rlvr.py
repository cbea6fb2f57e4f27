"""The door with a mistake: in step 2 rank 1 stays away from one collective and goes on as if it had been there.

SKIP="track: metrics" torchrun ... tests/e2e/skipping_rlvr.py key=value ...
"""

import os
from typing import Any

import torch

from spmd_rl.config import RlvrConfig, main
from spmd_rl.distributed import World
from spmd_rl.rlvr import run
from spmd_rl.train.fsdp2.backend import FSDP2Policy
from spmd_rl.train.fsdp2.optimizer import Optimizer

SKIP = os.environ["SKIP"]
STEP = 2

gather, forward, whole_grad_square = World.gather, FSDP2Policy.outputs, Optimizer.local_grad_square


def skips(world: World) -> bool:
    return world.rank == 1 and world.journal.step == STEP


def skipping_gather(world: World, name: str, record, type=Any):
    """Of a gather: only one's own record."""
    return [record] * world.size if skips(world) and name == SKIP else gather(world, name, record, type)


def skipping_forward(backend: FSDP2Policy, micro, ask):
    """Of a micro-batch: neither FSDP's gathers in the forward pass nor its reductions in the backward pass."""
    world = backend._world
    if skips(world) and world.journal.inside[0] == SKIP:
        values = torch.zeros(int(micro.loss_mask.sum()), requires_grad=True)
        return values, values.detach()
    return forward(backend, micro, ask)


def grad_square(optimizer: Optimizer, factor: float) -> float:
    """A rank that skipped its micro-batch has no gradient, and does not mind."""
    grads = [p.grad for p in optimizer._parameters.values()]
    return 0.0 if any(grad is None for grad in grads) else whole_grad_square(optimizer, factor)


if __name__ == "__main__":
    World.gather, FSDP2Policy.outputs = skipping_gather, skipping_forward
    Optimizer.local_grad_square = grad_square
    main("rlvr", RlvrConfig, run)
