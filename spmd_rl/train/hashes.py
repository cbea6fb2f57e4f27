"""Hashes of a step's data in the journal, for `python -m spmd_rl bisect`."""

import base64
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from spmd_rl.batch import Batch, Column, Entries
from spmd_rl.model.fingerprint import fingerprint, fingerprints

PHASES = {
    "generate": ("token_ids", "loss_mask", "rollout_logprobs", "lags", "candidate_ids", "experts"),
    "logprobs": ("old_logprobs", "ref_logprobs", "teacher_logprobs", "teacher_ids", "teacher_top", "values"),
    "prepare": (
        *("advantages", "weights", "returns", "marked", "right", "reference_sums", "margins", "labels", "hints"),
    ),
}
"""Columns of a batch by the phase that computes them, without numbers of samples within a rank."""


def of_tensors(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return each tensor's hash."""
    return {name: found.hex() for name, found in fingerprints(tensors.items()).items()}


def of_batch(batch: Batch, phase: str) -> dict[str, str]:
    """Return a hash of each sample's part of a phase's columns, by `TICKET.ANSWER COLUMN`.

    A byte per token of a dense column follows a colon, in base64, so that a reader finds the token.
    """
    columns = [(name, column, values) for name, column, values in batch.columns() if name in PHASES[phase]]
    found = {}
    for i, (ticket, answer) in enumerate(batch.keys.tolist()):
        if ticket >= 0:
            tokens = slice(*batch.starts[i : i + 2].tolist())
            parts = {"token": tokens, "sample": slice(i, i + 1)}
            found |= {f"{ticket}.{answer} {name}": _of_part(c, values, parts[c.per]) for name, c, values in columns}
    return found


def _of_part(column: Column, values: Entries, part: slice) -> str:
    if column.ragged:
        lists = values.index_select(0, torch.arange(part.start, part.stop))
        return (fingerprint(lists.values) + fingerprint(lists.offsets)).hex()
    rows = values[part].contiguous()
    if column.per == "sample":
        return fingerprint(rows).hex()
    # Any change of one byte of a value changes the byte of its token.
    folded = np.bitwise_xor.reduce(rows.numpy().view(np.uint8).reshape(len(rows), -1), axis=1)
    return f"{fingerprint(rows).hex()}:{base64.b64encode(folded.tobytes()).decode()}"
