"""Adapters against peft's own on one process: gradients in every layout, what is published, and the model without them.

Gradients are read off the saved adapters, as in `test_train_parity.py`.
"""

import json
import zlib
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as Peft
from peft import PeftModel, get_peft_model

from spmd_rl.base.errors import UserError
from spmd_rl.checkpoint import Checkpointer, HfExport
from spmd_rl.config.schema import CheckpointConfig, PolicyConfig, TrainConfig
from spmd_rl.config.sections.lora import LoraConfig
from spmd_rl.config.sections.models import ReferenceConfig, RoleConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.model.build import build_model, weights_of
from spmd_rl.model.lora import PREFIX
from spmd_rl.tools.convert import main
from spmd_rl.train import build_role
from spmd_rl.train.accumulate import AdapterOff
from spmd_rl.train.deepspeed.model import role_of as zero_of
from spmd_rl.train.fsdp2.backend import policy_of
from spmd_rl.train.nf4 import CODE
from spmd_rl.train.state import MODEL, OPTIMIZER, SavedState
from spmd_rl.train.stored_model import checkpoint_model
from tests.dist.harness import run_ranks
from tests.dist.test_train_parity import AS_GRADIENT, HUGE
from tests.engines import SHARDS_BYTES, needs_nf4
from tests.models import EXPERTS, tiny
from tests.training import (
    TEMPERATURE,
    global_batch,
    loss,
    plain_backward,
    plain_forward,
    relative,
    share_of,
)
from tests.unit.test_sharing import exact

SIZES = {"head_dim": 8, "intermediate_size": 90, "vocab_size": 263}  # of these nothing divides by 4
MODELS = {
    "llama": ("llama", {"tie": True, **SIZES}),
    "wide": ("llama", {**SIZES, "intermediate_size": 92}),
    "qwen2": ("qwen2", {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 4}),
    "qwen3_moe": ("qwen3_moe", {**SIZES, **EXPERTS["qwen3_moe"]}),
    "deepseek_v3": ("deepseek_v3", {**SIZES, **EXPERTS["deepseek_v3"]}),
}
CASES = {
    1: [({}, "llama", {"dora": True}), ({}, "qwen3_moe", {"base": "nf4"})],
    2: [
        ({}, "llama", {"base": "nf4", "targets": ["k_proj", "down_proj"]}),
        ({"cp": 2}, "qwen2", {"base": "nf4"}),
        ({"dp_replicate": 2}, "llama", {"base": "nf4"}),
        ({}, "llama", {"rslora": True, "targets": ["q_proj", "down_proj"]}),
        ({}, "qwen2", {"dora": True}),
        ({"tp": 2}, "qwen2", {}),
        ({"cp": 2}, "qwen2", {}),
        ({"pp": 2}, "llama", {}),
        ({"ep": 2}, "qwen3_moe", {}),
    ],
    4: [({"tp": 4}, "wide", {}), ({"tp": 2, "pp": 2}, "llama", {}), ({"tp": 2, "dp_replicate": 2}, "qwen2", {})],
}
"""By the number of ranks: layout, model, and what differs from `LORA`"""
ZERO1, ZERO2, ZERO3 = ({"name": "deepspeed", "stage": stage} for stage in (1, 2, 3))
ON_HOST = {"offload_optimizer": True, "offload_param": True}
ZEROS = [
    (ZERO1, "llama", {"rslora": True, "targets": ["q_proj", "down_proj"]}),
    (ZERO2, "qwen2", {}),
    (ZERO3, "llama", {}),
    (ZERO3, "qwen3_moe", {}),
    (ZERO3 | ON_HOST, "qwen2", {}),
]
"""The same of two ranks under DeepSpeed, which has no float64"""
MEGA = {"name": "megatron"}
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
"""Of the others' names peft makes adapters of experts, which no backend has"""
MEGATRON = {
    1: [({}, "llama", {"rslora": True, "targets": ["q_proj", "down_proj"]})],
    2: [
        ({"tp": 2}, "qwen2", {}),
        ({"pp": 2, "activation_checkpointing": "full"}, "llama", {}),
        ({"cp": 2}, "qwen2", {}),
        ({"ep": 2}, "qwen3_moe", {}),
        ({"tp": 2}, "deepseek_v3", {"targets": LATENT}),
        ({"pp": 2, "activation_checkpointing": "full"}, "deepseek_v3", {"targets": LATENT}),
    ],
    4: [({"tp": 2, "pp": 2}, "llama", {}), ({"tp": 2}, "wide", {"targets": ["k_proj", "up_proj", "o_proj"]})],
}
"""The same under Megatron, by the number of ranks"""
PAIRS = [
    ({}, ZERO1, "bfloat16"),
    (ZERO1, ZERO3, "float32"),
    (ZERO3, {}, "float32"),
    ({}, ZERO3 | ON_HOST, "bfloat16"),
    (ZERO2, ZERO2, "float32"),
]
MEGATRON_PAIRS = [
    ({"tp": 2}, MEGA | {"pp": 2}, "float32"),
    (MEGA | {"tp": 2}, {"pp": 2}, "float32"),
    (ZERO3, MEGA, "float32"),
    (MEGA, {}, "bfloat16"),
    ({"pp": 2}, MEGA | {"pp": 2}, "bfloat16"),
]
"""Whose checkpoint is read by whom"""
LORA = {"rank": 4, "alpha": 6.0}
LIMITS = {"float32": 1e-5, "float64": 1e-9}
"""Of relative L2 errors, and of absolute ones of logprobs"""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: str(tiny(kind, folder / name, **sizes)) for name, (kind, sizes) in MODELS.items()}


