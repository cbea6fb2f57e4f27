"""Megatron without ranks: what is refused before torch is imported, the mapping's arithmetic, and what we lean on."""

import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from spmd_rl.base.errors import UserError
from spmd_rl.config.backends import backend
from spmd_rl.config.packages import installed, requirements
from spmd_rl.config.schema import PolicyConfig, TrainConfig
from spmd_rl.config.sections.models import CriticConfig, RoleConfig
from spmd_rl.train.megatron import ARCHITECTURES
from tests.models import EXPERTS, tiny

needs_megatron = pytest.mark.skipif(installed("megatron-core") is None, reason="megatron-core is not installed")
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 90, "vocab_size": 263}
MODULES = "spmd_rl.train.megatron"
ROOT = Path(__file__).parents[2]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


def role_of(path, name="policy", own=None, **train) -> RoleConfig:
    settings = TrainConfig(name="megatron", **train)
    return RoleConfig(name, own or PolicyConfig(), str(path), "float32", False, settings, 5)


REFUSED = [
    ("llama", {"tp": 4}, {}, r"train\.tp: Megatron cannot divide 2 key-value heads among 4 ranks"),
    ("deepseek_v3", {"tp": 4}, {}, r"train\.tp: Megatron cannot divide 90 columns of the MLP among 4 ranks"),
    ("llama", {"dp_replicate": 2}, {}, r"train\.dp_replicate: not supported by train=megatron; must be 1"),
    ("llama", {"compile": True}, {}, r"train\.compile: not supported by train=megatron; must be False"),
    (
        "llama",
        {"activation_checkpointing": "selective"},
        {},
        r"activation_checkpointing: train=megatron supports only full and",
    ),
    ("llama", {}, {"optimizer": "muon"}, r"policy\.optimizer: train=megatron has no optimizer muon; known: adamw"),
    (
        "qwen3_moe",
        {},
        {"router_bias_update_speed": 0.1},
        r"policy\.router_bias_update_speed: the routers of qwen3_moe have no biases; must be 0",
    ),
    ("llama", {}, {"router_aux_coef": 0.1}, r"policy\.router_aux_coef: llama is not a mixture of experts; must be 0"),
    ("granite", {}, {}, r"train\.name: train=megatron does not support granite; known: llama, qwen2, "),
]


@needs_megatron
@pytest.mark.parametrize(("kind", "train", "own", "says"), REFUSED)
def test_what_is_not_built_is_refused_by_name(kind, train, own, says, tmp_path) -> None:
    path = tiny(kind, tmp_path, **SIZES | EXPERTS.get(kind, {}))
    with pytest.raises(UserError, match=says):
        backend("megatron").check(role_of(path, own=PolicyConfig(**own), **train), path)


@needs_megatron
def test_a_critic_is_taken_and_what_changes_the_model_is_refused(tmp_path) -> None:
    path = tiny("llama", tmp_path / "a", **SIZES)
    backend("megatron").check(role_of(path, tp=2, pp=2, cp=2), path)
    backend("megatron").check(role_of(path, "critic", CriticConfig(), tp=2), path)
    for kind, changed, says in (
        ("llama", {"hidden_act": "gelu"}, "the activation gelu"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"rope_parameters": YARN}, "not support rotary positions of the type yarn"),
        ("deepseek_v3", {"q_lora_rank": None}, "does not support the q_lora_rank of this model: None"),
        ("deepseek_v3", {"rope_interleave": False}, "does not support the rope_interleave of this model: False"),
        ("deepseek_v3", {"norm_topk_prob": False}, "does not support the norm_topk_prob of this model: False"),
        ("deepseek_v3", {"num_experts_per_tok": 1}, "does not support the num_experts_per_tok of this model: 1"),
    ):
        odd = tiny(kind, tmp_path / says, **SIZES | EXPERTS.get(kind, {}) | changed)
        with pytest.raises(UserError, match=says):
            backend("megatron").check(role_of(odd), odd)


@needs_megatron
def test_the_published_models_are_taken() -> None:
    for shape, layout in {"deepseek-v3": {"tp": 8, "pp": 8, "ep": 32}, "qwen3-235b-a22b": {"tp": 4}}.items():
        path = ROOT / "configs" / "shapes" / shape
        backend("megatron").check(role_of(path, **layout), path)


