"""The door with a fault, after step 2 is saved, in the weight that FAULTY names: a bit of it flips on rank 1; or, with
FAULT=sum, a sum is added to it on all ranks whose bits depend on the number of threads.

    FAULTY=model.norm.weight torchrun ... tests/e2e/faulty_rlvr.py key=value ...
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


def faulty_save(saver: Checkpointer, step: int, **how) -> None:
    """Save as always, then change the first element."""
    maybe_save(saver, step, **how)
    if step == STEP:
        (weight,) = [one.tensor for one in policies[0].model.state() if one.name == f"model/{os.environ['FAULTY']}"]
        if os.environ.get("FAULT") == "sum":
            weight.view(-1)[0] += torch.arange(100_003, dtype=torch.float32).sin().sum() / 100
        elif policies[0].layout.world.rank == RANK:
            weight.view(torch.int32).view(-1)[0] ^= 1


if __name__ == "__main__":
    Policy.update, Checkpointer.maybe_save = remembered_update, faulty_save
    main("rlvr", RlvrConfig, run)
