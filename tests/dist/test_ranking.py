"""A reward model against transformers' own sequence classification model: losses, and what it scores when it is loaded.

The reference takes each conversation alone, and its head starts at 0, as ours does.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rewards.reward_model import ModelReward
from spmd_rl import train
from spmd_rl.checkpoint import RewardExport
from spmd_rl.config.sections.models import PolicyConfig, RoleConfig, TrainConfig
from spmd_rl.config.sections.preference import PairsConfig
from spmd_rl.config.sections.rows import ValidationConfig
from spmd_rl.data import Examples
from spmd_rl.learn import Ranking
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.rollout import RowSource
from spmd_rl.types import AnswerInfo, Message, Prompt
from tests.dist.harness import run_ranks
from tests.models import tiny

SIZE, STEPS, SEED, CENTER, LR = 3, 4, 5, 0.05, 2e-3
LAYOUTS = [(1, {}), (2, {"tp": 2})]
SLOW = [(2, {}), (3, {}), (2, {"cp": 2}), (2, {"pp": 2}), (4, {"tp": 2})]
ROWS = [
    {"prompt": f"say {n}", "chosen": f"{n} " * (1 + n % 3), "rejected": "no" * (1 + n % 2), "margin": n / 10}
    for n in range(7)
]


def train_here(world, path: str, rows: str, axes: dict, folder: str) -> list:
    """Of the steps the losses, and the validation metrics after them."""
    settings = TrainConfig(tokens_per_microbatch=100, **axes)
    own = PolicyConfig(model=path, dtype="float32", lr=LR, eps=1e-3, max_grad_norm=1e9)
    role = RoleConfig("policy", own, path, "float32", False, settings, STEPS)
    critic = train.build_role(replace(role, name="critic", section="policy", value_bias=False), world)
    tokenizer = load_tokenizer(path)
    data, validation = PairsConfig(train=rows, eval=rows, rows_per_step=SIZE), ValidationConfig()
    source = RowSource(Examples.load(data, "ranked"), data, validation, tokenizer.scored_pieces, world, SEED)
    student = Ranking(critic, 1, CENTER)
    found = [student.update(student.prepare(source.collect(step))) for step in range(1, STEPS + 1)]
    target = Path(folder)
    if world.rank == 0:
        target.mkdir()
    world.barrier("folder")
    with critic.awake():
        RewardExport(critic, path, world, tokenizer.pad_id)(target)
    return [[f["reward_model/loss"] for f in found], student.measure(source.held_out(STEPS, STEPS))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[str, str, list[float]]:
    """The model, the rows, and the losses of plain transformers."""
    folder = tmp_path_factory.mktemp("ranking")
    path, rows = str(tiny("llama", folder / "model")), folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    torch.nn.init.zeros_(model.score.weight)
    order = Examples.load(PairsConfig(train=str(rows), holdout=0.0), "ranked").train

    def reward(row: dict, side: str) -> torch.Tensor:
        chat = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
        ids = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
        return model(torch.tensor([ids])).logits[0, 0]

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3, weight_decay=0)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        chosen = [ROWS[order.at(place, SEED)[1]] for place in range(step * SIZE, (step + 1) * SIZE)]
        pairs = [(reward(row, "chosen"), reward(row, "rejected"), row["margin"]) for row in chosen]
        loss = torch.stack([-logsigmoid(a - b - margin) + CENTER * (a + b) ** 2 for a, b, margin in pairs]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return path, str(rows), losses


@pytest.mark.parametrize(
    ("size", "axes"), [*LAYOUTS, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)], ids=str
)
def test_it_is_the_sequence_classification_model_of_transformers(size: int, axes: dict, trained, tmp_path) -> None:
    path, rows, losses = trained
    assert losses[3] < 0.98 * losses[0]
    found = run_ranks(size, train_here, path, rows, axes, str(tmp_path / "hf"))
    for mine, values in found:
        assert mine == pytest.approx(losses, abs=1e-5) and values == found[0][1]
    rewarder = ModelReward(str(tmp_path / "hf"))
    scores = {
        side: [
            rewarder.score(
                Prompt("0", (Message("user", row["prompt"]),), "x", ""), row[side], AnswerInfo(1, "stop")
            ).score
            for row in ROWS
        ]
        for side in ("chosen", "rejected")
    }
    margins = [a - b for a, b in zip(scores["chosen"], scores["rejected"], strict=True)]
    assert values["val/rewards/margins"] == pytest.approx(sum(margins) / len(ROWS), abs=1e-5)
    assert len(set(margins)) > 1
    assert values["val/rewards/chosen"] == pytest.approx(sum(scores["chosen"]) / len(ROWS), abs=1e-5)
    assert values["val/rewards/accuracies"] == sum(margin > 0 for margin in margins) / len(ROWS)