def value(name: str, shape: torch.Size) -> torch.Tensor:
    """What an adapter's tensor is set to: `B` too, which begins at 0, where `A` would have no gradient."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())), dtype=torch.float64)
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


@torch.no_grad()
def round_base(model: torch.nn.Module, kinds: list[str] | None) -> None:
    """Give the layers that get adapters the values that NF4 has, found by the nearest of them all."""
    code = torch.tensor(CODE)
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for name, module in linear.items():
        if ".layers." in name and (kinds is None or name.rpartition(".")[2] in kinds):
            for begin in range(0, module.in_features, 64):
                block = module.weight[:, begin : begin + 64]
                factors = block.float().abs().amax(1, keepdim=True).bfloat16().float()
                nearest = (block.float()[..., None] / factors[..., None] - code).abs().argmin(-1)
                block.copy_(code[nearest] * factors)


def stored_name(name: str) -> str:
    """Under which a state has one of peft's parameters."""
    return MODEL + name.replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector")


def own_name(name: str) -> str:
    """The parameter of peft's that a state has under this name."""
    layer, _, kind = name.removeprefix(MODEL + PREFIX).partition(".lora_")
    return f"{layer}.lora_{kind.removesuffix('.weight')}.default.weight"


@torch.no_grad()
def set_adapters(role) -> None:
    """As `with_peft` has them."""
    for one in role.model.state():
        if one.name.startswith(MODEL + PREFIX) and one.tensor is not None:
            region = tuple(slice(at, at + n) for at, n in zip(one.begin, one.tensor.shape, strict=True))
            one.tensor.copy_(value(own_name(one.name), one.shape)[region])
    role.model.on_state_loaded()


def saved(world: World, role, folder: Path) -> SavedState:
    """[all]"""
    if world.rank == 0:
        folder.mkdir()
    world.barrier("folder")
    role.save(folder)
    world.barrier("saved")
    return SavedState.open(folder)


@torch.no_grad()
def error_of(role, plain: torch.nn.Module, share) -> float:
    """[all] The largest error of a role's logprobs."""
    found = role.logprobs(share, TEMPERATURE)[0]  # [all]
    return float((found - plain_forward(plain, share)[0] * share.loss_mask).abs().max()) if share.num_tokens else 0.0


def compared(world: World, path: str, axes: dict[str, int], own: dict, dtype: str, folder: str) -> dict[str, float]:
    """Relative errors of gradients and norm; of merged weights; in float32, of logprobs with and without adapters."""
    train, whole = TrainConfig(tokens_per_microbatch=60, **axes), global_batch()
    scale = 100.0 if dtype == "float32" else 1.0  # a float32 weight rounds away what is much smaller than itself
    settings = PolicyConfig(lr=scale * HUGE, lora=LoraConfig(**own), **AS_GRADIENT)

    def build(attention: str) -> torch.nn.Module:
        model = build_model(path, getattr(torch, dtype), "cpu", attention=attention)
        return exact(model) if dtype == "float64" else model

    role = RoleConfig("policy", settings, path, dtype, False, train, 5)
    if train.name == "megatron":
        mine = build_role(role, world)
    else:
        make = zero_of if train.name == "deepspeed" else policy_of
        mine = make(build("spmd_packed"), Layout(world, **train.axes), role)
    set_adapters(mine)
    share = share_of(mine, "uneven", whole)
    plain, errors = build("sdpa"), {}
    if own.get("base"):
        round_base(plain, own.get("targets"))
    if dtype == "float32":
        errors["base"] = max(error_of(AdapterOff(mine), plain, share) for _ in range(2))
    plain = with_peft(plain, own)
    if dtype == "float32":
        errors["logprobs"] = error_of(mine, plain, share)
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
        errors[name] = relative((read[0] - read[1]) / scale, p.grad)
    norm = float(torch.stack([p.grad.double().norm() for p in trained.values()]).norm())
    errors |= {"norm": abs(metrics["grad_norm"] / norm - 1), "loss": abs(metrics["loss"] / total - 1)}
    wanted = weights_of(plain.merge_and_unload())
    assert published.keys() == wanted.keys()
    errors["published"] = max(relative(published[name], tensor) for name, tensor in wanted.items())
    return errors


