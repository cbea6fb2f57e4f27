"""Reward models against transformers' own sequence classification model: losses, and what is scored when it is loaded.

The reference takes each conversation alone, and its head starts at 0, as ours does.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rewards.reward_model import ModelReward
from spmd_rl import train
from spmd_rl.checkpoint import RewardExport
from spmd_rl.config.sections.models import PolicyConfig, RoleConfig, TrainConfig
from spmd_rl.config.sections.preference import LabelledConfig
from spmd_rl.config.sections.rows import ValidationConfig
from spmd_rl.config.supervised import RewardModelConfig
from spmd_rl.data import Examples
from spmd_rl.learn import Judging
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


STEPS_OF = [
    {
        "prompt": f"say {n}",
        "completions": [f"{n} is" + " so" * step for step in range(1 + n % 3)],
        "labels": [n % 2 == 0 or step < 1 for step in range(1 + n % 3)],
    }
    for n in range(7)
]


def train_here(world, path: str, rows: str, axes: dict, folder: str, head: str = "pairwise") -> list:
    """Of the steps the losses, and the validation metrics after them."""
    settings = TrainConfig(tokens_per_microbatch=100, **axes)
    own = PolicyConfig(model=path, dtype="float32", lr=LR, eps=1e-3, max_grad_norm=1e9)
    role = RoleConfig("policy", own, path, "float32", False, settings, STEPS)
    critic = train.build_role(replace(role, name="critic", section="policy", value_bias=False), world)
    tokenizer = load_tokenizer(path)
    data, validation = LabelledConfig(train=rows, eval=rows, rows_per_step=SIZE), ValidationConfig()
    cfg = RewardModelConfig(data=data, head=head, center_coef=CENTER * (head == "pairwise"))
    source = RowSource(Examples.load(data, cfg.row_kind), data, validation, tokenizer.scored_pieces, world, SEED)
    student = Judging.of(cfg, critic)
    found = [student.update(student.prepare(source.collect(step))) for step in range(1, STEPS + 1)]
    target = Path(folder)
    if world.rank == 0:
        target.mkdir()
    world.barrier("folder")
    with critic.awake():
        RewardExport(critic, path, world, tokenizer.pad_id, cfg.separator)(target)
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
    order = Examples.load(LabelledConfig(train=str(rows), holdout=0.0), "ranked").train

    def reward(row: dict, side: str) -> torch.Tensor:
        chat = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
        ids = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
        return model(torch.tensor([ids])).logits[0, 0]

    def loss(chosen: list[int]) -> torch.Tensor:
        pairs = [(reward(ROWS[n], "chosen"), reward(ROWS[n], "rejected"), ROWS[n]["margin"]) for n in chosen]
        return torch.stack([-logsigmoid(a - b - margin) + CENTER * (a + b) ** 2 for a, b, margin in pairs]).mean()

    return path, str(rows), losses_of(model, order, loss)


def losses_of(model: torch.nn.Module, order, loss: Callable[[list[int]], torch.Tensor]) -> list[float]:
    """Of steps that minimise `loss` of the numbers of rows."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3, weight_decay=0)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        found = loss([order.at(place, SEED)[1] for place in range(step * SIZE, (step + 1) * SIZE)])
        found.backward()
        optimizer.step()
        losses.append(found.item())
    return losses


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


@pytest.fixture(scope="module")
def labelled(tmp_path_factory) -> tuple[str, dict[str, str], dict[str, list[float]], list[list[float]]]:
    """The model; by head the rows, and the losses of plain transformers; logits of the trained steps of all rows."""
    folder = tmp_path_factory.mktemp("labelled")
    path, files, losses = str(tiny("llama", folder / "model")), {}, {}
    tokenizer = AutoTokenizer.from_pretrained(path)
    for head in ("outcome", "process"):
        rows = STEPS_OF
        if head == "outcome":
            rows = [{"prompt": r["prompt"], "completion": r["completions"][-1], "label": r["labels"][-1]} for r in rows]
        (folder / head).write_text("".join(json.dumps(row) + "\n" for row in rows))
        files[head] = str(folder / head)
        model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
        torch.nn.init.zeros_(model.score.weight)

        def logits(row: dict, model=model) -> torch.Tensor:
            """At the last token of each step, where that ends with its separator, and of the conversation."""
            steps = row.get("completions") or [row["completion"]]
            chat = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": "\n\n".join(steps)}]
            text = tokenizer.apply_chat_template(chat, tokenize=False)
            ids = []
            for step in steps[:-1]:
                begin, found, text = text.partition(f"{step}\n\n")
                ids.append(tokenizer(begin + found, add_special_tokens=False).input_ids)
            ids.append(tokenizer(text, add_special_tokens=False).input_ids)
            hidden = model.model(torch.tensor([sum(ids, [])])).last_hidden_state[0]
            return model.score(hidden)[[end - 1 for end in accumulate(map(len, ids))], 0]

        def loss(chosen: list[int], rows=rows, logits=logits) -> torch.Tensor:
            labels = [float(label) for n in chosen for label in rows[n].get("labels") or [rows[n]["label"]]]
            found = torch.cat([logits(rows[n]) for n in chosen])
            return binary_cross_entropy_with_logits(found, torch.tensor(labels))

        order = Examples.load(LabelledConfig(train=files[head], holdout=0.0), head).train
        losses[head] = losses_of(model, order, loss)
    with torch.no_grad():
        return path, files, losses, [logits(row).tolist() for row in STEPS_OF]


@pytest.mark.parametrize("head", ["outcome", "process"])
@pytest.mark.parametrize(
    ("size", "axes"), [*LAYOUTS, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)], ids=str
)
def test_labels_of_answers_and_of_steps(size: int, axes: dict, head: str, labelled, tmp_path) -> None:
    path, files, losses, logits = labelled
    assert losses[head][3] != pytest.approx(losses[head][0], rel=0.02)
    for mine, values in run_ranks(size, train_here, path, files[head], axes, str(tmp_path / "hf"), head):
        assert mine == pytest.approx(losses[head], abs=1e-5)
        assert 0 <= values["val/rewards/accuracies"] <= 1
    if head == "outcome":
        return
    for of_steps, made in (("min", min), ("last", lambda scores: scores[-1])):
        rewarder = ModelReward(str(tmp_path / "hf"), of_steps=of_steps, max_batch=3)
        prompts = [Prompt("0", (Message("user", row["prompt"]),), "x", "") for row in STEPS_OF]
        answers = ["\n\n".join(row["completions"]) + "\n" for row in STEPS_OF]
        found = rewarder.score_batch(prompts, answers, [AnswerInfo(1, "stop")] * len(prompts))
        assert [one.score for one in found] == pytest.approx([made(one) for one in logits], abs=1e-5)
    assert values["val/rewards/mean"] == pytest.approx(sum(sum(logits, [])) / sum(map(len, logits)), abs=1e-5)
