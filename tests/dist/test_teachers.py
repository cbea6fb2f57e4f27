"""A step of distillation from collected samples to the gradient, against one process of plain Hugging Face torch.

Two teachers by domain, in layouts of their own; the loss over the whole vocabulary of the toy, and over a part of it.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from spmd_rl.config.load import load
from spmd_rl.config.schema import RlvrConfig
from spmd_rl.distributed import World
from spmd_rl.learn import Learner
from spmd_rl.rollout.collected import Collected
from spmd_rl.train import build_roles
from spmd_rl.types import Group
from tests.dist.harness import run_ranks
from tests.dist.test_recipes import group
from tests.fakes import table_of
from tests.models import tiny
from tests.unit.test_distillation import merged, plain

K, MIX = 16, 0.3
LAYOUTS = {
    1: [],
    2: ["teacher.train.tp=2", "teacher.math.train.tokens_per_microbatch=30"],
    3: ["train.tokens_per_microbatch=40"],
}


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
        Group(g.prompt.__class__(g.prompt.id, g.prompt.messages, domain, ""), g.ticket, g.samples[:4])
        for g, domain in zip(found, domains, strict=True)
    ]


def step(world: World, path: str, overrides: list[str]) -> dict[str, float]:
    """The metrics of an update; rank 0 saves the gradient, which is ten times the first moment."""
    cfg = settings(path, *overrides)
    roles = build_roles(cfg.roles, world)
    learner = Learner(roles, cfg.algorithm, cfg.rollout, 1, cfg.seed, teacher=cfg.teacher)
    table = table_of(groups(), lambda s: s.ticket % world.size, 1)
    mine = tuple(g for g in groups() if g.ticket % world.size == world.rank)
    metrics = learner.update(learner.prepare(Collected(1, mine, (), table, 0.0, 0, 0)))
    moments = roles.policy.model.state_dict()["optimizer"]
    wholes = {key.removesuffix(".exp_avg"): 10 * m.full_tensor() for key, m in moments.items() if "exp_avg" in key[-7:]}
    if world.rank == 0:
        torch.save(wholes, Path(path) / f"gradient-{world.size}.pt")
    return metrics


def reference(path: Path, name: str, k: int) -> tuple[float, float, dict[str, torch.Tensor]]:
    """The loss, the mean of log student - log teacher, and the gradient."""
    policy, *teachers = (
        AutoModelForCausalLM.from_pretrained(path / which, dtype=torch.float32)
        for which in ("policy", "teacher", "math")
    )
    total, gap, count = torch.zeros(()), 0.0, 0
    for one in groups():
        teacher = teachers[one.prompt.domain == "math"]
        for sample in (sample for sample in one.samples if sample.verdict.scored):
            parts = [
                (list(part), learnt) for t in sample.turns for part, learnt in ((t.prompt_ids, 0), (t.token_ids, 1))
            ]
            ids = torch.tensor([[i for part, _ in parts for i in part]])
            mask = torch.tensor([bool(learnt) for part, learnt in parts for _ in part])
            at = mask.nonzero()[:, 0]
            student, fixed = (F.softmax(m(input_ids=ids).logits[0, at - 1] / 0.8, -1) for m in (policy, teacher))
            fixed = fixed.detach()
            top = fixed.topk(k).indices
            some = (fixed, student) if k == fixed.shape[1] else (merged(fixed, top), merged(student, top))
            total = total + plain(name, *some, MIX).sum()
            chosen = ids[0, at][:, None]
            gap += float((student.detach().gather(1, chosen).log() - fixed.gather(1, chosen).log()).sum())
            count += len(at)
    (total / count).backward()
    return float(total / count), gap / count, {n: p.grad for n, p in policy.named_parameters()}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("policy", "teacher", "math")):
        tiny("qwen2", path / name, seed=seed)
    return path


@pytest.mark.parametrize("size", LAYOUTS)
@pytest.mark.parametrize(("name", "k"), [("jensen_shannon", 256), ("reverse_kl", K)])
def test_the_gradient_is_that_of_plain_torch_in_every_layout(models: Path, size: int, name: str, k: int) -> None:
    vocabulary = json.loads((models / "policy" / "config.json").read_text())["vocab_size"]
    k = vocabulary if k == 256 else k
    found = run_ranks(size, step, str(models), [f"teacher.loss={name}", f"teacher.top_k={k}", *LAYOUTS[size]])
    loss, gap, gradient = reference(models, name, k)
    for metrics in found:
        assert metrics["distill/loss"] == pytest.approx(loss, abs=2e-6)
        assert metrics["distill/reverse_kl"] == pytest.approx(gap, abs=1e-5)
        assert metrics == found[0]
    moved = torch.load(models / f"gradient-{size}.pt")
    assert moved.keys() == gradient.keys()
    worst = max(float((moved[key] - gradient[key]).abs().max()) for key in gradient)
    assert worst < 1e-7 and max(float(g.abs().max()) for g in gradient.values()) > 1e-4


def test_the_reward_is_the_teachers_logprob_over_the_engines(models: Path) -> None:
    """With a learning rate of 0, alone and mixed with scores: the advantage that the loss reads."""
    base = ["teacher.coef=0", "teacher.reward_coef=0.5"]
    alone = run_ranks(2, step, str(models), base)
    mixed = run_ranks(2, step, str(models), [*base, "teacher.alone=false"])
    assert "distill/loss" not in alone[0] and alone[0]["distill/reverse_kl"] == mixed[0]["distill/reverse_kl"]
    assert alone[0]["actor/abs_advantage"] > 0 and alone[0]["actor/abs_advantage"] != mixed[0]["actor/abs_advantage"]
