"""Check before the first step that a model does not mix packed sequences.

A sequence is computed between two others, and between these exchanged: equal bits on a CPU, elsewhere within rounding
noise. A model that mixes in any order, or counts positions along the row, differs from the sequence alone.
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
"""Token ids that any vocabulary has; 32 in all need no padding"""
EXCHANGED, ROUNDING = 1e-6, 10.0
"""Limits of the mean absolute difference after the exchange: nats, and a multiple of the rounding noise"""
# Accepted models in float32 on a CPU have at most 4e-7.
ALONE = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.2}
"""Largest difference to the sequence alone, in nats"""


def check_packing(model: str, role: Role, dtype: str) -> None:
    """[all] Raise UserError on all ranks if a sequence's outputs depend on its neighbours. model: name in the error.
    dtype: of computation."""
    limits = {"exchanged": EXCHANGED, "alone": ALONE[dtype]}
    with role.awake():
        between, exchanged, alone = (_answer(role, row) for row in ((A, ASKED, B), (B, ASKED, A), (ASKED,)))  # [all]
        found = _means(role, exchanged=between - exchanged, alone=between - alone)  # [all]
        # The same number on every rank, so all raise together.
        if found["exchanged"] > EXCHANGED:
            by_rounding = _answer(role, (ASKED, A, B)) - _answer(role, (ASKED, B, A))  # [all]
            limits["exchanged"] = max(EXCHANGED, ROUNDING * _means(role, rounding=by_rounding)["rounding"])  # [all]
    for name, limit in limits.items():
        if not found[name] <= limit:
            raise UserError(
                f"{model} does not keep packed sequences apart: neighbours change the logprobs of one by "
                f"{found[name]:.2g} nats on average (limit {limit:.2g}); it cannot be trained here"
            )


def _answer(role: Role, row: tuple[range, ...]) -> Tensor:
    """[all] Return fingerprints of `ASKED` in a row, float32 [tokens - 1]: its first token has no logprob."""
    first = 1 + sum(map(len, row[: row.index(ASKED)]))
    return role.packing_fingerprint(pack(starmap(_sample, enumerate(row))))[first:][: len(ASKED) - 1]  # [all]


def _means(role: Role, **differences: Tensor) -> dict[str, float]:
    means = {name: difference.abs().mean().nan_to_num(math.inf).item() for name, difference in differences.items()}
    return role.layout.world.reduce("start: packed check", means, op="max")  # [all]


def _sample(number: int, ids: range) -> Sample:
    zeros = bytes(4 * (len(ids) - 1))
    turn = Turn(array("i", ids[:1]), array("i", ids[1:]), array("f", zeros), array("i", zeros), "length")
    return Sample(number, 0, (turn,), Verdict("ok"))
