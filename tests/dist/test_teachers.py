"""A step of distillation from collected samples to the gradient, against one process of plain Hugging Face torch.

Two teachers by domain, in layouts of their own; the loss over the whole vocabulary of the toy, and over a part of it.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from spmd_rl.config.load import load
from spmd_rl.config.schema import RlvrConfig
from spmd_rl.distributed import World
from spmd_rl.learn import Learner
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.rollout.collected import Collected
from spmd_rl.train import build_roles
from spmd_rl.types import Group, Message, Prompt
from tests.dist.harness import run_ranks
from tests.dist.test_recipes import group
from tests.fakes import table_of
from tests.models import tiny
from tests.unit.test_distillation import merged, plain

K, MIX = 16, 0.3
LAYOUTS = {
    "1": [],
    "2": ["teacher.train.tp=2", "teacher.math.train.tokens_per_microbatch=30"],
    "3": ["train.tokens_per_microbatch=40"],
    "2 pp": ["train.pp=2", "teacher.train.pp=1"],
    "2 cp": ["train.cp=2"],
    "2 zero": ["train=deepspeed"],
    "2 megatron": ["train=megatron", "train.tp=2"],
}
"""Ranks, and what they are"""
ONCE = ("2 pp", "2 cp", "2 zero", "2 megatron")
"""Layouts in which one loss says enough."""


def settings(path: str, *overrides: str) -> RlvrConfig:
    common = [f"policy.model={path}/policy", f"teacher.model={path}/teacher", f"teacher.math.model={path}/math"]
    common += ["policy.dtype=float32", "policy.max_grad_norm=1e9", f"teacher.mix={MIX}", "rollout.temperature=0.8"]
    return load("rlvr", RlvrConfig, [*common, "rollout.answers_per_prompt=4", "rollout.max_new_tokens=24", *overrides])


def groups() -> list[Group]:
    """Six, of two domains; one answer has no score."""
    generator = torch.Generator().manual_seed(0)
    found = [group(ticket, generator) for ticket in range(6)]
    domains = ["math" if ticket % 3 == 1 else "toy" for ticket in range(6)]
    return [
        Group(Prompt(g.prompt.id, (Message("user", "2 + 5?"),), domain, "7"), g.ticket, g.samples[:4])
        for g, domain in zip(found, domains, strict=True)
    ]


def step(world: World, path: str, overrides: list[str]) -> dict[str, float]:
    """The metrics of an update; rank 0 saves the gradient, which is ten times the first moment."""
    cfg = settings(path, *overrides)
    roles = build_roles(cfg.roles, world)
    render = load_tokenizer(f"{path}/policy").render
    learner = Learner(cfg, roles, render)
    table = table_of(groups(), lambda s: s.ticket % world.size, 1)
    mine = tuple(g for g in groups() if g.ticket % world.size == world.rank)
    metrics = learner.update(learner.prepare(Collected(1, mine, (), table, 0.0, 0, 0)))
    if cfg.train.name == "fsdp2" and cfg.train.pp == 1:
        moments = roles.policy.model.state_dict()["optimizer"]
        wholes = {key[:-8]: 10 * m.full_tensor() for key, m in moments.items() if key.endswith(".exp_avg")}
        if world.rank == 0:
            torch.save(wholes, Path(path) / "gradient.pt")
    return metrics


def reference(
    path: Path, name: str, k: int, hints: dict[str, str] | None = None
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """The loss, the mean of log student - log teacher, and the gradient. hints: by domain the end of the teacher's
    prompt; that of `toy` is then the policy."""
    policy, *teachers = (
        AutoModelForCausalLM.from_pretrained(path / which, dtype=torch.float32)
        for which in ("policy", "teacher", "math")
    )
    words = AutoTokenizer.from_pretrained(path / "policy")
    if hints:
        teachers[0] = policy
    total, gap, count = torch.zeros(()), 0.0, 0
    for one in groups():
        teacher = teachers[one.prompt.domain == "math"]
        for sample in (sample for sample in one.samples if sample.verdict.scored):
            parts = [
                (list(part), learnt) for t in sample.turns for part, learnt in ((t.prompt_ids, 0), (t.token_ids, 1))
            ]
            ids = torch.tensor([[i for part, _ in parts for i in part]])
            mask = torch.tensor([bool(learnt) for part, learnt in parts for _ in part])
            at, shown = mask.nonzero()[:, 0], ids
            if hints:
                chat = [{"role": m.role, "content": m.text} for m in one.prompt.messages]
                chat[-1]["content"] += f"\n\n{hints[one.prompt.domain]}"
                prompt = words.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
                shown = torch.cat([torch.tensor([prompt]), ids[:, at[0] :]], 1)
            later = at + shown.shape[1] - ids.shape[1]
            student = F.softmax(policy(input_ids=ids).logits[0, at - 1] / 0.8, -1)
            fixed = F.softmax(teacher(input_ids=shown).logits[0, later - 1] / 0.8, -1).detach()
            top = fixed.topk(k).indices
            some = (fixed, student) if k == fixed.shape[1] else (merged(fixed, top), merged(student, top))
            total = total + plain(name, *some, MIX).sum()
            chosen = ids[0, at][:, None]
            gap += float((student.detach().gather(1, chosen).log() - fixed.gather(1, chosen).log()).sum())
            count += len(at)
    (total / count).backward()
    return float(total.detach() / count), gap / count, {n: p.grad for n, p in policy.named_parameters()}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("policy", "teacher", "math")):
        tiny("qwen2", path / name, seed=seed)
    return path


CASES = [(layout, *loss) for loss in (("jensen_shannon", None), ("reverse_kl", K)) for layout in LAYOUTS]


@pytest.mark.parametrize(("layout", "name", "k"), [case for case in CASES if case[2] or case[0] not in ONCE])
def test_the_gradient_is_that_of_plain_torch_in_every_layout(models: Path, layout: str, name: str, k: int) -> None:
    k = k or json.loads((models / "policy" / "config.json").read_text())["vocab_size"]
    (models / "gradient.pt").unlink(missing_ok=True)
    asked = [f"teacher.loss={name}", f"teacher.top_k={k}", *LAYOUTS[layout]]
    found = run_ranks(int(layout[0]), step, str(models), asked)
    loss, gap, gradient = reference(models, name, k)
    norm = sum(float(g.double().square().sum()) for g in gradient.values()) ** 0.5
    for metrics in found:
        assert metrics["distill/loss"] == pytest.approx(loss, abs=2e-6)
        assert metrics["distill/reverse_kl"] == pytest.approx(gap, abs=1e-5)
        assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert metrics == found[0]
    if (models / "gradient.pt").exists():
        moved = torch.load(models / "gradient.pt")
        assert moved.keys() == gradient.keys()
        worst = max(float((moved[key] - gradient[key]).abs().max()) for key in gradient)
        assert worst < 1e-7 and max(float(g.abs().max()) for g in gradient.values()) > 1e-4


@pytest.mark.parametrize("layout", ["1", "2", "2 zero"])
def test_a_teacher_may_see_a_hint_and_be_the_policy(models: Path, layout: str) -> None:
    hints = {"toy": "It is 7.\nSo there.", "math": "Think."}
    given = ["teacher.model=null", "teacher.hint='It is {answer}.\\nSo there.'", "teacher.math.hint=Think."]
    own = ["teacher.math.train.tp=2"] if layout == "2" else LAYOUTS[layout]
    found = run_ranks(int(layout[0]), step, str(models), [*given, *own, f"teacher.top_k={K}"])
    loss, gap, gradient = reference(models, "reverse_kl", K, hints)
    norm = sum(float(g.double().square().sum()) for g in gradient.values()) ** 0.5
    for metrics in found:
        assert metrics["distill/loss"] == pytest.approx(loss, abs=2e-6) and loss > 1e-4
        assert metrics["distill/reverse_kl"] == pytest.approx(gap, abs=1e-5)
        assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_the_reward_is_the_teachers_logprob_over_the_engines(models: Path) -> None:
    """With a learning rate of 0, alone and mixed with scores: the advantage that the loss reads."""
    base = ["teacher.coef=0", "teacher.reward_coef=0.5"]
    alone = run_ranks(2, step, str(models), base)
    mixed = run_ranks(2, step, str(models), [*base, "teacher.only=false"])
    assert "distill/loss" not in alone[0] and alone[0]["distill/reverse_kl"] == mixed[0]["distill/reverse_kl"]
    assert alone[0]["actor/abs_advantage"] > 0 and alone[0]["actor/abs_advantage"] != mixed[0]["actor/abs_advantage"]
