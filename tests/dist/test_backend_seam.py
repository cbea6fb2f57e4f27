"""Training backends side by side: each goes on from what another one has saved, on another number of ranks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmd_rl.base.errors import UserError
from spmd_rl.config.backends import backend
from spmd_rl.config.schema import PolicyConfig, TrainConfig
from spmd_rl.config.sections.models import RoleConfig
from spmd_rl.distributed import World
from spmd_rl.train import build_role
from tests.dist.test_train_state import save
from tests.models import EXPERTS, tiny
from tests.training import SETTINGS, TEMPERATURE, global_batch, loss, relative, share_of

ON_HOST = {"offload_optimizer": True}
TRAIN = {
    "fsdp2": {},
    "zero1": {"name": "deepspeed", "stage": 1},
    "zero2 on host": {"name": "deepspeed", "stage": 2, **ON_HOST},
    "zero3": {"name": "deepspeed", "stage": 3},
    "zero3 on host": {"name": "deepspeed", "stage": 3, **ON_HOST, "offload_param": True},
    "megatron": {"name": "megatron"},
}
STAGES = {"pp": 2}
"""Megatron's layout where there are two ranks; else it has data shards."""
EPS = 1e-3
"""It hides gradients that are rounding alone, of which AdamW would make whole steps."""
PAIRS = [("fsdp2", "zero3"), ("zero3", "megatron"), ("megatron", "zero1"), ("zero1", "fsdp2")]
OTHERS = [(writer, reader) for writer in TRAIN for reader in TRAIN]


def settings_of(name: str, world: World) -> dict:
    return TRAIN[name] | (STAGES if name == "megatron" and world.size == 2 else {})


def role_of(path: str, **train) -> RoleConfig:
    own = PolicyConfig(**SETTINGS, eps=EPS, dither=False)
    return RoleConfig("policy", own, path, "float32", False, TrainConfig(**train, tokens_per_microbatch=60), 5)


def step(role, seed: int) -> dict[str, float]:
    return role.update(share_of(role, "uneven", global_batch(seed)), loss, TEMPERATURE)


def whole(role) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in role.weights()}


def outputs(role) -> list[float]:
    """Logprobs and entropies of the batch, from the last data shard."""
    share = share_of(role, "last shard alone", global_batch())
    return [number for column in role.logprobs(share, TEMPERATURE) for number in column.tolist()]


def written(world: World, path: str, folder: str, names: list[str]) -> dict[str, tuple]:
    """Two updates, a checkpoint, and one update more."""
    found = {}
    for name in names:
        role = build_role(role_of(path, **settings_of(name, world)), world)
        for seed in range(2):
            assert step(role, seed)["grad_norm"] > SETTINGS["max_grad_norm"]
        counters, before = save(world, role, f"{folder}/{name}"), outputs(role)
        found[name] = counters, before, step(role, 3)
        after = whole(role)
        if world.rank == 0:
            save_file(after, f"{folder}/{name}.after")
        role.close()
    return found


def resumed(world: World, other: str, folder: str, pairs: list[tuple[str, str]], wanted) -> dict[str, list[float]]:
    """Errors of the outputs right after the checkpoint was read, of the next update's metrics, and of its weights."""
    found = {}
    for writer, reader in pairs:
        counters, before, went = wanted[writer]
        role = build_role(role_of(other, **settings_of(reader, world)), world)
        outputs(role)  # leaves nothing gathered that a load would not see
        role.load(Path(f"{folder}/{writer}"))
        role.load_counters(counters)
        apart = [abs(a - b) for a, b in zip(outputs(role), before)]
        goes, after, held = step(role, 3), load_file(f"{folder}/{writer}.after"), whole(role)
        assert held.keys() == after.keys()
        metrics = max(abs(goes[key] - went[key]) / abs(went[key]) for key in ("loss", "grad_norm", "lr"))
        found[f"{writer} to {reader}"] = [
            max(apart, default=0.0),
            metrics,
            max(relative(held[key], after[key]) for key in after),
        ]
        role.close()
    return found


@pytest.mark.parametrize(
    ("size", "later", "pairs", "kind"),
    [
        (2, 1, PAIRS, "qwen3_moe"),
        pytest.param(2, 3, PAIRS, "qwen3_moe", marks=pytest.mark.slow),
        pytest.param(2, 1, OTHERS, "llama", marks=pytest.mark.slow),
        pytest.param(3, 2, OTHERS, "qwen3_moe", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_backend_goes_on_from_what_another_has_saved(
    size: int, later: int, pairs, kind: str, tmp_path, three
) -> None:
    sizes = EXPERTS[kind] | {"num_experts": 3} if kind in EXPERTS else {"tie": True}
    path, other = (str(tiny(kind, tmp_path / str(seed), seed=seed, vocab_size=263, **sizes)) for seed in (0, 1))
    writers, last = list(dict.fromkeys(writer for writer, _ in pairs)), [0, 1, 2]
    wanted = three.run(written, path, str(tmp_path), writers, ranks=last[-size:], timeout=280)[-1]  # has all samples
    found = three.run(resumed, other, str(tmp_path), pairs, wanted, ranks=last[-later:], timeout=280)
    for pair, (logprobs, metrics, weights) in found[-1].items():
        assert logprobs < 2e-6 and metrics < 1e-5 and weights < 1e-5, (pair, logprobs, metrics, weights)
    assert len(found[-1]) == len(pairs)


def test_settings_that_a_backend_lacks_are_refused_before_torch(tmp_path) -> None:
    path = tiny("llama", tmp_path)
    good = role_of(str(path), name="deepspeed")
    backend("deepspeed").check(good, path)
    for changed, said in (
        ({"tp": 2}, "train.tp: not supported by train=deepspeed; must be 1"),
        ({"compile": True}, "train.compile: not supported by train=deepspeed; must be False"),
        ({"name": "fsdp2", "stage": 2}, "train.stage: not supported by train=fsdp2; must be 3"),
        ({"stage": 2, "offload_param": True}, "train.offload_param: needs train.stage=3"),
        ({"activation_checkpointing": "selective"}, "train.activation_checkpointing: selective needs train.stage="),
    ):
        train = replace(good.train, **changed)
        with pytest.raises(UserError, match=said):
            backend(train.name).check(replace(good, train=train), path)
    backend("fsdp2").check(replace(good, train=TrainConfig(compile=True, tp=2, cp=2)), path)
    with pytest.raises(UserError, match="train.compile: not supported with pp > 1"):
        backend("fsdp2").check(replace(good, train=TrainConfig(compile=True, pp=2)), path)
    for own, said in (
        ({"optimizer": "muon"}, "policy.optimizer: train=deepspeed has no optimizer muon; known: adamw"),
        ({"router_aux_coef": 0.1}, "policy.router_aux_coef: not supported by train=deepspeed; must be 0"),
        ({"router_replay": True}, "policy.router_replay: not supported by train=deepspeed; must be False"),
    ):
        with pytest.raises(UserError, match=said):
            backend("deepspeed").check(replace(good, own=replace(good.own, **own)), path)
    with pytest.raises(UserError, match="train.pp: cohere scales its hidden states; must be 1"):
        scaling = tiny("cohere", tmp_path / "cohere", tie=True, logit_scale=0.3)
        backend("fsdp2").check(replace(good, train=TrainConfig(pp=2)), scaling)
