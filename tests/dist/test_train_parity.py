"""Every backend and layout against plain single-process Hugging Face + torch on a padded batch.

The gradient is the same for every layout, every split of the samples over data shards (empty ones too) and every
micro-batch budget. Gradients are read off the exported weights: with an epsilon far above any gradient AdamW's first
step is lr / eps times the gradient.
"""

from functools import cache, partial
from itertools import pairwise

import pytest
import torch

from spmd_rl.base.errors import UserError
from spmd_rl.config.schema import CriticConfig, PolicyConfig, TrainConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.model.build import build_model, weights_of
from spmd_rl.model.load import local
from spmd_rl.model.stored import stored_parts
from spmd_rl.model.value_head import with_value_head
from tests.dist.harness import run_ranks
from tests.models import EXPERTS, tiny
from tests.training import (
    SETTINGS,
    TEMPERATURE,
    backend,
    built,
    fsdp2_critic,
    fsdp2_policy,
    global_batch,
    loss,
    plain_backward,
    plain_forward,
    relative,
    share_of,
)
from tests.unit.test_sharing import exact

BACKENDS = {"fsdp2": backend} | {name: partial(built, name) for name in ("deepspeed", "megatron")}
TP2, TP3, CP2, PP2 = {"tp": 2}, {"tp": 3}, {"cp": 2}, {"pp": 2}
EP1, EP2 = {"ep": 1}, {"ep": 2}
MIXED = [(1, EP1, 1), (2, EP1, 1), (2, EP2, 1), (4, EP2, 1), (2, TP2 | EP2, 1), (4, TP2 | EP2, 2)]
"""Of mixtures: of six experts two ranks along `ep` hold three each, which two others cannot share out whole."""
COPIES = {"dp_replicate": 2}
"""Each copy of the model is on a machine of its own."""
LAYOUTS = [(1, {}, 1), (2, {}, 2), (4, {}, 1), (2, TP2, 3), (3, TP3, 2), (2, CP2, 3), (4, TP2 | CP2, 1), (2, PP2, 2)]
"""Ranks, the sizes of their layout, and how many models: what tells these apart is how they are loaded and split, for
which two or three ranks are enough."""
SIZES = {"head_dim": 8, "intermediate_size": 90, "vocab_size": 263}  # of these nothing divides by 4
FEW_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EVEN = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "initializer_range": 0.06}
"""So that each expert has tokens, or there would be no gradient of it"""
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
YARN |= {"mscale": 0.7, "mscale_all_dim": 1.0}
MODELS = {
    "llama": ("llama", {"tie": True, **SIZES, **FEW_HEADS}),
    "smollm2": ("llama", {"tie": True, **SIZES, "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "qwen2": ("qwen2", {**SIZES, "num_attention_heads": 12, "num_key_value_heads": 6}),
    "qwen3": ("qwen3", {**SIZES, **FEW_HEADS}),
    "qwen3_moe": ("qwen3_moe", {**SIZES, **FEW_HEADS, **EXPERTS["qwen3_moe"], "num_experts": 6}),
    "mixtral": ("mixtral", {**SIZES, **FEW_HEADS, **EXPERTS["mixtral"], "intermediate_size": 96}),
    "deepseek_v3": ("deepseek_v3", {**SIZES, **EXPERTS["deepseek_v3"], **EVEN, "rope_parameters": YARN}),
    "deep": ("llama", {"num_hidden_layers": 8, **SIZES, **FEW_HEADS}),
}
MIXTURES = ("qwen3_moe", "mixtral", "deepseek_v3")
WITH_DATA = [(PP2, 1), (COPIES, 1)]
"""Of four ranks: two of each stage or copy share out data."""
TWO_AXES = [
    (TP2, 3),
    (PP2 | TP2, 3),
    (PP2 | CP2, 3),
    (PP2 | COPIES, 3),
    (EP2 | CP2, 3),
    (EP2 | COPIES, 2),
    (PP2 | EP2, 1),
    (TP2 | EP1, 1),
    (TP2 | CP2 | EP2, 1),
    (TP2 | PP2 | EP2, 1),
    (TP2 | COPIES | EP2, 2),
]
LARGE = [pytest.param(4, axes, count, marks=pytest.mark.slow) for axes, count in [*TWO_AXES, *WITH_DATA]]
THREE_AXES = [CP2 | TP2, PP2 | TP2, PP2 | CP2 | TP2, PP2 | CP2 | EP2, PP2 | COPIES | EP2, COPIES | CP2 | TP2]
"""Of eight ranks: what the axes leave are data shards."""
LARGE += [pytest.param(8, axes, 1, marks=pytest.mark.slow) for axes in THREE_AXES]
UPDATES = [pytest.param(*layout, marks=pytest.mark.slow) for layout in [*LAYOUTS, (4, TP2, 3), (2, COPIES, 1)]]
"""The optimizer sees shards and nothing of the layout: where gradients are right, three layouts stand for all."""
CHOSEN = {1: ("llama", "qwen2", "smollm2"), 2: ("llama", "qwen2", "qwen3"), 3: ("smollm2", "qwen2")}
"""By tensor-parallel size. Qwen3's norms of each head have gradients that are summed over the ranks; SmolLM2's heads do
not divide by 2, so that context parallelism gathers keys where it exchanges heads of the others."""
ON_HOST = {"offload_optimizer": True}
ZEROS = [{"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, **ON_HOST, "offload_param": True}]
OTHER_ZEROS = [*ZEROS, {"stage": 1, **ON_HOST}, {"stage": 2, **ON_HOST}, {"stage": 3, **ON_HOST}]
"""Settings of DeepSpeed"""
VPP2 = {"pp": 2, "vpp": 2}
"""Both neighbours of a stage are one rank"""
MEGATRON = [("llama", TP2), ("qwen2", PP2), ("smollm2", CP2), ("qwen3_moe", EP2), ("qwen3", {}), ("deep", VPP2)]
MEGATRON += [("deepseek_v3", TP2)]
MORE = [("qwen3", TP2), ("mixtral", EP2), ("qwen3_moe", TP2), ("mixtral", TP2 | EP2), ("qwen3_moe", PP2)]
OF_FOUR = [("llama", TP2 | PP2), ("qwen3", TP2), ("qwen2", PP2), ("llama", TP2 | CP2), ("qwen3", PP2 | CP2)]
OF_FOUR += [("qwen3_moe", EP2), ("mixtral", TP2 | EP2), ("qwen3_moe", PP2 | EP2), ("mixtral", EP2 | CP2)]
OF_FOUR += [("deep", {"pp": 4, "vpp": 2}), ("llama", PP2)]
LATENT = [("deepseek_v3", axes) for axes in ({}, PP2, CP2, EP2, TP2 | EP2)]
OF_FOUR += [("deepseek_v3", axes) for axes in (TP2 | PP2, PP2 | EP2)]
"""Models and layouts of Megatron"""
QUICK = [
    ("deepspeed", [("llama", ZEROS[1]), ("llama", ZEROS[3]), ("qwen3_moe", ZEROS[2]), ("qwen3_moe", ZEROS[0])]),
    ("megatron", MEGATRON),
]
"""By backend, models and settings; each of `CASES` with some of them."""
SLOW = [(2, "megatron", MEGATRON)]
SLOW += [
    (size, "deepspeed", [(model, zero) for model in ("llama", "qwen2", "qwen3_moe", "mixtral") for zero in OTHER_ZEROS])
    for size in (1, 2, 3)
]
SLOW += [
    (2, "megatron", [("deep", {"pp": 2, "vpp": 4})]),
    (1, "megatron", [(model, {}) for model in ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3")]),
]
SLOW += [(2, "megatron", MORE), (2, "megatron", LATENT), (3, "megatron", [("smollm2", TP3), ("qwen2", TP3)])]
SLOW += [(4, "megatron", OF_FOUR[at::2]) for at in (0, 1)]
HUGE = 1e12
AS_GRADIENT = {"max_grad_norm": HUGE, "eps": HUGE, "weight_decay": 0.0, "schedule": "constant", "warmup_steps": 0}
CASES = {
    "float32": [("dealt", 50, "full"), ("last shard alone", 10_000, "none"), ("uneven", 1, "selective")],
    "float64": [("uneven", 50, "selective"), ("dealt", 50, "none", "truncated")],
}
"""Share, micro-batch budget, activation checkpointing, whether tokens were cut off from the distribution."""
OF_A_SPLIT = {"float32": CASES["float32"][:1], "float64": CASES["float64"]}
"""Where layers are split too: how samples are shared and batched has nothing to do with that."""
LIMITS = {"float32": 1e-5, "float64": 1e-10}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: str(tiny(kind, folder / name, **sizes)) for name, (kind, sizes) in MODELS.items()}


def exported(mine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in mine.weights()}


def as_stored(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by parameter as tensors by the name of a checkpoint, in which each expert has its own."""
    parts = stored_parts(model)
    return {part.name: part.of(tensor) for name, tensor in tensors.items() for part in parts[name]}


@cache
def reference(path: str, dtype: str, truncated: bool) -> tuple[torch.nn.Module, float, dict[str, float]]:
    """The model with plain torch's gradients, its loss, and the means of the loss's quantities."""
    model = build_model(path, getattr(torch, dtype), "cpu", attention="sdpa")
    model = exact(model) if dtype == "float64" else model
    return model, *plain_backward(model, global_batch(truncated=truncated))


def chosen_models(models: dict[str, str], axes: dict[str, int], count: int) -> dict[str, str]:
    chosen = MIXTURES if "ep" in axes else CHOSEN[axes.get("tp", 1)]
    return {model: models[model] for model in chosen[:count]}


def gradients(world: World, build, path, axes: dict[str, int], dtype: str, case) -> dict[str, float]:
    """Relative L2 error of each gradient, of the loss and of the norm."""
    share, budget, checkpointing, *truncated = case
    whole = global_batch(truncated=bool(truncated))
    scale = 100.0 if dtype == "float32" else 1.0  # a float32 weight rounds away what is much smaller than itself
    options = {"dtype": dtype, "master": dtype, "budget": budget, "checkpointing": checkpointing}
    mine = build(world, path, **options, axes=axes, **AS_GRADIENT, lr=scale * HUGE)
    before = exported(mine)
    metrics = mine.update(share_of(mine, share, whole), loss, TEMPERATURE)
    world.agree("metrics", metrics)
    after = exported(mine)
    model, total, means = reference(path, dtype, bool(truncated))
    wanted = as_stored(model, {name: p.grad for name, p in model.named_parameters()})
    assert before.keys() == weights_of(model).keys()
    for name, p in as_stored(model, dict(model.named_parameters())).items():
        assert torch.equal(before[name], p)
    norm = torch.stack([g.double().norm() for g in wanted.values()]).norm()
    errors = {name: relative((before[name] - after[name]) / scale, g) for name, g in wanted.items()}
    errors |= {"grad_norm": abs(metrics["grad_norm"] / float(norm) - 1), "loss": abs(metrics["loss"] / total - 1)}
    return errors | {name: abs(metrics[name] / mean - 1) for name, mean in means.items()}


def all_gradients(world: World, name: str, paths: dict[str, str], axes: dict[str, int]) -> dict[str, dict[str, float]]:
    return {
        f"{model} {dtype} {case}": gradients(world, BACKENDS[name], path, axes, dtype, case)
        for model, path in paths.items()
        for dtype, cases in (OF_A_SPLIT if "tp" in axes else CASES).items()
        for case in cases
        if ("truncated" not in case or model == "llama")
        # where some gradients are so small that float32 weights round them away
        and (dtype == "float64" or model not in ("deepseek_v3", "granite"))
    }


def errors_of(world: World, name: str, paths: dict[str, str], chosen, every: bool) -> dict[str, list]:
    """Errors of gradients, and of three updates, by model and settings; `every`: all of `CASES` with each of them."""
    found = {}
    for place, (model, own) in enumerate(chosen):
        cases = (OF_A_SPLIT if "tp" in own else CASES)["float32"] if every else [CASES["float32"][place % 3]]
        path = paths[model]
        errors = {str(case): gradients(world, BACKENDS[name], path, own, "float32", case) for case in cases}
        found[f"{model} {own}"] = [errors, three_updates(world, name, path, own)]
    return found


def too_large(errors: dict[str, float], dtype: str) -> dict[str, float]:
    """Those that are not below the limit; one that is no number never is."""
    return {name: error for name, error in errors.items() if not error < LIMITS[dtype]}


@pytest.mark.parametrize("name", ["fsdp2"])
@pytest.mark.parametrize(
    ("size", "axes", "count"),
    [*LAYOUTS, *MIXED, *LARGE],
    ids=str,
)
def test_the_gradient_is_the_same_in_every_layout(
    name: str, size: int, axes: dict[str, int], count: int, models
) -> None:
    args = (all_gradients, name, chosen_models(models, axes, count), axes)
    for errors in run_ranks(size, *args, per_machine=size // axes.get("dp_replicate", 1), timeout=280):
        for case, found in errors.items():
            assert not (wrong := too_large(found, case.split()[1])), (case, wrong)


def assert_follows_plain_torch(found: list[dict[str, list]], count: int) -> None:
    for of_rank in found:
        assert len(of_rank) == count
        for case, (gradients_of, (drift, logprobs, entropy)) in of_rank.items():
            for share, errors in gradients_of.items():
                assert not (wrong := too_large(errors, "float32")), (case, share, wrong)
            assert drift < 1e-5 and max(logprobs, entropy) < 1e-4, (case, drift, logprobs, entropy)


@pytest.mark.parametrize(("name", "chosen"), QUICK, ids=str)
def test_other_backends_follow_plain_torch(name: str, chosen, models, three) -> None:
    found = three.run(errors_of, name, models, chosen, False, ranks=[1, 2], timeout=560)
    assert_follows_plain_torch(found, len(chosen))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "name", "chosen"), SLOW, ids=str)
def test_other_backends_follow_plain_torch_in_every_layout(size: int, name: str, chosen, models) -> None:
    assert_follows_plain_torch(run_ranks(size, errors_of, name, models, chosen, True, timeout=560), len(chosen))


SCALED = {
    "cohere": {"tie": True, "logit_scale": 0.3},
    "granite": {"logits_scaling": 6.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.2},
}


@pytest.mark.parametrize("axes", [{}, TP2], ids=str)
def test_models_that_scale_their_logits(axes: dict[str, int], tmp_path) -> None:
    paths = {kind: str(tiny(kind, tmp_path / kind, **SIZES, **FEW_HEADS, **own)) for kind, own in SCALED.items()}
    for errors in run_ranks(2, all_gradients, "fsdp2", paths, axes, timeout=280):
        for case, found in errors.items():
            worst, limit = max(found, key=found.get), LIMITS[case.split()[1]]
            if case.startswith("cohere float64"):
                limit = 1e-6  # its norms are computed in float32 whatever the dtype
            assert found[worst] < limit, (case, worst, found[worst])


def three_updates(world: World, name: str, path: str, axes: dict[str, int]) -> list[float]:
    """Errors of exported weights, logprobs and entropy after three updates of torch's own AdamW and clipping.

    An epsilon of 1e-3 hides gradients that are rounding alone, of which AdamW would make whole steps.
    """
    eps = 1e-3
    mine = BACKENDS[name](world, path, budget=60, axes=axes, eps=eps)
    batch = global_batch()
    share = share_of(mine, "dealt", batch)
    model = build_model(path, torch.float32, "cpu", attention="sdpa")
    adamw = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=SETTINGS["weight_decay"], eps=eps)
    for rate in (0.5e-2, 1e-2, 1e-2):
        total, _ = plain_backward(model, batch)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS["max_grad_norm"])
        assert norm > SETTINGS["max_grad_norm"]
        adamw.param_groups[0]["lr"] = rate
        adamw.step()
        adamw.zero_grad()
        metrics = mine.update(share, loss, TEMPERATURE)
        world.agree("metrics", metrics)
        assert metrics["lr"] == pytest.approx(rate)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert metrics["loss"] == pytest.approx(total, abs=1e-5)
        assert metrics["skipped"] == 0
    with torch.no_grad():
        wanted = [x * share.loss_mask for x in plain_forward(model, share)] if share.num_tokens else []
    got = mine.logprobs(share, TEMPERATURE)
    held, wholes = exported(mine), as_stored(model, dict(model.named_parameters()))
    assert held.keys() == weights_of(model).keys()
    drift = max(relative(held[key], whole) for key, whole in wholes.items())
    return [drift, *(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True))]


def all_updates(world: World, name: str, paths: dict[str, str], axes: dict[str, int]) -> dict[str, list[float]]:
    return {model: three_updates(world, name, path, axes) for model, path in paths.items()}


@pytest.mark.parametrize("name", ["fsdp2"])
@pytest.mark.parametrize(
    ("size", "axes", "count"),
    [(2, {}, 1), (2, TP2, 1), (2, CP2, 1), (2, EP2, 1), (2, PP2, 1), (4, TP2, 1), (4, TP2 | COPIES, 1), *UPDATES],
    ids=str,
)
def test_three_updates_follow_plain_torch(name: str, size: int, axes: dict[str, int], count: int, models) -> None:
    args = (all_updates, name, chosen_models(models, axes, count), axes)
    for found in run_ranks(size, *args, per_machine=size // axes.get("dp_replicate", 1), timeout=200):
        for model, (drift, logprobs, entropy) in found.items():
            assert drift < 1e-5, (model, drift)
            assert max(logprobs, entropy) < 1e-4, (model, logprobs, entropy)


def value_loss(values, batch):
    """Against targets of the batch, not linear."""
    error = values - batch.advantages[batch.loss_mask]
    return error.square() + 0.1 * error**3, {"critic/values/mean": values.detach()}


def with_random_head(model):
    """A value head that is not zero, so that gradients reach the layers."""
    head = with_value_head(model).get_output_embeddings()
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(3))
    torch.nn.init.constant_(head.bias, 0.3)
    return model


def plain_values(model, batch) -> torch.Tensor:
    """What stands before each token of the loss mask, [T], by a linear layer on the last hidden states."""
    head, bounds = model.get_output_embeddings(), batch.starts.tolist()
    values = torch.zeros(batch.num_tokens)
    for begin, end in pairwise(bounds):
        hidden = model.model(input_ids=batch.token_ids[None, begin:end]).last_hidden_state[0]
        values[begin + 1 : end] = (hidden @ head.weight[0] + head.bias[0])[:-1]
    return values * batch.loss_mask


def critic_errors(mine, path: str, settings: CriticConfig) -> list[float]:
    """Errors of a critic `with_random_head`: of values before and after two updates, of the losses and of the norms."""
    plain, found = with_random_head(build_model(path, torch.float32, "cpu", attention="eager")), []
    adamw = torch.optim.AdamW(plain.parameters(), lr=settings.lr, eps=settings.eps, weight_decay=0.0)
    batch = global_batch()
    share = share_of(mine, "uneven", batch)
    for _ in range(2):
        wanted, got = plain_values(plain, share), mine.values(share)
        found.append(float((got - wanted).abs().amax()) if share.num_tokens else 0.0)
        per_token, _ = value_loss(plain_values(plain, batch)[batch.loss_mask], batch)
        total = (per_token * batch.weights[batch.loss_mask]).sum()
        total.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), settings.max_grad_norm))
        adamw.step()
        adamw.zero_grad()
        metrics = mine.update(share, value_loss)
        found += [abs(metrics["loss"] / float(total) - 1), abs(metrics["grad_norm"] / norm - 1)]
    last = (mine.values(share) - plain_values(plain, share)).detach().abs()
    return [*found, float(last.amax()) if share.num_tokens else 0.0]


def critics(world: World, paths: list[str], axes: dict[str, int]) -> list[float]:
    found = []
    for path in paths:
        settings, train = CriticConfig(lr=1e-2, eps=1e-3), TrainConfig(tokens_per_microbatch=50, **axes)
        model = with_random_head(build_model(path, torch.float32, "cpu"))
        mine = fsdp2_critic(model, Layout(world, **train.axes), train, torch.float32, settings, 5)
        found += critic_errors(mine, path, settings)
    return found


@pytest.mark.parametrize(("size", "axes"), [(2, {}), (2, TP2), (2, CP2), (2, PP2)], ids=str)
def test_the_critic_follows_plain_torch(size: int, axes: dict[str, int], models) -> None:
    for found in run_ranks(size, critics, [models["llama"], models["qwen2"]], axes, timeout=200):
        assert len(found) == 14 and max(found) < 1e-4, found


def bfloat16(world: World, path: str, axes: dict[str, int]) -> dict[str, bool]:
    """Published weights are bitwise those of the forward pass; updates repeat bitwise and stay close to float32."""
    train, batch = TrainConfig(tokens_per_microbatch=50), global_batch()
    roles, seen = [], {}
    for _ in range(2):
        model = build_model(path, torch.float32, "cpu")
        whole = {key: p.detach().clone() for key, p in as_stored(model, dict(model.named_parameters())).items()}
        roles.append(fsdp2_policy(model, Layout(world, **axes), train, torch.bfloat16, PolicyConfig(**SETTINGS)))
    for key, module in model.named_modules():
        if isinstance(getattr(module, "weight", None), torch.nn.Parameter):
            name = f"{key}.weight"
            module.register_forward_pre_hook(
                lambda m, _, name=name: seen.update({name: local(m.weight.detach()).clone()})
            )
    share = share_of(roles[0], "uneven", batch)
    roles[1].logprobs(share, TEMPERATURE)
    held = exported(roles[1])
    metrics = [role.update(share, loss, TEMPERATURE) for role in roles]
    after = [exported(role) for role in roles]
    plain = build_model(path, torch.float32, "cpu", attention="eager")
    total, _ = plain_backward(plain, batch)
    norm = torch.stack([p.grad.norm() for p in plain.parameters()]).norm()
    compared = [name for name in seen if name in held and held[name].shape == seen[name].shape]
    return {
        "as in forward": all(torch.equal(held[name], seen[name]) for name in compared) and len(compared) > 4,
        "as the cast master": all(torch.equal(held[name], whole[name].bfloat16()) for name in whole),
        "updates repeat": metrics[0] == metrics[1] and all(torch.equal(after[0][k], after[1][k]) for k in whole),
        "updates change": any(not torch.equal(after[0][k], held[k]) for k in whole),
        "close": abs(metrics[0]["loss"] - total) < 0.05 and abs(metrics[0]["grad_norm"] / float(norm) - 1) < 0.05,
    }


@pytest.mark.parametrize(("size", "axes"), [(1, {}), (2, {}), (2, TP2), (2, CP2), (2, EP2), (2, PP2)], ids=str)
def test_bfloat16_over_float32_masters(size: int, axes: dict[str, int], models) -> None:
    model = models["qwen3_moe" if "ep" in axes else "qwen3"]
    for facts in run_ranks(size, bfloat16, model, axes, timeout=200):
        assert all(facts.values()), facts


def refused(world: World, path: str) -> str:
    try:
        backend(world, path, axes={"tp": 2})
    except UserError as error:
        return str(error)
    return ""


def test_heads_that_do_not_divide_are_the_users_mistake(models) -> None:
    for told in run_ranks(2, refused, models["smollm2"]):
        assert told.startswith("train.tp: 2 ranks cannot share the 9 attention heads, 3 key-value heads")
        assert told.endswith("sizes that fit: 1, 3, 9")
