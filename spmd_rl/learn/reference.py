"""Logprobs of a frozen reference, computed once and stored for resumes.

They are computed in the batches of the first epoch, so that an extended run is bitwise equal to a longer one.
"""

import os
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from spmd_rl.learn.imitation import deal
from spmd_rl.rollout import Collected, RowSource
from spmd_rl.rollout.row_source import MISMATCHED
from spmd_rl.train.base import PolicyRole


def keep_reference(rows: RowSource, reference: PolicyRole, steps: int, path: Path, digest: str) -> None:
    """[all] Add the reference's logprobs to the rows of a run, and close the reference. path: their file, valid if it
    holds `digest`, that of all inputs.
    """
    world = reference.layout.world
    known = world.broadcast("reference: kept", _digest_of(path) if world.rank == 0 else None)  # [all]
    if known != digest:
        tables = {}
        with world.phase("logprobs"), reference.awake():
            for name, numbers, collected in rows.parts(steps):  # [all]
                table = tables.setdefault(name, np.full((rows.num_rows(name), MISMATCHED + 1), np.nan, np.float32))
                by_ticket = dict(zip(collected.table.tickets.tolist(), numbers, strict=True))
                for ticket, answer, value in _sums(collected, reference):  # [all]
                    table[by_ticket[ticket], answer] = value
        if world.rank == 0:
            save_file(tables, path.with_suffix(".tmp"), {"digest": digest})
            os.replace(path.with_suffix(".tmp"), path)
        world.barrier("reference: written")  # [all]
    rows.reference = load_file(path)
    reference.close()


def _digest_of(path: Path) -> str:
    try:
        with safe_open(path, "np") as file:
            return file.metadata()["digest"]
    except (OSError, SafetensorError):
        return ""


def _sums(collected: Collected, reference: PolicyRole) -> list[tuple[int, int, float]]:
    """[all] Return (ticket, answer, summed logprob) of each sample."""
    data = reference.layout.data
    (batch,) = deal(collected, 1, reference)[1]  # [all]
    logprobs, _ = reference.logprobs(batch, 1.0)  # [all]
    index, samples = batch.sampled.index, batch.sampled.samples
    sums = logprobs.new_zeros(batch.num_samples).index_add(0, samples, logprobs[index])
    mine = [[*key, value] for key, value in zip(batch.keys.tolist(), sums.tolist(), strict=True)]
    return [tuple(one) for theirs in data.gather("reference: logprobs", mine) for one in theirs]  # [all]
