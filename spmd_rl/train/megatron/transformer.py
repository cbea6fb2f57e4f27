"""Megatron-core's `GPTModel` from a transformers configuration, with five replaced parts.

Layers are Megatron's local ones (no Transformer Engine). Attention is `packed_attention`; rotary positions are the
row's; norms round as in transformers; the output embedding returns logprob and entropy of targets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn
from transformers import PreTrainedConfig

from spmd_rl.config.sections.models import TrainConfig
from spmd_rl.distributed import Layout
from spmd_rl.model.attention import Packing, packed_attention
from spmd_rl.model.differentiable import gather_rows
from spmd_rl.model.logprobs import Support, VocabularyShare, head_outputs
from spmd_rl.model.moe import probabilities
from spmd_rl.model.size import head_dim, num_kv_heads
from spmd_rl.train.expert_load import ExpertLoad
from spmd_rl.train.megatron.parameters import Experts
from spmd_rl.train.replay import Replay

# Without Transformer Engine these names are no classes, but the module asks for them.
if not isinstance(multi_latent_attention.TELinear, type):
    multi_latent_attention.HAVE_TE = False
RANDOM = "model-parallel-rng"


@dataclass(frozen=True)
class PackedRow:
    """Row data for all layers, passed as Megatron's packing parameters."""

    positions: Tensor
    """int64 [t], on the device"""
    packing: Packing
    routed: Tensor
    """bool [t], on the device: not padding"""
    chosen: Tensor | None
    """int64 [t, layers, k], on the device: the engine's experts (`train/replay.py`)"""
    # Megatron checks the name of the format.
    qkv_format: str = "row"
    cp_group: None = None
    local_cp_size: None = None


class Norm(nn.Module):
    """RMSNorm that rounds to its input's dtype before multiplying, as in transformers."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype, device=device))
        # Its gradient on a rank is a term of a sum over ranks, which Megatron computes for this mark.
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension: [..., hidden]."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class LatentNorm(Norm):
    """RMSNorm of latents, with transformers' epsilon there."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **_: Any) -> None:
        super().__init__(config, hidden_size, 1e-6)


class PackedAttention(nn.Module):
    """Packed attention in place of Megatron's `DotProductAttention`."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: PackedRow, **__: Any
    ) -> Tensor:
        """[t, 1, heads, D], [t, 1, kv heads, D] twice -> [t, 1, heads * D]; [all] of the ranks that share a row out.

        Latent attention lacks the dimension 1, and values may be narrower.
        """
        q, k, v = (x.flatten(0, -3).transpose(0, 1)[None] for x in (query, key, value))
        out, _ = packed_attention(self, q, k, v, None, self.scale, packed_seq_params.packing)  # [all]
        return out[0].flatten(1)[:, None]


class Rotary(nn.Module):
    """Rotary embedding of the row's positions, with transformers' frequencies."""

    def __init__(self, rotary: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("frequencies", rotary.inv_freq.to(device), persistent=False)
        self.scale = rotary.attention_scaling

    def get_rotary_seq_len(self, *args: Any) -> Tensor:
        """Return the positions, which Megatron passes to `forward` as a length."""
        return args[-1].positions

    def forward(self, positions: Tensor, **_: Any) -> Tensor:
        """int64 [t] -> float32 [t, 1, 1, rotated dimensions]."""
        angles = positions[:, None].float() * self.frequencies
        return torch.cat([angles, angles], -1)[:, None, None]


class LatentRotary(Rotary):
    """Rotary embedding for latent attention, with a factor."""

    def forward(self, positions: Tensor, **_: Any) -> tuple[Tensor, float]:
        """int64 [t] -> float32 [t, 1, rotated dimensions], and the factor."""
        return super().forward(positions)[:, 0], self.scale


class Head(nn.Module):
    """Output embedding that returns logprob and entropy of `targets`, from hidden states at `keep`."""

    def __init__(self, weight: nn.Parameter | None, vocab_size: int, groups: ProcessGroupCollection) -> None:
        """weight: this rank's rows; None if `forward` gets the input embedding's."""
        super().__init__()
        self.weight, self._vocab_size, self._group = weight, vocab_size, groups.tp
        self.keep: Tensor | None = None
        """int64 [n], set before each forward: tokens that predict a target"""
        self.targets: Tensor | None = None
        """int64 [n] or [n, 1 + m], set before each forward"""
        self.temperature = 1.0
        self.support: Support | None = None
        self.top: tuple[int, int] | None = None

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """[all] of the ranks that share the vocabulary out: [t / tp, 1, h] -> float32 [n, 1, 2 or more]."""
        weight, share, first = self.weight if weight is None else weight, None, 0
        hidden = hidden[:, 0]
        if self._group.size() > 1:
            hidden, first = gather_rows(hidden, self._group), self._group.rank() * len(weight)  # [all]
            share = VocabularyShare(first, self._group)
        # The last rows of the last rank are padding.
        own = weight[: self._vocab_size - first]
        about = (self.targets, self.temperature, self.support, self.top, share)
        return head_outputs(hidden[self.keep], own, *about)[:, None], None  # [all]


class ReplayedChoice:
    """Replacement of Megatron's replay of one layer's router."""

    def __init__(self, replay: Replay, place: int) -> None:
        """place: among the whole model's mixtures."""
        self._replay, self._place = replay, place

    def get_replay_topk(self, scores: Tensor, top_k: int, *groups: Any) -> tuple[Tensor, Tensor]:
        """Return scores and indices of replayed experts, [T, k] each, instead of the highest."""
        *limits, highest = groups
        values, own = highest(scores, top_k, *limits)
        found = self._replay.choose(self._place, own)
        return (values, own) if found is None else (scores.gather(1, found[0]), found[0])


