"""What is DeepSpeed's alone: its guard against gradients that are not finite, exact resumes, bfloat16, other roles.

Two of three ranks train; they never meet the first one.
"""

import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch

from spmd_rl.config.schema import CriticConfig, PolicyConfig, TrainConfig
from spmd_rl.config.sections.models import ReferenceConfig, RoleConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.model.build import build_model
from spmd_rl.train import build_role
from spmd_rl.train.deepspeed.model import role_of
from tests.dist.test_train_parity import as_stored, critic_errors, with_random_head
from tests.dist.test_train_state import restore, save, updates, weights
from tests.models import tiny
from tests.training import SETTINGS, TEMPERATURE, global_batch, loss, plain_backward, plain_forward, share_of

ON_HOST = {"offload_optimizer": True}
FEW = [
    ({"stage": 1}, ["guard bfloat16", "exact"]),
    ({"stage": 3}, ["guard float32", "guard bfloat16", "exact", "others"]),
]
EACH = ["guard float32", "guard bfloat16", "exact", "others"]
ALL = [(zero | host, EACH) for zero in ({"stage": 1}, {"stage": 2}, {"stage": 3}) for host in ({}, ON_HOST)]
CASES = [FEW, pytest.param(ALL, marks=pytest.mark.slow)]
"""Settings of DeepSpeed, and what is looked at"""


def train_of(zero: dict, budget: int = 60) -> TrainConfig:
    return TrainConfig(name="deepspeed", tokens_per_microbatch=budget, **zero)


def policy(world: World, path: str, zero: dict, dtype: str = "float32", **own):
    return build_role(
        RoleConfig("policy", PolicyConfig(**SETTINGS | own), path, dtype, False, train_of(zero), 5), world
    )


def state(role) -> list[torch.Tensor]:
    """This rank's masters and moments, and the number of steps."""
    return [one.tensor.clone() for one in role.model.state() if one.tensor is not None]


def same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


def guarded(world: World, path: str, zero: dict, dtype: str) -> dict[str, bool]:
    """One rank's bad weight skips the update on all, and the next one is that of a twin who never saw it."""
    mine, twin = (policy(world, path, zero, dtype, schedule="constant", warmup_steps=0) for _ in range(2))
    start = {name: tensor.clone() for name, tensor in mine.weights()}
    good = share_of(mine, "dealt", global_batch())
    metrics = [updates(world, role, [0]) for role in (mine, twin)]
    facts = {"updates repeat": metrics[0] == metrics[1] and same(state(mine), state(twin))}
    if dtype == "bfloat16":
        facts |= rounded(path, mine, start, metrics[0][0])
    for value in (math.inf, math.nan):
        bad = share_of(mine, "dealt", global_batch())
        if world.rank == world.size - 1:
            bad.weights[bad.loss_mask] = value
        before, held = weights(mine), state(mine)
        metrics = mine.update(bad, loss, TEMPERATURE)
        facts[f"{value} is skipped"] = metrics["skipped"] == 1.0
        facts[f"{value} changes no weight"] = torch.equal(before, weights(mine))
        facts[f"{value} changes no state"] = same(held, state(mine)) and len(held) > 20
        after = [role.update(good, loss, TEMPERATURE) for role in (mine, twin)]
        facts[f"{value} is forgotten"] = after[0] == after[1] and same(state(mine), state(twin))
    facts["updates change"] = not torch.equal(before, weights(mine))
    return facts


def rounded(path: str, mine, start: dict[str, torch.Tensor], first: dict[str, float]) -> dict[str, bool]:
    """bfloat16 over float32 masters: what is published is what was stored, rounded; updates stay close to float32."""
    model = build_model(path, torch.float32, "cpu", attention="eager")
    stored = as_stored(model, {name: p.detach() for name, p in model.named_parameters()})
    total, _ = plain_backward(model, global_batch())
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    masters = [one.tensor for one in mine.model.state() if one.name.startswith("model/") and one.tensor is not None]
    return {
        "as stored, rounded": all(torch.equal(start[name], stored[name].bfloat16()) for name in stored),
        "masters are float32": all(t.dtype == torch.float32 for t in masters)
        and any(not torch.equal(t, t.bfloat16().float()) for t in masters),
        "close": abs(first["loss"] - total) < 0.05 and abs(first["grad_norm"] / float(norm) - 1) < 0.05,
    }