def test_refusals_need_neither_torch_nor_megatron(tmp_path) -> None:
    path = tiny("llama", tmp_path, **SIZES)
    code = f"""
import sys
from pathlib import Path
from spmd_rl.config.backends import backend
from spmd_rl.config.schema import PolicyConfig, TrainConfig
from spmd_rl.config.sections.models import RoleConfig
role = RoleConfig("policy", PolicyConfig(), {str(path)!r}, "float32", False, TrainConfig(name="megatron", tp=2), 5)
try:
    backend("megatron").check(role, Path({str(path)!r}))
except Exception as error:
    assert "is not installed" in str(error)
assert not {{"torch", "megatron.core"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("shape", [(7,), (5, 4), (1, 6), (6, 1)], ids=str)
def test_rectangles_cover_a_run_in_order(shape) -> None:
    from spmd_rl.train.megatron.mapping import rectangles

    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    for begin in range(numbers.numel()):
        for end in range(begin, numbers.numel() + 1):
            found = [numbers[region].flatten() for region in rectangles(shape, begin, end)]
            assert torch.cat([*found, torch.empty(0, dtype=torch.int64)]).tolist() == list(range(begin, end))
            assert len(found) <= 3


def parameters(kind: str, rules):
    """Each parameter of a tiny model, its rule, and whether it is an expert's."""
    for name, rule in rules.items():
        layers = range(2) if "layers.{}" in name else (0,)
        if kind == "deepseek_v3" and ".mlp." in name:
            layers = [0] if ".mlp.linear_" in name else [1]
        for layer in layers:
            for expert in range(4) if (is_expert := ".local_experts." in name) else (0,):
                yield name.format(layer, expert), rule.named(layer, expert), is_expert


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_mapping_has_each_number_of_a_checkpoint_once(kind: str, tp: int, tmp_path) -> None:
    """Of all ranks together; and in both directions the same."""
    from spmd_rl.train.megatron.mapping import TensorShare

    stored = load_file(tiny(kind, tmp_path, **SIZES | EXPERTS.get(kind, {})) / "model.safetensors")
    rules = import_module(f"{MODULES}.architectures.{kind}").NAMES
    seen = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in stored.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}.__getitem__
    for name, one, is_expert in parameters(kind, rules):
        for rank in range(tp if one.is_cut and not is_expert else 1):
            share = TensorShare(rank, 1 if is_expert else tp, 8)
            parameter = torch.zeros(one.shape(shapes, share), dtype=torch.int64)
            for piece in one.pieces(shapes, share):
                assert parameter[piece.region].shape == seen[piece.name][piece.stored].shape
                seen[piece.name][piece.stored] += 1
                parameter[piece.region] += 1
            assert parameter.max() == 1 and (parameter.min() == 1 or "word" in name or "output" in name)
    assert all((count == 1).all() for count in seen.values()), [
        n for n, count in seen.items() if not (count == 1).all()
    ]


BRIDGES = {"llama": "llama:LLaMABridge", "qwen2": "qwen2:Qwen2Bridge", "qwen3": "qwen3:Qwen3Bridge"}
BRIDGES |= {"qwen3_moe": "qwen3moe:Qwen3MoEBridge", "mixtral": "mixtral:MixtralBridge"}
BRIDGES |= {"deepseek_v3": "deepseek_v3:DeepseekV3Bridge"}
OTHER_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
OF_LATENTS = {
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
"""Ours of Megatron's local layers -> those of Transformer Engine's, which the other library knows"""


def other_mapping(kind: str, path):
    """The other library's bridge, without the model that it would build on a device."""
    module, name = BRIDGES[kind].split(":")
    made = object.__new__(getattr(import_module(f"mbridge.models.{module}"), name))
    made.hf_config, made.dtype = AutoConfig.from_pretrained(path), torch.float32
    made.make_vocab_size_divisible_by = None
    made.config = SimpleNamespace(gated_linear_unit=True, mtp_num_layers=None)
    return made


def their_name(kind: str, name: str) -> str:
    mixture = kind in EXPERTS
    for ours, theirs in (OF_LATENTS if kind == "deepseek_v3" else OTHER_NAMES).items():
        if name.endswith(ours) and not (mixture and "mlp" in ours):
            return name.replace(ours, theirs)
    if ".local_experts." in name:
        before, expert, rest = re.fullmatch(r"(.*)\.local_experts\.(\d+)\.(.*)", name).groups()
        return f"{before}.{rest}{expert}"
    return name


@needs_megatron
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", BRIDGES)
@pytest.mark.parametrize("tp", [1, 2])
def test_another_library_cuts_checkpoints_the_same_way(kind: str, tp: int, tmp_path) -> None:
    pytest.importorskip("mbridge")
    from spmd_rl.train.megatron.mapping import TensorShare

    path = tiny(kind, tmp_path, **SIZES | {"vocab_size": 264} | EXPERTS.get(kind, {}))
    stored, bridge, compared = load_file(path / "model.safetensors"), other_mapping(kind, path), 0
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}.__getitem__
    for name, one, is_expert in parameters(kind, import_module(f"{MODULES}.architectures.{kind}").NAMES):
        theirs = their_name(kind, name)
        names = bridge._weight_name_mapping_mcore_to_hf(theirs)
        assert list(one.names) == names, (name, one.names, names)
        whole = bridge._weight_to_mcore_format(theirs, [stored[key] for key in names])
        size = 1 if is_expert else tp
        mine = []
        for share in (TensorShare(rank, size, 8) for rank in range(size)):
            mine.append(torch.full(one.shape(shapes, share), torch.nan))
            for piece in one.pieces(shapes, share):
                mine[-1][piece.region] = stored[piece.name][piece.stored]
        wanted = bridge._weight_split_across_tp(theirs, whole, mine[0], size)
        assert all(torch.equal(a, b) for a, b in zip(mine, wanted, strict=True)), theirs
        compared += 1
    assert compared >= 15  # six of each layer, and three: a model without biases


