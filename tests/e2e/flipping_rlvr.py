"""The door with a fault of memory: after step 2 a bit of one weight flips on rank 1.

FLIP=model.norm.weight torchrun ... tests/e2e/flipping_rlvr.py key=value ...
"""

import os

import torch

from spmd_rl.checkpoint import Checkpointer
from spmd_rl.config import RlvrConfig, main
from spmd_rl.rlvr import run
from spmd_rl.train.accumulate import Policy

STEP, RANK = 2, 1
update, maybe_save = Policy.update, Checkpointer.maybe_save
policies: list[Policy] = []


def remembered_update(policy: Policy, *args):
    policies[:] = [policy]
    return update(policy, *args)


def flipping_save(saver: Checkpointer, step: int, **how) -> None:
    """Save as always, then flip the lowest bit of the first element."""
    maybe_save(saver, step, **how)
    if step == STEP and policies[0].layout.world.rank == RANK:
        (weight,) = [one.tensor for one in policies[0].model.state() if one.name == f"model/{os.environ['FLIP']}"]
        weight.view(torch.int32).view(-1)[0] ^= 1


if __name__ == "__main__":
    Policy.update, Checkpointer.maybe_save = remembered_update, flipping_save
    main("rlvr", RlvrConfig, run)