def all_compared(world: World, models: dict[str, str], cases: list, folder: str) -> dict[str, dict[str, float]]:
    found = {}
    for number, (axes, kind, own) in enumerate(cases):
        for dtype in LIMITS if "name" not in axes else ["float32"]:
            place = Path(folder, f"{number}-{dtype}")
            if world.rank == 0:
                place.mkdir()
            found[f"{dtype} {axes} {kind} {own}"] = compared(world, models[kind], axes, LORA | own, dtype, str(place))
    return found


@pytest.mark.parametrize("size", CASES)
def test_gradients_and_published_weights_are_pefts(size: int, models, tmp_path) -> None:
    cases = [case for case in CASES[size] if SHARDS_BYTES or "base" not in case[2]]
    for found in run_ranks(size, all_compared, models, cases, str(tmp_path), timeout=300):
        assert len(found) == 2 * len(cases)
        for case, errors in found.items():
            worst = max(errors, key=errors.get)
            assert errors[worst] < LIMITS[case.split()[0]], (case, worst, errors[worst])


def test_gradients_and_published_weights_are_pefts_under_zero(models, tmp_path, three) -> None:
    for found in three.run(all_compared, models, ZEROS, str(tmp_path), ranks=[1, 2], timeout=300):
        assert len(found) == len(ZEROS)
        for case, errors in found.items():
            worst = max(errors, key=errors.get)
            assert errors[worst] < LIMITS["float32"], (case, worst, errors[worst])


@pytest.mark.parametrize("size", MEGATRON)
def test_gradients_and_published_weights_are_pefts_on_megatron(size: int, models, tmp_path) -> None:
    cases = [(MEGA | axes, kind, own) for axes, kind, own in MEGATRON[size]]
    for found in run_ranks(size, all_compared, models, cases, str(tmp_path), timeout=300):
        assert len(found) == len(cases)
        for case, errors in found.items():
            worst = max(errors, key=errors.get)
            assert errors[worst] < LIMITS["float32"], (case, worst, errors[worst])


def test_pefts_own_gradient_in_float32_is_that_far_from_itself(models) -> None:
    """Of the same batch as one sum, and sample by sample: what `LIMITS` leaves to float32 is its rounding."""
    whole, worst = global_batch(), {}
    for dtype in (torch.float32, torch.float64):
        build = partial(build_model, models["llama"], dtype, "cpu", attention="sdpa")
        found = []
        for parts in ([whole], [whole.select([i]) for i in range(whole.num_samples)]):
            model = with_peft(exact(build()) if dtype == torch.float64 else build(), LORA)
            for part in parts:
                plain_backward(model, part)
            found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
        worst[dtype] = max(relative(found[0][name], grad) for name, grad in found[1].items())
    assert worst[torch.float64] < 1e-12
    assert 5e-7 < worst[torch.float32] < LIMITS["float32"]


def merged(world: World, path: str, axes: dict) -> list[float]:
    """Errors of logprobs of plain transformers with the weights that are published, with and without adapters in them.

    Adapters of all linear layers, those of a mixture's shared experts among them.
    """
    mine, whole = build_role(role_of(path, axes, "float32", LORA), world), global_batch()
    set_adapters(mine)
    plain, share = build_model(path, torch.float32, "cpu", attention="sdpa"), share_of(mine, "dealt", whole)
    before, stored = error_of(mine, plain, share), weights_of(plain)
    with torch.no_grad():
        for name, tensor in mine.weights():
            stored[name].copy_(tensor)
    return [before, error_of(mine, plain, share)]


@pytest.mark.parametrize("axes", [{}, MEGA | {"tp": 2}], ids=["fsdp2", "megatron"])
def test_what_is_published_of_latent_attention_is_what_is_computed(models, axes) -> None:
    for before, after in run_ranks(2, merged, models["deepseek_v3"], axes, timeout=200):
        assert after < LIMITS["float32"] < 0.1 < before, (before, after)


