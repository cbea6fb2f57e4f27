"""The door with a model that the gate lets in and whose packed sequences are not apart: see LEAKS.

LEAKS=state torchrun ... tests/e2e/leaking_rlvr.py key=value ...
"""

import os

import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP

from spmd_rl.config import RlvrConfig, main
from spmd_rl.rlvr import run


def before(x: Tensor) -> Tensor:
    """Each token with a share of the one before it, along the whole row: a short convolution."""
    return x + 0.5 * F.pad(x, (0, 0, 1, -1))


def everything(x: Tensor) -> Tensor:
    """Each token with a share of the row's mean, which does not depend on the order: statistics of a batch."""
    return x + 0.5 * x.mean(1, keepdim=True)


LEAKS = {"state": before, "statistics": everything}


if __name__ == "__main__":
    forward, leak = LlamaMLP.forward, LEAKS[os.environ["LEAKS"]]
    LlamaMLP.forward = lambda self, x: forward(self, leak(x))
    main("rlvr", RlvrConfig, run)
