"""What is DeepSpeed's alone: its guard against gradients that are not finite, exact resumes, bfloat16, other roles."""

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
from tests.dist.harness import run_ranks
from tests.dist.test_train_parity import as_stored, plain_values, value_loss, with_random_head
from tests.dist.test_train_state import restore, save, updates, weights
from tests.models import EXPERTS, tiny
from tests.training import SETTINGS, TEMPERATURE, global_batch, loss, plain_backward, plain_forward, share_of

ON_HOST = {"offload_optimizer": True}
FEW = [{"stage": 1}, {"stage": 3}]
ALL = [*FEW, {"stage": 2}, *({"stage": stage, **ON_HOST} for stage in (1, 2, 3))]
ZEROS = [FEW, pytest.param(ALL[2:], marks=pytest.mark.slow)]


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
    good = share_of(mine, "dealt", global_batch())
    facts = {}
    for role in (mine, twin):
        updates(world, role, [0])
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


def exact(world: World, path: str, other: str, folder: str, zero: dict) -> dict[str, bool]:
    """Four updates in one go, against a checkpoint after none or two and a resume in a model of other weights."""
    facts = {}
    for at in (0, 2):
        straight = policy(world, path, zero)
        updates(world, straight, range(at))
        counters = save(world, straight, f"{folder}/{at}")
        metrics = updates(world, straight, range(at, 4))
        resumed = policy(world, other, zero)
        updates(world, resumed, [9])
        restore(resumed, f"{folder}/{at}", counters)
        facts[f"metrics {at}"] = metrics == updates(world, resumed, range(at, 4))
        facts[f"weights {at}"] = torch.equal(weights(straight), weights(resumed))
        facts[f"state {at}"] = same(state(straight), state(resumed))
    return facts


def rounded(world: World, path: str, zero: dict) -> dict[str, bool]:
    """bfloat16 over float32 masters: what is published is what was stored, rounded; updates stay close to float32."""
    both = [policy(world, path, zero, "bfloat16") for _ in range(2)]
    model = build_model(path, torch.float32, "cpu", attention="eager")
    start = as_stored(model, {name: p.detach() for name, p in model.named_parameters()})
    held = [{name: tensor.clone() for name, tensor in role.weights()} for role in both]
    metrics = [updates(world, role, [0, 1]) for role in both]
    total, _ = plain_backward(model, global_batch())
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    masters = [one.tensor for one in both[0].model.state() if one.name.startswith("model/") and one.tensor is not None]
    return {
        "as stored, rounded": all(torch.equal(held[0][name], start[name].bfloat16()) for name in start),
        "masters are float32": all(t.dtype == torch.float32 for t in masters)
        and any(not torch.equal(t, t.bfloat16().float()) for t in masters),
        "updates repeat": metrics[0] == metrics[1] and same(state(both[0]), state(both[1])),
        "close": abs(metrics[0][0]["loss"] - total) < 0.05 and abs(metrics[0][0]["grad_norm"] / float(norm) - 1) < 0.05,
    }


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
    plain = with_random_head(build_model(path, torch.float32, "cpu", attention="eager"))
    adamw = torch.optim.AdamW(plain.parameters(), lr=own.lr, eps=own.eps, weight_decay=0.0)
    errors = []
    for _ in range(2):
        per_token, _ = value_loss(plain_values(plain, batch)[batch.loss_mask], batch)
        total = (per_token * batch.weights[batch.loss_mask]).sum()
        total.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), own.max_grad_norm))
        adamw.step()
        adamw.zero_grad()
        metrics = mine.update(share, value_loss)
        errors += [abs(metrics["loss"] / float(total) - 1), abs(metrics["grad_norm"] / norm - 1)]
        if share.num_tokens:
            errors.append(float((mine.values(share) - plain_values(plain, share)).abs().max()))
        else:
            mine.values(share)
    start = build_role(RoleConfig("critic", own, path, "float32", False, train_of(zero), 5), world)
    return facts | {"critic": max(errors) < 1e-4, "values start at 0": not start.values(share).any()}


def checked(world: World, path: str, other: str, folder: str, zeros: list[dict]) -> dict[str, dict[str, bool]]:
    """All of the above under each of `zeros`."""
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    found = {}
    for zero in zeros:
        found |= {f"guard {dtype} {zero}": guarded(world, path, zero, dtype) for dtype in ("float32", "bfloat16")}
        found[f"exact {zero}"] = exact(world, path, other, f"{folder}/{zero}", zero)
        found[f"rounded {zero}"] = rounded(world, path, zero)
        found[f"others {zero}"] = others(world, path, zero)
    after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    compiled = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    return found | {"host": {"signals": handlers == after, "nothing is compiled": not compiled.exists()}}


@pytest.mark.parametrize("zeros", ZEROS, ids=str)
def test_zero_is_guarded_exact_rounded_and_every_role(zeros: list[dict], tmp_path) -> None:
    sizes = {"vocab_size": 263, "tie": True}
    path, other = (str(tiny("qwen2", tmp_path / str(seed), seed=seed, **sizes)) for seed in (0, 1))
    args = (path, other, str(tmp_path / "state"), zeros)
    for found in run_ranks(2, checked, *args, timeout=280, env={"TORCH_EXTENSIONS_DIR": str(tmp_path / "compiled")}):
        wrong = {case: [name for name, holds in facts.items() if not holds] for case, facts in found.items()}
        assert not any(wrong.values()), json.dumps(wrong, indent=1)


def some_ranks(world: World, path: str) -> list[float] | None:
    """Two of three ranks train; the first one never meets them."""
    ours = world.subset("train", [1, 2])
    if ours is None:
        return None
    return [updates(ours, policy(ours, path, zero), [0])[0]["grad_norm"] for zero in FEW]


def test_some_of_the_ranks_may_train(tmp_path) -> None:
    path = str(tiny("qwen3_moe", tmp_path, **EXPERTS["qwen3_moe"]))
    model = build_model(path, torch.float32, "cpu", attention="eager")
    plain_backward(model, global_batch())
    norm = float(torch.stack([p.grad.norm() for p in model.parameters()]).norm())
    nothing, first, last = run_ranks(3, some_ranks, path, timeout=200)
    assert nothing is None and first == last == pytest.approx([norm, norm], rel=1e-5)