def published(role, adapters: str) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in role.weights(adapters)}


def crossed(world: World, path: str, folder: str, pairs: list) -> dict[str, dict[str, float]]:
    """Differences between a role and one that reads its checkpoint; counts, of what is not bitwise so."""
    found, whole, kinds = {}, global_batch(), ("merged", "apart", "alone")
    for number, (writer, reader, dtype) in enumerate(pairs):
        mine, other = (build_role(role_of(path, train, dtype, LORA, eps=1e-3), world) for train in (writer, reader))
        share, base = share_of(mine, "uneven", whole), AdapterOff(other).logprobs(share_of(other, "uneven", whole), 1.0)
        starts = [published(role, "alone") for role in (mine, other)]
        for _ in range(2):
            mine.update(share, loss, TEMPERATURE)
        state = saved(world, mine, Path(folder, f"{number}"))
        other.load(state.folder)
        other.load_counters(mine.counters())
        again = saved(world, other, Path(folder, f"{number} again"))
        pairs_of = [(published(mine, kind), published(other, kind)) for kind in kinds]
        assert all(a.keys() == b.keys() for a, b in pairs_of) and state.tensors == again.tensors
        errors = {"published": float(sum(not a[name].equal(b[name]) for a, b in pairs_of for name in a))}
        errors["start"] = float(any(not starts[1][name].equal(tensor) for name, tensor in starts[0].items()))
        errors["state"] = float(sum(not state.read(name).equal(again.read(name)) for name in state.tensors))
        errors["logprobs"] = largest(role.logprobs(share, 1.0)[0] for role in (mine, other))
        off = AdapterOff(other).logprobs(share, 1.0)
        errors["base"] = float(not all(map(torch.equal, base, off)))
        errors["it has learnt"] = float(share.num_tokens > 0 and largest((off[0], mine.logprobs(share, 1.0)[0])) < 0.01)
        norms = [role.update(share, loss, TEMPERATURE)["grad_norm"] for role in (mine, other)]
        errors["norm"] = abs(norms[0] / norms[1] - 1)
        after = [published(role, "merged") for role in (mine, other)]
        errors["after"] = max(relative(after[0][name].float(), after[1][name].float()) for name in after[0])
        found[f"{dtype} {writer} to {reader}"] = errors
    return found


def largest(pair) -> float:
    one, other = pair
    return float((one - other).abs().max()) if one.numel() else 0.0


@pytest.mark.parametrize("pairs", [PAIRS, MEGATRON_PAIRS], ids=["zero", "megatron"])
def test_backends_go_on_from_each_others_adapters(pairs, models, tmp_path, three) -> None:
    for found in three.run(crossed, models["llama"], str(tmp_path), pairs, ranks=[1, 2], timeout=300):
        assert len(found) == len(pairs)
        for pair, errors in found.items():
            near = {"logprobs": 2e-6, "norm": 1e-5, "after": 1e-5}
            if "bfloat16" in pair:
                near = {"logprobs": 1e-2, "norm": 1e-3, "after": 1e-2}
            wrong = {fact: error for fact, error in errors.items() if error > near.get(fact, 0.0)}
            assert not wrong, (pair, wrong)


def role_of(path: str, axes: dict[str, int], dtype: str, lora: dict, **settings) -> RoleConfig:
    """As a pipeline has it, from the model's directory, which is read shard by shard."""
    own = PolicyConfig(lr=1e-2, lora=LoraConfig(**lora), **settings)
    return RoleConfig("policy", own, path, dtype, False, TrainConfig(tokens_per_microbatch=60, **axes), 5)


def saver(world: World, role, run_dir: Path, **settings) -> Checkpointer:
    export = HfExport(role, role_path(run_dir), world)
    return Checkpointer(CheckpointConfig(**settings), run_dir, world, {"policy": role}, {}, export)


def role_path(run_dir: Path) -> str:
    return json.loads((run_dir / "config.yaml").read_text())["policy"]["model"]


