"""Adapters against peft's own on one process: gradients in every layout, what is published, and the model without them.

Gradients are read off the saved adapters, as in `test_train_parity.py`.
"""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig as Peft
from peft import get_peft_model

from spmd_rl.config.schema import PolicyConfig, TrainConfig
from spmd_rl.config.sections.lora import LoraConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.model.build import build_model, weights_of
from spmd_rl.model.load import local, owned_region
from spmd_rl.model.lora import PREFIX
from spmd_rl.train.adapter_off import AdapterOff
from spmd_rl.train.state import MODEL, OPTIMIZER, SavedState
from tests.dist.harness import run_ranks
from tests.models import EXPERTS, tiny
from tests.training import (
    TEMPERATURE,
    fsdp2_policy,
    global_batch,
    loss,
    plain_backward,
    plain_forward,
    relative,
    share_of,
)
from tests.unit.test_sharing import exact

HUGE = 1e6
AS_GRADIENT = {"eps": HUGE, "max_grad_norm": 1e9, "weight_decay": 0.0, "schedule": "constant", "warmup_steps": 0}
SIZES = {"head_dim": 8, "intermediate_size": 90, "vocab_size": 263}  # of these nothing divides by 4
MODELS = {
    "llama": ("llama", {"tie": True, **SIZES}),
    "qwen2": ("qwen2", {**SIZES, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "qwen3_moe": ("qwen3_moe", {**SIZES, **EXPERTS["qwen3_moe"]}),
}
LORA = {"rank": 4, "alpha": 6.0}
LAYOUTS = [
    (1, {}, "llama", LORA | {"dora": True}),
    (2, {}, "llama", LORA | {"rslora": True, "targets": ["q_proj", "down_proj"]}),
    (2, {}, "llama", LORA | {"dora": True}),
    (2, {"tp": 2}, "llama", LORA),
    (3, {"tp": 3}, "qwen2", LORA),
    (4, {"tp": 4}, "llama", LORA),
    (2, {"cp": 2}, "qwen2", LORA),
    (2, {"pp": 2}, "llama", LORA),
    (4, {"tp": 2, "pp": 2}, "llama", LORA),
    (2, {"ep": 2}, "qwen3_moe", LORA),
    (2, {"dp_replicate": 2}, "qwen2", LORA),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: str(tiny(kind, folder / name, **sizes)) for name, (kind, sizes) in MODELS.items()}


def value(name: str, shape: torch.Size) -> torch.Tensor:
    """What an adapter's tensor is set to: `B` too, which begins at 0, where `A` would have no gradient."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)
    return 0.2 * drawn if len(shape) == 2 else 1 + 0.2 * drawn


def with_peft(model: torch.nn.Module, own: dict) -> torch.nn.Module:
    """The model inside of peft's, its adapters set."""
    settings = LoraConfig(**own)
    targets = settings.targets or [
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *(("gate_proj", "up_proj", "down_proj") if not hasattr(model.config, "num_experts") else ()),
    ]
    theirs = Peft(
        r=settings.rank, lora_alpha=settings.alpha, target_modules=targets, use_rslora=settings.rslora,
        use_dora=settings.dora, task_type="CAUSAL_LM",
    )  # fmt: skip
    model = get_peft_model(model, theirs)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.copy_(value(name.removeprefix(PREFIX), p.shape))
    return model


def stored_name(name: str) -> str:
    """Under which a state has one of peft's parameters."""
    return MODEL + name.replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector")


def saved(world: World, role, folder: Path) -> SavedState:
    """[all]"""
    if world.rank == 0:
        folder.mkdir()
    world.barrier("folder")
    role.save(folder)
    world.barrier("saved")
    return SavedState.open(folder)


def compared(world: World, path: str, axes: dict[str, int], own: dict, dtype: str, folder: str) -> dict[str, float]:
    """Relative errors of gradients and norm; largest ones of logprobs, of merged weights, and of the base's logprobs."""
    train, whole = TrainConfig(tokens_per_microbatch=60, **axes), global_batch()
    settings = PolicyConfig(lr=HUGE, lora=LoraConfig(**own), **AS_GRADIENT)
    build = exact if dtype == "float64" else lambda model: model
    model = build(build_model(path, getattr(torch, dtype), "cpu"))
    mine = fsdp2_policy(model, Layout(world, **train.axes), train, getattr(torch, dtype), settings, 5)
    with torch.no_grad():
        for name, p in mine.model.module.named_parameters():
            if p.requires_grad:
                local(p).copy_(value(name, p.shape)[owned_region(p)])
    share = share_of(mine, "uneven", whole)
    base = build(build_model(path, getattr(torch, dtype), "cpu", attention="sdpa"))
    errors = {}
    with torch.no_grad():
        wanted = plain_forward(base, share)[0] * share.loss_mask if share.num_tokens else torch.zeros(0)
    for _ in range(2):
        got = AdapterOff(mine).logprobs(share, TEMPERATURE)[0]
        errors["base"] = max([errors.get("base", 0.0), *(got - wanted).abs().tolist()])
    plain = with_peft(base, own)
    with torch.no_grad():
        wanted = plain_forward(plain, share)[0] * share.loss_mask if share.num_tokens else torch.zeros(0)
    errors["logprobs"] = max([0.0, *(mine.logprobs(share, TEMPERATURE)[0] - wanted).abs().tolist()])
    published = {name: tensor.clone() for name, tensor in mine.weights()}
    before = saved(world, mine, Path(folder, "before"))
    metrics = mine.update(share, loss, TEMPERATURE)
    after = saved(world, mine, Path(folder, "after"))
    total, _ = plain_backward(plain, whole)
    trained = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    assert {stored_name(name) for name in trained} ^ {name for name in after.tensors if name.startswith(MODEL)} == set()
    assert sum(name.startswith(f"{OPTIMIZER}exp_avg/") for name in after.tensors) == len(trained)
    for name, p in trained.items():
        read = [state.read(stored_name(name)) for state in (before, after)]
        errors[name] = relative(read[0] - read[1], p.grad)
    norm = float(torch.stack([p.grad.double().norm() for p in trained.values()]).norm())
    errors |= {"norm": abs(metrics["grad_norm"] / norm - 1), "loss": abs(metrics["loss"] / total - 1)}
    wanted = weights_of(plain.merge_and_unload())
    assert published.keys() == wanted.keys()
    errors["published"] = max(relative(published[name], tensor) for name, tensor in wanted.items())
    return errors


@pytest.mark.parametrize(("size", "axes", "kind", "own"), LAYOUTS, ids=str)
def test_gradients_and_published_weights_are_pefts(size: int, axes, kind: str, own, models, tmp_path) -> None:
    per_machine = size // axes.get("dp_replicate", 1)
    dtype, limit = ("float32", 2e-6)
    for found in run_ranks(size, compared, models[kind], axes, own, dtype, str(tmp_path), per_machine=per_machine):
        worst = max(found, key=found.get)
        print(size, axes, kind, own, worst, found[worst], {k: found[k] for k in ("base", "logprobs", "published")})
        assert found[worst] < limit, (worst, found[worst])
