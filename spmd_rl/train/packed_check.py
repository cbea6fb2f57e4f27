"""The last guard against models that mix packed sequences: each is asked once, before the first step.

A sequence is computed between two others, and between the same two exchanged. This keeps all shapes, and what each
expert of a mixture gets: on the CPU it is the same to the bit in every dtype. What another machine makes of such an
exchange by rounding alone shows where both come after the sequence, and no state of theirs reaches it. What mixes
sequences whatever their order, or counts positions along the row, shows against the sequence alone.
"""

import math
from array import array
from itertools import starmap

from torch import Tensor

from spmd_rl.base.errors import UserError
from spmd_rl.batch import pack
from spmd_rl.train.base import Role
from spmd_rl.types import Sample, Turn, Verdict

A, ASKED, B = range(24, 34), range(30, 42), range(50, 60)
"""Token ids that any vocabulary has; 32 in all, which need no filling up"""
EXCHANGED, ROUNDING = 1e-6, 10.0
"""Largest mean absolute difference of logprobs by the exchange, in nats, or as a multiple of what rounding makes"""
ALONE = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.2}
"""The same against the sequence alone: on the CPU at most 4e-7 of all models that are accepted, in float32"""


def check_packing(model: str, role: Role, dtype: str) -> None:
    """[all] UserError, on all ranks alike, if what `role` makes of a sequence depends on those beside it.

    model: as the error names it. dtype: that it computes in.
    """
    limits = {"exchanged": EXCHANGED, "alone": ALONE[dtype]}
    with role.awake():
        between, exchanged, alone = (_answer(role, row) for row in ((A, ASKED, B), (B, ASKED, A), (ASKED,)))  # [all]
        found = _means(role, exchanged=between - exchanged, alone=between - alone)  # [all]
        if found["exchanged"] > EXCHANGED:  # the same number on every rank
            by_rounding = _answer(role, (ASKED, A, B)) - _answer(role, (ASKED, B, A))  # [all]
            limits["exchanged"] = max(EXCHANGED, ROUNDING * _means(role, rounding=by_rounding)["rounding"])  # [all]
    for name, limit in limits.items():
        if not found[name] <= limit:
            raise UserError(
                f"{model} does not keep packed sequences apart: neighbours change the logprobs of one by "
                f"{found[name]:.2g} nats on average (limit {limit:.2g}); it cannot be trained here"
            )


def _answer(role: Role, row: tuple[range, ...]) -> Tensor:
    """[all] What `role` makes of `ASKED` in a row: float32 [tokens - 1], as its first token has no logprob."""
    first = 1 + sum(map(len, row[: row.index(ASKED)]))
    return role.packing_fingerprint(pack(starmap(_sample, enumerate(row))))[first:][: len(ASKED) - 1]  # [all]


def _means(role: Role, **differences: Tensor) -> dict[str, float]:
    """[all] The mean absolute value of each, on the rank where it is largest."""
    means = {name: difference.abs().mean().nan_to_num(math.inf).item() for name, difference in differences.items()}
    return role.layout.world.reduce("start: packed check", means, op="max")  # [all]


def _sample(number: int, ids: range) -> Sample:
    """A sequence of which all tokens but the first count as sampled."""
    zeros = bytes(4 * (len(ids) - 1))
    turn = Turn(array("i", ids[:1]), array("i", ids[1:]), array("f", zeros), array("i", zeros), "length")
    return Sample(number, 0, (turn,), Verdict("ok"))
