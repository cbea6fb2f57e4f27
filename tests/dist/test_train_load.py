"""Loading at start: each rank reads its share of the file, holds its share in memory, and the forward pass agrees."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spmd_rl.config.schema import CriticConfig, PolicyConfig, RlvrConfig, TrainConfig
from spmd_rl.config.sections.models import FollowingReferenceConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.model.build import build_model
from spmd_rl.train import build_role
from tests.dist.harness import run_ranks
from tests.models import EXPERTS, tiny
from tests.training import SETTINGS, TEMPERATURE, backend, fsdp2_policy, global_batch, loss, share_of

MEBIBYTE = 2**20


def settings(path: str, **train) -> RlvrConfig:
    return RlvrConfig(policy=PolicyConfig(model=path, dtype="float32"), train=TrainConfig(**train))


def bytes_read(world: World) -> list[int]:
    """Of each role that has been built, as the journal has it."""
    lines = [json.loads(line) for line in world.journal.path.read_text().splitlines()]
    return [line["bytes"] for line in lines if line["event"] == "loaded"]


def start(world: World, path: str, name: str) -> dict[str, int]:
    """Bytes that the role's start reads, and by which it raises this process's peak of resident memory."""
    cfg = settings(path)
    build_role(settings(f"{path}/tiny").role(name), world)  # what is allocated once, whatever the model
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    build_role(cfg.role(name), world)
    return {"read": bytes_read(world)[-1], "peak": status("VmHWM") - before}


def status(key: str) -> int:
    """Bytes, of this process."""
    return int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
@pytest.mark.parametrize("name", ["policy", "reference"])
def test_no_rank_reads_or_holds_more_than_its_share(name: str, tmp_path) -> None:
    """Of 4 ranks: 1.1 of its share of the bytes; 1.5 of its share of the memory and the largest layer."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "vocab_size": 4000}
    path = tiny("llama", tmp_path, tie=True, **sizes, num_attention_heads=16, num_key_value_heads=8, head_dim=64)
    tiny("llama", tmp_path / "tiny", tie=True)
    model = (path / "model.safetensors").stat().st_size
    layer = 4 * (3 * 1024 * 2816 + 3 * 1024 * 1024)
    copies = 3 if name == "policy" else 1  # weights and two moments
    assert model > 250 * MEBIBYTE
    for seen in run_ranks(4, start, str(path), name, timeout=280):
        assert seen["read"] <= 1.1 * model / 4
        assert seen["peak"] <= 1.5 * copies * model / 4 + layer, {k: v // MEBIBYTE for k, v in seen.items()}


def as_whole(world: World, path: str, tp: int) -> dict[str, bool]:
    """Roles filled from the file against roles that take over a whole model, bit for bit."""
    batch, cfg = global_batch(), settings(path, tp=tp)
    cfg.policy, cfg.steps = PolicyConfig(model=path, dtype="float32", **SETTINGS), 5
    ours = build_role(cfg.role("policy"), world)
    whole = backend(world, path, axes={"tp": tp})
    share = share_of(ours, "uneven", batch)
    facts = {}
    for number in range(2):
        pairs = [role.logprobs(share, TEMPERATURE) for role in (ours, whole)]
        facts[f"logprobs {number}"] = all(map(torch.equal, *pairs))
        facts[f"metrics {number}"] = len({str(role.update(share, loss, TEMPERATURE)) for role in (ours, whole)}) == 1
    held = [{name: tensor.clone() for name, tensor in role.weights()} for role in (ours, whole)]
    facts["weights"] = all(torch.equal(held[0][name], held[1][name]) for name in held[1])
    critic = build_role(cfg.role("critic"), world)
    facts["values are zero"] = not critic.values(share).any()
    return facts | {"read": len(bytes_read(world)) == 2}


@pytest.mark.parametrize(("size", "tp"), [(1, 1), (3, 1), (2, 2), (4, 2)])
def test_a_role_filled_from_the_file_is_one_that_takes_over_a_whole_model(size: int, tp: int, tmp_path) -> None:
    path = tiny("qwen2", tmp_path, tie=size == 2, intermediate_size=90, vocab_size=263)
    for facts in run_ranks(size, as_whole, str(path), tp, timeout=200):
        assert all(facts.values()), facts


def experts(world: World, path: str) -> dict[str, bool]:
    """A mixture whose three experts two ranks cannot share out whole: names, bytes and the share that is read."""
    stored = load_file(Path(path) / "model.safetensors")
    facts = as_whole(world, path, 1)
    policy = build_role(settings(path).role("policy"), world)
    held = {name: tensor.clone() for name, tensor in policy.weights()}
    return facts | {
        "names": held.keys() == stored.keys(),
        "bytes": all(torch.equal(held[name], stored[name]) for name in stored),
        "share": bytes_read(world)[-1] <= 0.51 * sum(t.nbytes for t in stored.values()),
    }


def test_experts_are_read_by_share_and_leave_under_the_names_of_the_checkpoint(tmp_path) -> None:
    path = tiny("qwen3_moe", tmp_path, **EXPERTS["qwen3_moe"] | {"num_experts": 3})
    for facts in run_ranks(2, experts, str(path), timeout=200):
        assert all(facts.values()), facts


def own_settings(world: World, path: str, other: str) -> dict[str, bool]:
    """A reference and a critic with models, dtypes and layouts of their own."""
    cfg = RlvrConfig(
        policy=PolicyConfig(model=path, dtype="bfloat16"),
        reference=FollowingReferenceConfig(model=other, dtype="bfloat16", train={"tp": 2}),
        critic=CriticConfig(dtype="float32", train={"tokens_per_microbatch": 16}),
    )
    policy, reference, critic = (build_role(cfg.role(name), world) for name in ("policy", "reference", "critic"))
    batch = global_batch()
    values = critic.update(share_of(critic, "dealt", batch), lambda v, b: (v.square(), {}))
    held = {name: tensor.clone() for name, tensor in reference.weights()}
    stored = dict(build_model(other, torch.float32, "cpu").named_parameters())
    return {
        "layouts": [role.layout.size("tp") for role in (policy, reference, critic)] == [1, 2, 1],
        "shards": reference.layout.data.size == 1 and policy.layout.data.size == 2,
        "budget": values["num_microbatches"] > 2,
        "weights": all(torch.equal(held[name], p.bfloat16()) for name, p in stored.items()),
    }


def test_each_role_has_settings_of_its_own(tmp_path) -> None:
    path, other = tiny("llama", tmp_path / "a"), tiny("qwen3", tmp_path / "b", seed=1)
    for facts in run_ranks(2, own_settings, str(path), str(other), timeout=200):
        assert all(facts.values()), facts


def some_frozen(world: World, path: str, tp: int) -> dict[str, bool]:
    """A model of which one projection a layer is trained, over frozen weights in the compute dtype."""
    batch = global_batch()
    model = build_model(path, torch.float32, "cpu")
    for name, p in model.named_parameters():
        p.requires_grad_("up_proj" in name)
        if "up_proj" not in name:
            p.data = p.data.bfloat16()
    start = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    train, policy = TrainConfig(tokens_per_microbatch=50, tp=tp), PolicyConfig(**SETTINGS)
    mine = fsdp2_policy(model, Layout(world, tp=tp), train, torch.bfloat16, policy)
    metrics = mine.update(share_of(mine, "uneven", batch), loss, TEMPERATURE)
    held = {name: tensor.clone() for name, tensor in mine.weights()}
    return {
        "finite": 0 < metrics["grad_norm"] < 100,
        "frozen stay": all(torch.equal(held[name], p) for name, p in start.items() if "up_proj" not in name),
        "trained move": all(not torch.equal(held[name], p) for name, p in start.items() if "up_proj" in name),
    }


@pytest.mark.parametrize(("size", "tp"), [(1, 1), (2, 1), (2, 2)])
def test_parameters_are_frozen_one_by_one_and_of_more_than_one_dtype(size: int, tp: int, tmp_path) -> None:
    for facts in run_ranks(size, some_frozen, str(tiny("llama", tmp_path, tie=True)), tp, timeout=200):
        assert all(facts.values()), facts
