"""Checks verdicts before they go on: in the worker what a rewarder returned, in the host what a worker node sent."""

import math
from typing import Any, get_args

import msgspec

from spmd_rl import wire
from spmd_rl.errors import MAX_TRACEBACK, one_line, printable
from spmd_rl.types import Verdict, VerdictStatus

MAX_PARTS = 100
MAX_NAME = 200
"""The most characters of a part's name."""


def checked(verdict: Any) -> Verdict:
    """Return the verdict in plain types, so that NumPy's floats and NaN are not sent. ValueError if it cannot be."""
    verdict = Verdict.of(verdict)
    if verdict.status not in get_args(VerdictStatus):
        raise ValueError(f"unknown verdict status {verdict.status!r}")
    if len(verdict.parts) > MAX_PARTS:
        raise ValueError(f"{len(verdict.parts)} parts; at most {MAX_PARTS}")
    parts = {str(name): float(value) for name, value in verdict.parts.items()}
    if long := [name for name in parts if len(name) > MAX_NAME]:
        raise ValueError(f"the name of a part has {len(long[0])} characters; at most {MAX_NAME}")
    for name, value in {"score": float(verdict.score), **parts}.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}")
    detail, traceback = one_line(verdict.detail), printable(verdict.traceback[:MAX_TRACEBACK])
    answer = printable(str(verdict.answer)[:MAX_NAME], lines=False)
    return Verdict(verdict.status, float(verdict.score), parts, detail, traceback, answer)


def checked_reply(packed: msgspec.Raw) -> Verdict:
    """Return the verdict that a worker node sent. ValueError, with one plain line, if it is none."""
    if (size := len(memoryview(packed))) > wire.MAX_VERDICT_BYTES:
        raise ValueError(f"a verdict of {size} bytes; at most {wire.MAX_VERDICT_BYTES}")
    verdict = checked(wire.VERDICT.unpack(packed))
    if odd := [name for name in verdict.parts if not name.isprintable()]:
        raise ValueError(f"the name of a part is {odd[0]!r}")
    return verdict