def follow(chunk: GPTModel, module: nn.Module, device: torch.device, group: dist.ProcessGroup) -> None:
    """Give a chunk a transformers module's rotary positions and padding."""
    if chunk.pre_process:
        _ignore_padding(chunk.embedding, module.get_input_embeddings().padding_idx, group)
    rotary = module.base_model.rotary_emb
    if not chunk.config.multi_latent_attention:
        chunk.rotary_pos_emb = Rotary(rotary, device)
        return
    # Megatron's name of the rotary type that also has a factor.
    chunk.config.rope_type = "yarn"
    for layer in chunk.decoder.layers:
        layer.self_attention.rotary_pos_emb = LatentRotary(rotary, device)


def _ignore_padding(embedding: nn.Module, padding_id: int | None, group: dist.ProcessGroup) -> None:
    """Drop the gradient of the row of `padding_id`, as transformers do. group: tensor-parallel."""

    def without(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], found: Tensor) -> Tensor:
        is_padding = (kwargs["input_ids"][0] == padding_id).view(group.size(), -1)[group.rank()]
        return torch.where(is_padding[:, None, None], found.detach(), found)

    # A policy may sample this token. Its row is zero in front of the first norm, and with a gradient the norm was once
    # 96.2 instead of 1.19.
    if padding_id is not None:
        embedding.register_forward_hook(without, with_kwargs=True)


