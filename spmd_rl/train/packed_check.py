"""The last guard against models that mix packed sequences: each is asked once, before the first step.

A sequence is computed between two others, and between the same two exchanged. This keeps all shapes, and what each
expert of a mixture gets: on the CPU it is the same to the bit in every dtype. What another machine makes of such an
exchange by rounding alone shows where both come after the sequence, and no state of theirs reaches it. What mixes
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

A, ASKED, B = range(24, 34), range(30, 42), range(50, 60)
"""Token ids that any vocabulary has; 32 in all, which need no filling up"""
ROWS = ((A, ASKED, B), (B, ASKED, A), (ASKED, A, B), (ASKED, B, A), (ASKED,))
EXCHANGED, ROUNDING = 1e-5, 10.0
"""Largest mean absolute difference of logprobs by the exchange, in nats, and as a multiple of what rounding makes"""
ALONE = {torch.float32: 1e-4, torch.bfloat16: 0.2}
"""The same against the sequence alone, whose rounding is another: 3e-6 at most in float32"""


def check_packing(model: str, role: Role, dtype: torch.dtype) -> None:
    """[all] UserError, on all ranks alike, if what `role` makes of a sequence depends on those beside it.

    model: as the error names it. dtype: that it computes in.
    """
    answers = []
    with role.awake():
        for row in ROWS:
            first = 1 + sum(map(len, row[: row.index(ASKED)]))  # a sequence's first token has no logprob
            answers.append(role.probe(pack(starmap(_sample, enumerate(row))))[first:][: len(ASKED) - 1])  # [all]
    pairs = {"exchanged": (0, 1), "rounding": (2, 3), "alone": (2, 4)}
    differences = {name: (answers[i] - answers[j]).abs().mean() for name, (i, j) in pairs.items()}
    found = {name: difference.nan_to_num(math.inf).item() for name, difference in differences.items()}
    found = role.layout.world.reduce("start: packed check", found, op="max")  # [all]
    limits = {"exchanged": max(EXCHANGED, ROUNDING * found["rounding"]), "alone": ALONE[dtype]}
    for name, limit in limits.items():
        if not found[name] <= limit:
            raise UserError(
                f"{model} does not keep packed sequences apart: neighbours change the logprobs of one by "
                f"{found[name]:.2g} nats on average (limit {limit:.2g}); it cannot be trained here"
            )


def _sample(number: int, ids: range) -> Sample:
    """A sequence of which all tokens but the first count as sampled."""
    zeros = bytes(4 * (len(ids) - 1))
    turn = Turn(array("i", ids[:1]), array("i", ids[1:]), array("f", zeros), array("i", zeros), "length")
    return Sample(number, 0, (turn,), Verdict("ok"))