CONTRACT = {
    "models.gpt:GPTModel": "config transformer_layer_spec vocab_size max_sequence_length pre_process post_process "
    "share_embeddings_and_output_weights position_embedding_type pg_collection vp_stage",
    "models.gpt:GPTModel.forward": "input_ids position_ids attention_mask packed_seq_params",
    "models.gpt.gpt_layer_specs:get_gpt_layer_local_spec": "num_experts multi_latent_attention",
    "transformer.transformer_block:TransformerBlockSubmodules": "layer_specs layer_norm",
    "distributed:DistributedDataParallel": "config ddp_config module disable_bucketing pg_collection",
    "distributed:DistributedDataParallel.start_param_sync": "force_sync",
    "distributed:DistributedDataParallelConfig": "use_distributed_optimizer grad_reduce_in_fp32 overlap_grad_reduce",
    "distributed:finalize_model_grads": "model num_tokens pg_collection",
    "optimizer.distrib_optimizer:DistributedOptimizer": "optimizer config grad_scaler init_state_fn model_chunks "
    "per_model_buffers data_parallel_group data_parallel_group_gloo data_parallel_group_idx "
    "distributed_optimizer_instance_id",
    "optimizer.distrib_optimizer:DistributedOptimizer.prepare_grads": "",
    "optimizer.distrib_optimizer:DistributedOptimizer.step_with_ready_grads": "",
    "optimizer.distrib_optimizer:DistributedOptimizer._copy_main_params_to_model_params": "",
    "optimizer.distrib_optimizer:DistributedOptimizer._get_model_param_range_map": "param",
    "pipeline_parallel.schedules:get_forward_backward_func": "pp_size vp_size",
    "pipeline_parallel.schedules:forward_backward_no_pipelining": "forward_step_func data_iterator model "
    "num_microbatches seq_length micro_batch_size forward_only pg_collection",
    "pipeline_parallel.p2p_communication:P2PCommunicator": "pp_group config",
    "parallel_state:_set_global_memory_buffer": "",
    "tensor_parallel:get_cuda_rng_tracker": "",
}
"""What is called by name and keyword, of `megatron.core`"""


@needs_megatron
def test_the_version_is_the_one_that_is_pinned() -> None:
    need = next(one for one in requirements() if one.name == "megatron-core")
    assert need.specifier.contains(installed("megatron-core")) and str(need.specifier) == "<0.17,>=0.16.1"


@needs_megatron
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONTRACT)
def test_megatron_has_what_we_lean_on(name: str) -> None:
    module, _, path = name.partition(":")
    found = import_module(f"megatron.core.{module}")
    for part in path.split("."):
        found = getattr(found, part)
    assert {*CONTRACT[name].split()} <= {*inspect.signature(found).parameters}


@needs_megatron
@pytest.mark.filterwarnings("ignore")
def test_the_shim_does_nothing_on_a_device_and_ends_where_it_ends() -> None:
    from spmd_rl.train.megatron.shim import on_cpu

    before = torch.cuda.current_device
    with on_cpu(torch.device("cuda", 0)):
        assert torch.cuda.current_device is before
    with on_cpu(torch.device("cpu")):
        assert torch.empty(1, device="cuda").device.type == "cpu" and torch.cuda.current_device is not before
    assert torch.cuda.current_device is before
