"""The nearest layout that fits, by the size of the change.

Candidates are estimated (`estimate`); the first that seem to fit are traced, one by one.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, product
from math import log2
from typing import Any

from spmd_rl.base.errors import UserError
from spmd_rl.base.hub import model_folder
from spmd_rl.base.waits import phase
from spmd_rl.config.backends import backend
from spmd_rl.config.engines import facts_of
from spmd_rl.config.ranks import LayoutSizes, check_experts, deal_layers
from spmd_rl.config.schema import RlConfig, TrainConfig
from spmd_rl.model.logprobs import DEVICE_CHUNK
from spmd_rl.model.moe import num_experts
from spmd_rl.model.size import ModelSize, head_dim, num_kv_heads
from spmd_rl.tools.plan.engine import beside_training, dtype_of
from spmd_rl.tools.plan.rank import Trace
from spmd_rl.train.pipeline import most_in_flight

AXES = ("tp", "pp", "cp", "ep", "dp_replicate")
KEPT = {"none": 1.0, "selective": 0.5, "full": 0.0}
"""Share of a layer's activations kept for the backward pass"""
LADDER = ("none", "selective", "full")
MOST_TRACED = 4
MOST_TP = 8
"""Largest proposed tensor parallelism: beyond a node it is slow"""


def nearest(cfg: RlConfig, ranks: int, found: Trace, room: float, fits: Callable[[RlConfig], bool]) -> Iterator[str]:
    """Yield the overrides with which trainer ranks fit, else a line on the failed search."""
    with phase("looking for a layout that fits"):
        candidates = [other for other in _candidates(cfg, ranks, found) if estimate(other, ranks, found) <= room]
    # The smallest change first; among equal ones the one with most room.
    candidates.sort(key=lambda other: (_distance(cfg, other), estimate(other, ranks, found)))
    for other in islice(filter(_is_able, candidates), MOST_TRACED):
        with phase(f"trying {' '.join(changes(cfg, other))}"):
            good = fits(other)
        if good:
            yield f"the nearest that fits: {' '.join(changes(cfg, other))}"
            return
    tried = f"{len(candidates)} seemed to, of which {min(len(candidates), MOST_TRACED)} were traced"
    yield f"no layout near it fits ({tried}): more ranks (plan.ranks), a smaller engine.kv_tokens or a larger engine.tp"


def _is_able(cfg: RlConfig) -> bool:
    policy = cfg.role("policy")
    try:
        backend(policy.train.name).check(policy, model_folder(policy.model))
    except UserError:
        return False
    return True


def changes(cfg: RlConfig, other: RlConfig) -> list[str]:
    """Return the overrides from one to the other."""
    keys = (*AXES, "activation_checkpointing", "tokens_per_microbatch", "offload")
    found = [f"train.{key}={getattr(other.train, key)}" for key in keys if differ(cfg.train, other.train, key)]
    return [f"engine.tp={other.engine.tp}"] * (cfg.engine.tp != other.engine.tp) + found


def differ(one: TrainConfig, other: TrainConfig, key: str) -> bool:
    """Return True if this setting differs."""
    return getattr(one, key) != getattr(other, key)


def _candidates(cfg: RlConfig, ranks: int, found: Trace) -> Iterator[RlConfig]:
    train, mixture = cfg.train, num_experts(found.config)
    sizes = {axis: _near(getattr(train, axis)) for axis in AXES}
    sizes["dp_replicate"] = sorted({1, train.dp_replicate})
    sizes["ep"] = [2**i for i in range(9)] if mixture else [1]
    modes = LADDER[LADDER.index(train.activation_checkpointing) :]
    tokens = [train.tokens_per_microbatch // n for n in (1, 2, 4) if train.tokens_per_microbatch >= 1024 * n] or [
        train.tokens_per_microbatch
    ]
    offloads = [train.offload] if train.offload or cfg.plan.device == "cpu" else [False, True]
    # With separate generator ranks the engine's size does not help those that train.
    fixed = "tp" not in facts_of(cfg.engine.name).axes or cfg.placement.is_split
    replicas = [cfg.engine.tp] if fixed else [cfg.engine.tp * n for n in (1, 2, 4)]
    for axes in product(*sizes.values()):
        named = dict(zip(AXES, axes, strict=True))
        if not _is_possible(named, train.vpp, ranks, found):
            continue
        for mode, budget, offload, tp in product(modes, tokens, offloads, replicas):
            if (fixed or ranks % (tp * cfg.engine.pp) == 0) and not (named["pp"] > 1 and train.compile):
                own = {"activation_checkpointing": mode, "tokens_per_microbatch": budget, "offload": offload}
                yield replace(cfg, train=replace(train, **named, **own), engine=replace(cfg.engine, tp=tp))


