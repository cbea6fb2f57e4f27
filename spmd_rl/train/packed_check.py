"""The last guard against models that mix packed sequences: each is asked once, before the first step.

It computes a sequence between two others, between the same two exchanged, and alone. The exchange keeps all shapes and
what each expert of a mixture gets, so that rounding stays the same and the bound is narrow in every dtype. What mixes
sequences whatever their order, or counts positions along the row, shows against the sequence alone.
"""

import math
from array import array
from itertools import starmap

import torch

from spmd_rl.batch import pack
from spmd_rl.errors import UserError
from spmd_rl.train.base import Role
from spmd_rl.types import Sample, Turn, Verdict

ASKED, OTHERS = range(30, 42), (range(24, 34), range(50, 60))
"""Token ids that any vocabulary has; 32 in all, which need no filling up"""
ROWS = ((OTHERS[0], ASKED, OTHERS[1]), (OTHERS[1], ASKED, OTHERS[0]), (ASKED,))
LIMITS = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (5e-3, 0.2)}
"""Largest mean absolute difference in nats, exchanged and alone, by dtype. Measured on the CPU over all models that are
accepted: exchanged none, alone 1e-6 in float32."""


def check_packing(model: str, role: Role, dtype: torch.dtype) -> None:
    """[all] UserError, on all ranks alike, if what `role` makes of a sequence depends on those beside it.

    model: as the error names it. dtype: that it computes in.
    """
    with role.awake():
        answers = [role.probe(pack(starmap(_sample, enumerate(row)))) for row in ROWS]  # [all]
    first, size = len(OTHERS[0]) + 1, len(ASKED) - 1  # a sequence's first token has no logprob
    between, exchanged = (answer[first : first + size] for answer in answers[:2])
    found = {"exchanged": between - exchanged, "alone": between - answers[2][1:]}
    found = {name: d.abs().mean().nan_to_num(math.inf).item() for name, d in found.items()}
    found = role.layout.world.reduce("start: packed check", found, op="max")  # [all]
    for name, limit in zip(("exchanged", "alone"), LIMITS[dtype], strict=True):
        if found[name] > limit:
            raise UserError(
                f"{model} does not keep packed sequences apart: neighbours change the logprobs of one by "
                f"{found[name]:.2g} nats on average (limit {limit:g}); it cannot be trained here"
            )


def _sample(number: int, ids: range) -> Sample:
    """A sequence of which all tokens but the first count as sampled."""
    count = len(ids) - 1
    zeros = bytes(4 * count)
    turn = Turn(array("i", ids[:1]), array("i", ids[1:]), array("f", zeros), array("i", zeros), "length")
    return Sample(number, 0, (turn,), Verdict("ok"))