def exact(world: World, path: str, other: str, folder: str, zero: dict) -> dict[str, bool]:
    """Four updates in one go, against checkpoints after none and two, and resumes in a model of other weights."""
    straight, resumed, facts = policy(world, path, zero), policy(world, other, zero), {}
    for at in (0, 2):
        counters = save(world, straight, f"{folder}/{at}")
        went = updates(world, straight, range(at, at + 2))
        updates(world, resumed, [9])
        restore(resumed, f"{folder}/{at}", counters)
        facts[f"metrics {at}"] = went == updates(world, resumed, range(at, at + 2))
        facts[f"weights {at}"] = torch.equal(weights(straight), weights(resumed))
        facts[f"state {at}"] = same(state(straight), state(resumed))
    return facts


def others(world: World, path: str, zero: dict) -> dict[str, bool]:
    """A reference, which has no optimizer, and a critic, against plain torch."""
    batch = global_batch()
    frozen = build_role(
        RoleConfig("reference", ReferenceConfig(), path, "float32", False, train_of({"stage": zero["stage"]}), 5), world
    )
    share = share_of(frozen, "uneven", batch)
    model = build_model(path, torch.float32, "cpu", attention="sdpa")
    with torch.no_grad():
        wanted = [x * share.loss_mask for x in plain_forward(model, share)] if share.num_tokens else []
    pairs = list(zip(frozen.logprobs(share, TEMPERATURE), wanted))
    facts = {
        "reference": all(float((a - b).abs().max()) < 1e-5 for a, b in pairs),
        "nothing to save": not state(frozen),
    }
    own = CriticConfig(lr=1e-2, eps=1e-3)
    module = with_random_head(build_model(path, torch.float32, "cpu"))
    mine = role_of(module, Layout(world), RoleConfig("critic", own, path, "float32", False, train_of(zero), 5))
    errors = critic_errors(mine, path, own)
    start = build_role(RoleConfig("critic", own, path, "float32", False, train_of(zero), 5), world)
    return facts | {"critic": max(errors) < 1e-4, "values start at 0": not start.values(share).any()}


def checked(world: World, path: str, other: str, folder: str, cases) -> dict[str, dict[str, bool]]:
    """What is to be looked at under each of the settings."""
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    found, linear = {}, torch.nn.functional.linear
    for zero, what in cases:
        looks = {
            "guard float32": lambda zero=zero: guarded(world, path, zero, "float32"),
            "guard bfloat16": lambda zero=zero: guarded(world, path, zero, "bfloat16"),
            "exact": lambda zero=zero: exact(world, path, other, f"{folder}/{zero}", zero),
            "others": lambda zero=zero: others(world, path, zero),
        }
        found |= {f"{name} {zero}": looks[name]() for name in what}
    after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    compiled = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    facts = {"signals": handlers == after, "nothing is compiled": not compiled.exists()}
    return found | {"host": facts | {"linear": linear is torch.nn.functional.linear}}


@pytest.mark.parametrize("cases", CASES, ids=["few", "all"])
def test_zero_is_guarded_exact_rounded_and_every_role(cases, tmp_path, three) -> None:
    sizes = {"vocab_size": 263, "tie": True}
    path, other = (str(tiny("qwen2", tmp_path / str(seed), seed=seed, **sizes)) for seed in (0, 1))
    for found in three.run(checked, path, other, str(tmp_path / "state"), cases, ranks=[1, 2], timeout=280):
        wrong = {case: [name for name, holds in facts.items() if not holds] for case, facts in found.items()}
        assert not any(wrong.values()), json.dumps(wrong, indent=1)
        assert len(found) == sum(len(what) for _, what in cases) + 1