class WatchedRouter(TopKRouter):
    """Megatron's router with counted choices; the experts' bias is a parameter under both libraries' names."""

    load: ExpertLoad
    place: int
    """position among this rank's routers"""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config, pg_collection)
        if self.score_function == "sigmoid":
            biases = torch.empty(self.num_experts, device=self.weight.device)
            self.expert_bias = self.e_score_correction_bias = nn.Parameter(biases, requires_grad=False)

    def routing(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """[t, 1, E] -> weights of chosen experts (else 0), and which are chosen: [t, E] each."""
        weights, is_chosen = super().routing(logits, *args, **kwargs)
        chosen = is_chosen.float().topk(self.topk, -1).indices
        changed = self.load.observe(self.place, probabilities(self, logits.flatten(0, 1)), chosen, weights)  # [all]
        return weights if changed is None else changed, is_chosen


def mixtures_of(chunks: Mapping[GPTModel, range]) -> dict[int, nn.Module]:
    """Return mixture layers by number in the whole model."""
    return {
        number: layer
        for chunk, layers in chunks.items()
        for number, layer in zip(layers, chunk.decoder.layers, strict=True)
        if isinstance(layer.mlp, MoELayer)
    }


def watch_routers(mixtures: Mapping[int, nn.Module], first: int, replay: Replay, load: ExpertLoad) -> None:
    """Connect this rank's routers to `replay` and `load`. first: number of the model's first mixture."""
    for place, (number, layer) in enumerate(mixtures.items()):
        layer.register_forward_pre_hook(partial(_take, replay, load), with_kwargs=True)
        router = layer.mlp.router
        router.router_replay = ReplayedChoice(replay, number - first) if replay.places else None
        router.load, router.place = load, place


def _take(replay: Replay, load: ExpertLoad, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    row = kwargs["packed_seq_params"]
    replay.take(row.chosen)
    load.take(row.routed)


def config_of(
    config: PreTrainedConfig, layout: Layout, train: TrainConfig, dtype: torch.dtype, options: dict[str, Any]
) -> TransformerConfig:
    """Return the model's Megatron configuration."""
    tp, pp, vpp = layout.size("tp"), layout.size("pp"), train.vpp
    stages: dict[str, Any] = {}
    if vpp > 1:
        stages = {"virtual_pipeline_model_parallel_size": vpp}
    # Stages must exchange shapes, because micro-batches differ in length.
    if pp > 1:
        stages |= {"pipeline_dtype": dtype, "variable_seq_lengths": True}
    if train.activation_checkpointing == "full":
        stages |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    fields = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": num_kv_heads(config),
        "kv_channels": head_dim(config),
        "ffn_hidden_size": config.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": layout.size("cp"),
        "use_cpu_initialization": layout.world.device.type == "cpu",
        "perform_initialization": False,
        # Otherwise the gradient buffers divide by the number of data shards.
        "calculate_per_token_loss": True,
        "expert_model_parallel_size": layout.size("ep"),
        "expert_tensor_parallel_size": 1,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
    }
    of_kind = MLATransformerConfig if "kv_lora_rank" in options else TransformerConfig
    return of_kind(**(fields | stages | options))


def chunks_of(
    config: TransformerConfig,
    dealt: Sequence[range],
    groups: ProcessGroupCollection,
    vocab_size: int,
    is_tied: bool,
    experts: Experts,
) -> dict[GPTModel, range]:
    """Return this rank's uninitialised chunks in order, with their layers.

    dealt: all chunks' layers; a stage has every n-th chunk.
    """
    made = {}
    _prepare_process()
    stage, num_stages, tp = groups.pp.rank(), groups.pp.size(), groups.tp.size()
    for place in range(stage, len(dealt), num_stages):
        is_last = place == len(dealt) - 1
        chunk = place // num_stages if len(dealt) > num_stages else None
        model = GPTModel(
            config,
            TransformerBlockSubmodules([_layer(config, experts.are_in(number)) for number in dealt[place]], Norm),
            -(-vocab_size // tp) * tp,
            max_sequence_length=0,
            pre_process=place == 0,
            post_process=is_last,
            share_embeddings_and_output_weights=is_tied,
            position_embedding_type="rope",
            pg_collection=groups,
            vp_stage=chunk,
        )
        if is_last:
            model.output_layer = Head(model.output_layer.weight, vocab_size, groups)
        # Routers and projections of latents are created on the CPU regardless of the configuration.
        model.to(torch.cuda.current_device())
        made[model] = dealt[place]
    return made


def _prepare_process() -> None:
    # Its sequence-parallel layers need it.
    tracker = get_cuda_rng_tracker()
    if RANDOM not in tracker.get_states():
        # Megatron asks for this state although nothing random is drawn.
        tracker.add(RANDOM, 0)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()


def _layer(config: TransformerConfig, is_mixture: bool) -> ModuleSpec:
    spec: ModuleSpec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if is_mixture else None,
        multi_latent_attention=config.multi_latent_attention,
    )
    own = spec.submodules
    if is_mixture:
        own.mlp.submodules.router = WatchedRouter
    own.input_layernorm = own.pre_mlp_layernorm = Norm
    attention = own.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.multi_latent_attention:
        attention.q_layernorm = attention.kv_layernorm = LatentNorm
        # Whole on each rank: the parts of others would be gathered over a group of Megatron's global state.
        attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    return spec