def refusal(restore) -> str:
    try:
        restore()
    except UserError as error:
        return str(error)
    return ""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def kept(world: World, path: str, run: str, axes: dict[str, int], dtype: str, lora: dict) -> dict[str, float]:
    """Facts of a checkpoint of adapters: 0 where they hold, or a difference of logprobs in nats."""
    run_dir, role = Path(run), role_of(path, axes, dtype, lora)
    saved, whole = run_dir / "checkpoints" / "step-000001", global_batch()
    mine = build_role(role, world)
    share = share_of(mine, "dealt", whole)
    for _ in range(3):
        mine.update(share, loss, TEMPERATURE)
    saver(world, mine, run_dir).maybe_save(1, last=True)
    wanted, weights = mine.logprobs(share, TEMPERATURE)[0], published(mine, "merged")
    facts: dict[str, float] = {}
    if world.rank == 0:
        codes = [main(["to-hf", str(saved), str(run_dir / "hf")]), main(["to-peft", str(saved), str(run_dir / "peft")])]
        codes += [2 - main(["from-hf", path, str(saved), str(run_dir / "back")])]
        facts["converted"] = sum(codes)
        facts["to-hf is the export"] = float(contents(run_dir / "hf") != contents(saved / "hf"))
        plain = build_model(path, getattr(torch, dtype), "cpu", attention="sdpa")
        if lora.get("base"):
            round_base(plain, lora.get("targets"))
        with torch.no_grad():
            base = plain_forward(plain, share)[0] * share.loss_mask
            found = plain_forward(PeftModel.from_pretrained(plain, str(run_dir / "peft")), share)[0] * share.loss_mask
        facts["peft's logprobs"] = float((found - wanted).abs().max())
        facts["it has learnt"] = float((base - wanted).abs().max() < 0.01)
    world.barrier("converted")
    same, evaluated = build_role(role, world), ReferenceConfig(model=path)
    facts["resumed"] = float(saver(world, same, run_dir, resume=str(saved)).restore() != 1)
    facts["resumed"] += float((same.logprobs(share, TEMPERATURE)[0] != wanted).any())
    for role_of_run in (mine, same):
        role_of_run.update(share, loss, TEMPERATURE)
    after = [one.logprobs(share, TEMPERATURE)[0] for one in (mine, same)]
    facts["goes on to the bit"] = float((after[0] != after[1]).any())
    merged = build_role(
        RoleConfig("policy", evaluated, path, dtype, False, role.train, 5), world, partial(checkpoint_model, str(saved))
    )
    others = published(merged, "merged")
    facts["evaluated weights"] = float(sum(not others[name].equal(tensor) for name, tensor in weights.items()))
    facts["evaluated"] = float((merged.logprobs(share, TEMPERATURE)[0] - wanted).abs().max())
    half = build_role(role_of(path, axes, dtype, lora | {"alpha": lora["alpha"] / 2}), world)
    told = refusal(saver(world, half, Path(run + "-half"), resume=str(saved)).restore)
    facts["half"] = float(not told.endswith("adapters are scaled by 1.5, this run's by 0.75 (lora.alpha, lora.rslora)"))
    full = build_role(role_of(path, axes, dtype, {}), world)
    told = refusal(saver(world, full, Path(run + "-full"), resume=str(saved)).restore)
    facts["full"] = float("does not fit this model" not in told)
    if "base" in lora:
        other = build_role(role_of(path, axes, dtype, lora | {"base": None}), world)
        told = refusal(saver(world, other, Path(run + "-full"), resume=str(saved)).restore)
        facts["another base"] = float("adapter/base_in_nf4" not in told)
    return facts


@pytest.mark.parametrize(
    ("axes", "dtype", "own"),
    [
        ({}, "float32", {"dora": True}),
        pytest.param({}, "float32", {"base": "nf4"}, marks=needs_nf4),
        pytest.param({}, "bfloat16", {"base": "nf4", "dropout": 0.2}, marks=needs_nf4),
        ({"pp": 2}, "bfloat16", {"dropout": 0.2}),
        (ZERO1, "float32", {}),
        (ZERO3, "bfloat16", {"dropout": 0.2}),
        (MEGA | {"tp": 2}, "float32", {"targets": ["k_proj", "down_proj"]}),
        (MEGA | {"pp": 2}, "bfloat16", {}),
    ],
    ids=str,
)
def test_a_checkpoint_of_adapters_resumes_converts_and_is_evaluated(axes, dtype, own, models, tmp_path, three) -> None:
    for name in ("run", "run-half", "run-full"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(json.dumps({"policy": {"model": models["llama"], "dtype": dtype}}))
    args = (models["llama"], str(tmp_path / "run"), axes, dtype, LORA | own)
    for facts in three.run(kept, *args, ranks=[1, 2], timeout=300):
        near = {"peft's logprobs", "evaluated"}
        assert not any(value for fact, value in facts.items() if fact not in near), facts
        assert max(facts.get(fact, 0.0) for fact in near) < (1e-5 if dtype == "float32" else 0.1), facts
