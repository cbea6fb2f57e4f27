"""Supervised fine-tuning against plain Hugging Face: loss and gradients of three steps, in every layout.

The reference renders a conversation once, takes transformers' own mask of the assistant's tokens, and trains a padded
batch. Gradients are read off the norm and the weights: an epsilon of 1e-3 hides gradients that are rounding alone.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from spmd_rl import train
from spmd_rl.config.sections.models import PolicyConfig, RoleConfig, TrainConfig
from spmd_rl.config.sections.rows import RowsConfig, ValidationConfig
from spmd_rl.data import Examples
from spmd_rl.learn import Imitation
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.rollout import RowSource
from tests.dist.harness import run_ranks
from tests.models import CHAT, tiny

MARKED = CHAT.replace(
    "{{ m['content'] }}<|im_end|>\n",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}",
)
"""The template, that says where the assistant speaks."""
SIZE, STEPS, SEED = 4, 3, 5
LAYOUTS = [(1, {}), (2, {}), (2, {"tp": 2}), (2, {"cp": 2})]
SLOW = [(3, {}), (2, {"pp": 2}), (4, {"tp": 2, "cp": 2}), (4, {"tp": 2}), (2, {"dp_replicate": 2})]


def chat(*texts: str) -> dict:
    roles = ["user", "assistant"] * len(texts)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


ROWS = [
    chat("2+2?", "4"),
    chat("Say a", "a", "and b", "bb, as you wish", "so?", "no"),
    {"prompt": "What is 3 * 3?", "completion": "Nine, or 9."},
    chat("count", "1 2 3 4 5 6 7 8 9 10 11 12"),
    {"prompt": [{"role": "system", "content": "Brief."}, {"role": "user", "content": "Hi"}], "completion": "Hello."},
    chat("x", "y"),
    chat("again", "and again", "once more", "enough"),
]


def conversation(row: dict) -> list[dict]:
    """The messages of a row."""
    if "messages" in row:
        return row["messages"]
    prompt = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}]
    return [*prompt, {"role": "assistant", "content": row["completion"]}]


def source(world, path: str, rows: str) -> RowSource:
    data, validation = RowsConfig(train=rows, holdout=0.0, eval=rows, rows_per_step=SIZE), ValidationConfig()
    examples = Examples.load(data, "demonstration")
    return RowSource(examples, data, validation, load_tokenizer(path).pieces, world, SEED)


def train_here(world, path: str, rows: str, axes: dict) -> list:
    """Of three steps the losses and the norms, the validation loss before and after, and how far the weights are from
    the reference's."""
    own = PolicyConfig(model=path, dtype="float32", lr=1e-2, eps=1e-3, max_grad_norm=1e9)
    settings = TrainConfig(tokens_per_microbatch=100, **axes)
    policy = train.build_role(RoleConfig("policy", own, path, "float32", False, settings, STEPS), world)
    rows, student = source(world, path, rows), Imitation(policy, 1, name="sft/loss")
    values = [student.measure(rows.held_out(0, STEPS))["val/loss"]]
    found = [student.update(student.prepare(rows.collect(step))) for step in range(1, STEPS + 1)]
    values.append(student.measure(rows.held_out(STEPS, STEPS))["val/loss"])
    wanted = load_file(Path(path) / "wanted.safetensors")
    drift = max(float((weight - wanted[name]).norm() / wanted[name].norm()) for name, weight in policy.weights())
    return [[f["sft/loss"] for f in found], [f["actor/grad_norm"] for f in found], values, drift]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[str, str, list[float], list[float], list[float]]:
    """The model, the rows, and what plain Hugging Face makes of them: losses, norms, validation losses."""
    folder = tmp_path_factory.mktemp("sft")
    path, rows = str(tiny("llama", folder / "model")), folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    data = RowsConfig(train=str(rows), holdout=0.0, rows_per_step=SIZE)
    order = Examples.load(data, "demonstration").train

    def loss_of(numbers: list[int]) -> torch.Tensor:
        chats = [conversation(ROWS[number]) for number in numbers]
        found = tokenizer.apply_chat_template(
            chats, chat_template=MARKED, return_assistant_tokens_mask=True, return_dict=True
        )
        ids, masks = found["input_ids"], found["assistant_masks"]
        longest = max(map(len, ids))
        padded = torch.tensor([one + [0] * (longest - len(one)) for one in ids])
        attention = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in ids])
        labels = torch.full_like(padded, -100)
        for row, mask in enumerate(masks):
            place = torch.tensor(mask).nonzero()[:, 0]
            labels[row, place] = padded[row, place]
        return model(padded, attention_mask=attention, labels=labels).loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0)
    losses, norms, values = [], [], [loss_of(range(len(ROWS))).item()]
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of([order.at(place, SEED)[1] for place in range(step * SIZE, (step + 1) * SIZE)])
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
        optimizer.step()
        losses.append(loss.item())
    values.append(loss_of(range(len(ROWS))).item())
    save_file({name: weight.contiguous() for name, weight in model.state_dict().items()}, f"{path}/wanted.safetensors")
    return path, str(rows), losses, norms, values


@pytest.mark.parametrize(
    ("size", "axes"), [*LAYOUTS, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)], ids=str
)
def test_three_steps_are_those_of_plain_hugging_face(size: int, axes: dict, trained) -> None:
    path, rows, losses, norms, values = trained
    assert losses[2] < 0.95 * losses[0]
    per_machine = size // axes.get("dp_replicate", 1)
    for found in run_ranks(size, train_here, path, rows, axes, per_machine=per_machine):
        assert found[0] == pytest.approx(losses, abs=1e-6)
        assert found[1] == pytest.approx(norms, rel=1e-5)
        assert found[2] == pytest.approx(values, abs=2e-6)
        assert found[3] < 1e-6