def _near(size: int) -> list[int]:
    return sorted({1, size, 2 * size, 4 * size, 8 * size})


def _is_possible(axes: dict[str, int], vpp: int, ranks: int, found: Trace) -> bool:
    config = found.config
    heads = config.num_attention_heads
    kv_heads, tp = num_kv_heads(config), axes["tp"]
    try:
        LayoutSizes.of("train", ranks, **axes)
        check_experts("train", num_experts(config), "", axes["ep"])
        deal_layers("train", config.num_hidden_layers, axes["pp"], vpp)
    except UserError:
        return False
    # Latent attention is not sharded, nor are its saved buffers staged.
    latent = getattr(config, "kv_lora_rank", None)
    shared = heads % tp == 0 and config.intermediate_size % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
    return shared and tp <= MOST_TP and not (latent and (tp > 1 or axes["pp"] > 1))


def _distance(cfg: RlConfig, other: RlConfig) -> float:
    pairs = [(getattr(cfg.train, axis), getattr(other.train, axis)) for axis in (*AXES, "tokens_per_microbatch")]
    pairs.append((cfg.engine.tp, other.engine.tp))
    modes = [LADDER.index(one.train.activation_checkpointing) for one in (cfg, other)]
    return sum(abs(log2(a / b)) for a, b in pairs) + modes[1] - modes[0] + (cfg.train.offload != other.train.offload)


def estimate(cfg: RlConfig, ranks: int, found: Trace) -> float:
    """Return a rank's rough peak in bytes, from sizes alone."""
    train, config, size = cfg.train, found.config, found.size
    sizes, width = LayoutSizes.of("train", ranks, **train.axes), 4 if dtype_of(cfg.policy, cfg.plan) == "float32" else 2
    engine = beside_training(cfg, size, config)
    own = size.parameters / (ranks / sizes.dp_replicate)
    experts, dense = _of_layer(size, config)
    # Gathered weights of two layers, the unsharded gradients of one, and these again in float32 to be summed.
    layer = (experts / sizes.ep + dense / sizes.tp) * (3 * width + 4)
    ends = 2 * config.vocab_size * config.hidden_size / sizes.tp * (2 * width + 4)
    tokens = max(train.tokens_per_microbatch, found.longest) / sizes.cp
    per_layer = tokens * _activations(config) * width / sizes.tp
    chunks = min(most_in_flight(0, sizes.pp, found.microbatches, train.vpp), found.microbatches * train.vpp)
    in_flight = chunks * config.num_hidden_layers / (sizes.pp * train.vpp)
    inputs = tokens * config.hidden_size * width / sizes.tp
    kept = in_flight * (inputs + KEPT[train.activation_checkpointing] * per_layer) + 2 * per_layer
    learning = 16 * own + layer + ends + kept + 4 * DEVICE_CHUNK * 4
    if not train.offload:
        return learning + engine.weights + engine.kv
    publishing = 4 * own + engine.weights + 2.5 * experts * width + 2 * config.vocab_size * config.hidden_size * width
    return max(learning, publishing, engine.weights + engine.kv + engine.working)


def _of_layer(size: ModelSize, config: Any) -> tuple[float, float]:
    per_expert = 3 * config.hidden_size * getattr(config, "moe_intermediate_size", 0)
    experts = num_experts(config) * per_expert
    layers, ends = config.num_hidden_layers, 2 * config.vocab_size * config.hidden_size
    return experts, max(0.0, (size.parameters - ends) / layers - experts)


def _activations(config: Any) -> float:
    """Return the numbers that a layer keeps per token: norms, projections, feed-forward outputs."""
    units = config.intermediate_size
    if num_experts(config):
        units = (config.moe_intermediate_size + config.hidden_size) * (config.num_experts_per_tok + 1)
    return 8 * config.hidden_size + 6 * config.num_attention_heads * head_dim(config) + 5 * units
