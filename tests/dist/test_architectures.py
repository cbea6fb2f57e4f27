"""The gate over every causal language model of the installed transformers: accepted, it computes right; or refused.

Right is what plain transformers computes of each sequence alone: logprobs, the gradient's norm, the stored weights.
"""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from spmd_rl.base.errors import UserError
from spmd_rl.config.architectures import ACCEPTED, SLIDING, WINDOWS, check_architecture
from spmd_rl.config.schema import PolicyConfig, RlvrConfig, TrainConfig
from spmd_rl.train import build_role
from spmd_rl.train.packed_check import check_packing
from tests.dist.harness import ROOT, run_ranks
from tests.e2e.leaking_rlvr import before
from tests.models import tiny
from tests.training import global_batch, loss
from tests.zoo import TYPES, write

LONGEST = 80
"""More than the longest sample of the batch has."""
ROPE = {"rope_theta": 10000.0, "factor": 4.0}
VARIANTS = {
    "cohere use_qk_norm": {"use_qk_norm": True, "logit_scale": 0.3},
    "cohere2 layers": {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2, "logit_scale": 0.3},
    "deepseek_v2 groups": {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
    "deepseek_v3 yarn": {"rope_parameters": {**ROPE, "rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0}},
    "gpt2 inverse": {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    "gpt_bigcode heads": {"multi_query": False},
    "granite odd": {
        "logits_scaling": 7.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.07
    },
    "llama biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama linear": {"rope_parameters": {**ROPE, "rope_type": "linear"}},
    "llama yarn": {"rope_parameters": {**ROPE, "rope_type": "yarn"}},
    "llama dynamic": {"rope_parameters": {**ROPE, "rope_type": "dynamic"}},
    "opt after": {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
    "phi3 longrope": {
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.5] * 8, "long_factor": [3.0] * 8
        },
        "original_max_position_embeddings": 128,
        "sliding_window": 130,
    },
    "qwen2 window": {"use_sliding_window": True, "sliding_window": 130, "max_window_layers": 2},
    "qwen2_moe dense": {"mlp_only_layers": [1], "norm_topk_prob": True},
    "smollm3 nope": {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "sliding_window": 130},
}  # fmt: skip
"""Of types on the list, other settings than the default: type and a word for it"""
QUICK = "llama mistral qwen2 qwen3 qwen2_moe qwen3_moe mixtral smollm3 olmo2 granite cohere deepseek_v3 phi3 gpt2 opt"
QUICK += " lfm2 qwen3_next"
WINDOWED = ("gemma3_text", "granite odd", "phi3 longrope", "qwen2 window")
MUST_BE_REFUSED = (
    "bamba deepseek_v32 falcon_mamba gemma2 glm_moe_dsa gpt_oss jamba kimi_linear llama4 llama4_text mamba "
    "mamba2 minimax nemotron_h qwen3_5 qwen3_5_moe recurrent_gemma rwkv zamba2"
)


NO_DEFAULT_AT_ALL = ("musicgen", "musicgen_melody")
"""Types whose class wants other configs"""


def verdict(path: Path) -> str:
    """Why the gate refuses the model there; empty if it does not."""
    try:
        check_architecture("policy.model", path, LONGEST)
    except UserError as error:
        return str(error)
    return ""


def plain(path: Path, batch) -> tuple[torch.Tensor, float]:
    """Logprobs of the batch [T], each sequence by itself, and the norm of its loss's gradient."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    logprobs, entropy = torch.zeros(batch.num_tokens), torch.zeros(batch.num_tokens)
    for begin, end in pairwise(batch.starts.tolist()):
        ids = batch.token_ids[begin:end]
        full = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0, :-1], -1)
        logprobs[begin + 1 : end] = full.gather(-1, ids[1:, None])[:, 0]
        entropy[begin + 1 : end] = -(full.exp() * full).sum(-1)
    mask = batch.loss_mask
    per_token, _ = loss(logprobs[mask], entropy[mask], batch)
    (per_token * batch.weights[mask]).sum().backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    return (logprobs * mask).detach(), float(norm)


def survey(world, names: list[str], folder: str, axes: dict[str, int]) -> dict[str, dict]:
    """[all] Of each type: the largest difference of a logprob, the gradient's relative one, wrong weights."""
    return {name: compare(world, name, Path(folder) / name.replace(" ", "_"), axes) for name in names}


def compare(world, name: str, path: Path, axes: dict[str, int]) -> dict:
    """[all] The same of one."""
    if world.rank == 0:
        write(name.split()[0], path, **VARIANTS.get(name, {}))
    world.barrier("written")  # [all]
    assert not verdict(path), verdict(path)
    policy = PolicyConfig(model=str(path), dtype="float32", max_grad_norm=1e9)
    try:
        role = build_role(RlvrConfig(policy=policy, train=TrainConfig(**axes)).role("policy"), world)  # [all]
    except UserError as error:  # on all ranks
        assert str(error).startswith("train.")
        return {"refused": str(error)}
    check_packing(name, role, "float32")  # [all]
    batch, data = global_batch(), role.layout.data
    wanted, norm = plain(path, batch)
    samples = range(data.rank, batch.num_samples, data.size)
    wanted = torch.cat([wanted[batch.starts[i] : batch.starts[i + 1]] for i in samples])
    with role.awake():
        logprobs, _ = role.logprobs(batch.select(samples), 1.0)  # [all]
        held = {key: tensor.clone() for key, tensor in role.weights()}  # [all]
        metrics = role.update(batch.select(samples), loss, 1.0)  # [all]
    role.close()
    stored = load_file(path / "model.safetensors")
    wrong = [key for key, tensor in held.items() if key not in stored or not torch.equal(tensor, stored[key])]
    return {
        "logprobs": float((logprobs - wanted).abs().max()),
        "gradient": abs(metrics["grad_norm"] / norm - 1),
        "weights": (wrong + [key for key in stored if key not in held])[:3],
    }


def is_right(found: dict) -> bool:
    """Whether `compare` found no more than rounding."""
    return found["logprobs"] < 1e-5 and found["gradient"] < 1e-4 and not found["weights"]


@pytest.mark.parametrize(
    ("names", "size", "axes"),
    [
        (["llama", "qwen2_moe"], 2, {}),
        ([*QUICK.split(), *WINDOWED], 1, {}),
        (["qwen3_next", "qwen3_5_text"], 2, {"tp": 2}),
        pytest.param([*ACCEPTED, *VARIANTS], 1, {}, marks=pytest.mark.slow),
        # each stage runs the model's own forward: what that does beside the layers would be done twice
        pytest.param(ACCEPTED, 2, {"pp": 2}, marks=pytest.mark.slow),
    ],
    ids=["two ranks", "quick", "hybrids with tp", "all", "stages"],
)
def test_what_is_accepted_computes_what_transformers_computes(
    names: list[str], size: int, axes: dict[str, int], tmp_path: Path
) -> None:
    found = run_ranks(size, survey, names, str(tmp_path), axes, timeout=900)
    can = {name for name in names if "refused" not in found[0][name]}
    assert len(can) == len(names) or ("pp" in axes and len(can) > 30)
    assert not {name: of_rank[name] for of_rank in found for name in can if not is_right(of_rank[name])}


def guarded_critic(world, path: str, axes: dict[str, int]) -> str:
    """[all] What a critic with a short convolution in its layers is told; the critic without has passed."""
    cfg = RlvrConfig(policy=PolicyConfig(model=path, dtype="float32"), train=TrainConfig(**axes))
    role = build_role(cfg.role("critic"), world)  # [all]
    check_packing("critic", role, "float32")  # [all]
    batch = global_batch().select([0, 1])
    assert not role.values(batch).any()  # [all] its head starts at 0
    for module in role.model.module.modules():
        if isinstance(module, LlamaMLP):
            module.register_forward_pre_hook(lambda _, args: (before(args[0]),))
    try:
        check_packing("critic", role, "float32")  # [all]
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("size", "axes"), [(1, {}), (2, {"pp": 2}), (2, {"tp": 2}), (2, {"cp": 2})], ids=str)
def test_a_critic_is_asked_too_though_its_values_start_at_0(size: int, axes: dict[str, int], tmp_path: Path) -> None:
    lines = run_ranks(size, guarded_critic, str(tiny("llama", tmp_path)), axes)
    assert len({*lines}) == 1 and lines[0].startswith("critic does not keep packed sequences apart: neighbours change")


def test_every_other_type_is_refused_by_name(tmp_path: Path) -> None:
    assert set(ACCEPTED) <= {*TYPES} and set(MUST_BE_REFUSED.split()) <= {*TYPES} - {*ACCEPTED}
    for kind in {*TYPES} - {*ACCEPTED, "gpt-sw3"}:  # which is gpt2
        configs = [{"model_type": kind}]
        if kind not in NO_DEFAULT_AT_ALL:
            configs.append(json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=False)))
        for config in configs:
            (tmp_path / "config.json").write_text(json.dumps(config))
            line = verdict(tmp_path)
            other = f"policy.model: {tmp_path} is not a causal language model but {kind}"
            assert line == other or (line.startswith(f"policy.model: {kind} ") and "cannot be trained here" in line)


def test_the_windows_of_types_are_those_of_their_classes() -> None:
    for kind in ACCEPTED:
        config = CONFIG_MAPPING[kind]()
        assert kind in SLIDING or "sliding_attention" not in (getattr(config, "layer_types", None) or ()), kind
        window = getattr(CONFIG_MAPPING[kind](use_sliding_window=True), "sliding_window", None)
        assert window == WINDOWS.get(kind), kind


def test_the_docs_list_them() -> None:
    section = (ROOT / "docs" / "RUN.md").read_text().partition("## Before: which models")[2].partition("\n## ")[0]
    listed = next(block for block in section.split("\n\n") if block.startswith("afmoe, "))
    assert listed.replace("\n", " ").rstrip(".").split(", ") == ACCEPTED
