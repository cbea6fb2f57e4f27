"""Supervised learning on rows of one's own needs neither rollouts nor an algorithm: `train` and `learn.update`."""

from array import array

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from spmd_rl import learn, train
from spmd_rl.batch import pack
from spmd_rl.config.sections.models import PolicyConfig, RoleConfig, TrainConfig
from spmd_rl.types import Sample, Turn, Verdict
from tests.dist.harness import run_ranks
from tests.models import tiny

ROWS = [([5, 6, 7], [8, 9]), ([1], [2, 3, 4, 5, 6]), ([9, 9], [7]), ([3, 1, 4], [1, 5, 9, 2])]
"""Prompt and answer; 12 tokens of answers."""


def losses(world, path: str, rows: list[list[int]]) -> list[float]:
    """Of three updates. rows: those of each rank."""
    own = PolicyConfig(model=path, dtype="float32", lr=1e-2, eps=1e-3, max_grad_norm=1e9)
    policy = train.build_role(RoleConfig("policy", own, path, "float32", False, TrainConfig(), 3), world)
    mine = [(n, *(array("i", ids) for ids in ROWS[n])) for n in rows[world.rank]]
    turns = [(n, Turn(prompt, answer, array("f", answer), answer, "stop")) for n, prompt, answer in mine]
    batch = pack(Sample(n, 0, (turn,), Verdict("ok", 0.0)) for n, turn in turns)
    batch.weights = batch.loss_mask / 12
    return [learn.update(policy, [batch], learn.nll)["actor/pg_loss"] for _ in range(3)]


@pytest.mark.parametrize("rows", [[[0, 1, 2, 3]], [[2, 0, 3], [1], []]], ids=["one rank", "one of three has no row"])
def test_supervised_learning_is_that_of_transformers_and_torch(rows, tmp_path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny("llama", tmp_path))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0)
    ids = pad_sequence([torch.tensor(prompt + answer) for prompt, answer in ROWS], True)
    labels = pad_sequence([torch.tensor([-100] * len(prompt) + answer) for prompt, answer in ROWS], True, -100)
    wanted = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    assert wanted[2] < 0.9 * wanted[0]
    assert all(found == pytest.approx(wanted, rel=1e-5) for found in run_ranks(len(rows), losses, str(tmp_path), rows))
