"""Learning from preferences against plain Hugging Face: losses, margins and weights of three steps, in every layout.

The reference takes each answer alone, after its prompt, and the frozen model's logprobs anew in each step.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer

from spmd_rl import train
from spmd_rl.config.sections.models import PolicyConfig, ReferenceConfig, RoleConfig, TrainConfig
from spmd_rl.config.sections.preference import PairsConfig, PreferenceConfig
from spmd_rl.config.sections.rows import ValidationConfig
from spmd_rl.data import Examples
from spmd_rl.learn import Preference, keep_reference
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.rollout import RowSource
from tests.dist.harness import run_ranks
from tests.models import tiny

SIZE, STEPS, SEED, BETA = 4, 3, 5, 0.5
LAYOUTS = [(1, {}), (2, {}), (2, {"tp": 2})]
SLOW = [(3, {}), (2, {"cp": 2}), (2, {"pp": 2}), (4, {"tp": 2}), (4, {"tp": 2, "cp": 2})]
PROMPTS = ["2+2?", "say a", "Who?", "count", "and so on", "more", "less"]
ROWS = [
    {"prompt": prompt, "chosen": "yes, " * (1 + n % 3), "rejected": "no" * (1 + n % 2)}
    for n, prompt in enumerate(PROMPTS)
]
VOTES = [
    ROWS[0],
    *({"prompt": p, "completion": f"{p} {n}", "label": n % 3 > 0} for n, p in enumerate(PROMPTS[1:])),
]


def train_here(world, path: str, rows: str, axes: dict, kind: str, wanted: str) -> list:
    """Of three steps the losses and the margins, the validation loss before and after, and how far the weights are from
    the wanted ones."""
    settings = TrainConfig(tokens_per_microbatch=100, **axes)
    own = PolicyConfig(model=path, dtype="float32", lr=1e-2, eps=1e-3, max_grad_norm=1e9)
    policy = train.build_role(RoleConfig("policy", own, path, "float32", False, settings, STEPS), world)
    frozen = RoleConfig("reference", ReferenceConfig(), path, "float32", False, settings, STEPS)
    data, validation = PairsConfig(train=rows, eval=rows, rows_per_step=SIZE), ValidationConfig()
    preference = PreferenceConfig(loss=kind, beta=BETA)
    examples = Examples.load(data, "judged" if preference.is_judged else "preference")
    render = load_tokenizer(path).pieces
    source = RowSource(examples, data, validation, render, world, SEED, None, preference.is_judged)
    keep_reference(source, train.build_role(frozen, world), STEPS, Path(wanted).with_name(f"{world.size}{axes}"), "x")
    student = Preference(preference, policy, 1)
    values = [student.measure(source.held_out(0, STEPS))["val/loss"]]
    found = [student.update(student.prepare(source.collect(step))) for step in range(1, STEPS + 1)]
    values.append(student.measure(source.held_out(STEPS, STEPS))["val/loss"])
    weights = load_file(wanted)
    drift = max(float((weight - weights[name]).norm() / weights[name].norm()) for name, weight in policy.weights())
    return [[f["dpo/loss"] for f in found], [f["rewards/margins"] for f in found], values, drift]


class Plain:
    """Plain Hugging Face and torch."""

    def __init__(self, path: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model, self.frozen = (AutoModelForCausalLM.from_pretrained(path) for _ in range(2))

    def gain(self, prompt: str, answer: str) -> torch.Tensor:
        """The logprob of an answer, less what the frozen model gives it."""
        chat = [{"role": "user", "content": prompt}]
        before = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        ids = torch.tensor([before + self.tokenizer(answer + "<|im_end|>").input_ids])

        def logprob(model) -> torch.Tensor:
            logits = model(ids).logits[0, len(before) - 1 : -1]
            return logits.log_softmax(-1).gather(1, ids[0, len(before) :, None]).sum()

        with torch.no_grad():
            reference = logprob(self.frozen)
        return logprob(self.model) - reference

    def dpo(self, rows: list[int]) -> tuple[torch.Tensor, float]:
        """The mean loss and the mean margin of pairs."""
        margins = [
            BETA * (self.gain(ROWS[n]["prompt"], ROWS[n]["chosen"]) - self.gain(ROWS[n]["prompt"], ROWS[n]["rejected"]))
            for n in rows
        ]
        margins = torch.stack(margins)
        return -logsigmoid(margins).mean(), margins.mean().item()

    def kto(self, rows: list[int]) -> tuple[torch.Tensor, float]:
        """The mean loss of answers, and the difference of the mean rewards of both kinds."""
        good, bad, others = [], [], []
        for n in rows:
            row, following = VOTES[n], VOTES[(n + 1) % len(VOTES)]
            sides = (
                [("chosen", good), ("rejected", bad)]
                if "chosen" in row
                else [("completion", good if row["label"] else bad)]
            )
            for side, kind in sides:
                kind.append(self.gain(row["prompt"], row[side]))
            others.append(self.gain(row["prompt"], following.get("completion") or following["chosen"]).detach())
        baseline = torch.stack(others).mean().clamp(min=0)
        good, bad = torch.stack(good), torch.stack(bad)
        losses = torch.cat([1 - (BETA * (good - baseline)).sigmoid(), 1 - (BETA * (baseline - bad)).sigmoid()])
        return losses.mean(), BETA * (good.mean() - bad.mean()).item()


@pytest.fixture(scope="module", params=["dpo", "kto"])
def trained(request, tmp_path_factory) -> tuple:
    """The model, the rows, the loss, the file of the wanted weights, and losses, margins and validation losses."""
    folder, kind = tmp_path_factory.mktemp(request.param), request.param
    path, file = str(tiny("llama", folder / "model")), folder / "rows.jsonl"
    rows = ROWS if kind == "dpo" else VOTES
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    order = Examples.load(PairsConfig(train=str(file), holdout=0.0), "judged").train
    plain = Plain(path)
    loss_of = getattr(plain, kind)

    def value() -> float:
        """The validation loss: parts of as many rows as a step has."""
        parts = [list(range(SIZE)), list(range(SIZE, len(rows)))]
        counts = [sum(1 + ("chosen" in rows[n] and kind == "kto") for n in part) for part in parts]
        return sum(loss_of(part)[0].item() * n for part, n in zip(parts, counts, strict=True)) / sum(counts)

    optimizer = torch.optim.AdamW(plain.model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0)
    losses, margins, values = [], [], [value()]
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, margin = loss_of([order.at(place, SEED)[1] for place in range(step * SIZE, (step + 1) * SIZE)])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        margins.append(margin)
    values.append(value())
    wanted = folder / "wanted.safetensors"
    save_file({name: weight.contiguous() for name, weight in plain.model.state_dict().items()}, wanted)
    return path, str(file), kind, str(wanted), losses, margins, values


@pytest.mark.parametrize(
    ("size", "axes"), [*LAYOUTS, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)], ids=str
)
def test_three_steps_are_those_of_plain_hugging_face(size: int, axes: dict, trained) -> None:
    path, rows, kind, wanted, losses, margins, values = trained
    assert losses[2] < 0.9 * losses[0] and margins[2] > 0.5
    for found in run_ranks(size, train_here, path, rows, axes, kind, wanted):
        assert found[0] == pytest.approx(losses, abs=1e-5)
        assert found[1] == pytest.approx(margins, abs=1e-4)
        assert found[2] == pytest.approx(values, abs=1e-5)
        assert found[3] < 1e-5


def one_kind(world, path: str, rows: str) -> list[dict[str, float]]:
    """What is measured of two good answers, of two bad ones, of one of each and of all; and an update on the first."""
    own = PolicyConfig(model=path, dtype="float32", lr=0.0)
    role = RoleConfig("policy", own, path, "float32", False, TrainConfig(tokens_per_microbatch=100), 3)
    data, preference = PairsConfig(train=rows, eval=rows, rows_per_step=2), PreferenceConfig(loss="kto")
    examples = Examples.load(data, "judged")
    source = RowSource(examples, data, ValidationConfig(), load_tokenizer(path).pieces, world, SEED, None, True)
    student = Preference(preference, train.build_role(role, world), 1)
    parts = list(source.held_out(0, 3))
    found = [student.measure([part]) for part in parts]
    found.append(student.measure(parts))
    updated = student.update(student.prepare(parts[0]))
    return [*found, {f"val/{name}": value for name, value in updated.items()}]


def test_what_answers_of_one_kind_do_not_have_is_left_out(tmp_path: Path) -> None:
    path, file = str(tiny("llama", tmp_path / "model")), tmp_path / "rows.jsonl"
    labels = [True, True, False, False, True, False]
    rows = [{"prompt": f"p{n}", "completion": "x" * (1 + n), "label": label} for n, label in enumerate(labels)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (good, bad, both, all_of_them, updated), *_ = run_ranks(2, one_kind, path, str(file))
    sides = [("logps", "chosen"), ("logps", "rejected"), ("rewards", "margins")]
    known = [[f"val/{section}/{side}" in one for section, side in sides] for one in (good, bad, both, updated)]
    assert known == [[True, False, False], [False, True, False], [True] * 3, [True, False, False]]
    chosen = (2 * good["val/logps/chosen"] + both["val/logps/chosen"]) / 3
    assert all_of_them["val/logps/chosen"] == pytest.approx(chosen, rel=1e-6)
    assert all_of_them["val/overlong"] == 0.0
