"""Hashes of a batch show which sample, column and token has changed."""

import base64

import torch

from spmd_rl.train.hashes import PHASES, of_batch, of_tensors
from tests.training import global_batch


def changed(one: dict[str, str], other: dict[str, str]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if one[name] != other[name]]


def test_a_change_is_in_its_sample_column_and_token() -> None:
    batch = global_batch(truncated=True)
    before = {phase: of_batch(batch, phase) for phase in PHASES}
    assert "token_ids" in next(iter(before["generate"])) and any("candidate_ids" in name for name in before["generate"])
    place = int(batch.starts[2]) + 1
    batch.advantages[place] += 1e-7
    name = "{}.{} advantages".format(*batch.keys[2].tolist())
    after = {phase: of_batch(batch, phase) for phase in PHASES}
    assert [changed(before[phase], after[phase]) for phase in PHASES] == [[], [], [name]]
    left, right = (base64.b64decode(found["prepare"][name].partition(":")[2]) for found in (before, after))
    assert [i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b] == [1]
    # The parts of a batch have the hashes of the whole.
    rest = batch.select(range(1, batch.num_samples))
    assert of_batch(rest, "generate").items() <= before["generate"].items()


def test_a_bit_of_a_tensor() -> None:
    tensors = {"a": torch.arange(9.0), "b": torch.zeros(()), "c": torch.ones(4, 4).T}
    before = of_tensors(tensors)
    tensors["a"].view(torch.int32)[5] ^= 1
    assert changed(before, of_tensors(tensors)) == ["a"]
