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

gather, forward, counted_grads = World.gather, FSDP2Policy.outputs, Optimizer.counted_grads


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


def grads_or_none(optimizer: Optimizer, factor: float) -> dict[str, torch.Tensor]:
    """A rank that skipped its micro-batch has no gradient, and does not mind."""
    grads = [p.grad for p in optimizer._parameters.values()]
    return {} if any(grad is None for grad in grads) else counted_grads(optimizer, factor)


if __name__ == "__main__":
    World.gather, FSDP2Policy.outputs = skipping_gather, skipping_forward
    Optimizer.counted_grads = grads_or_none
    main("rlvr", RlvrConfig, run)
