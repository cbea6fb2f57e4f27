"""Checks of adapters that an engine computes with: `engine.adapters`."""

from spmd_rl.base.errors import UserError
from spmd_rl.base.hub import model_folder
from spmd_rl.config.architectures import experts_in
from spmd_rl.config.engines import facts_of, with_ability
from spmd_rl.config.sections.engine import EngineConfig
from spmd_rl.config.sections.models import PolicyConfig, ServedModelConfig
from spmd_rl.config.sections.placement import PlacementConfig

MAX_RANK = 512
"""largest rank of adapters in vLLM"""


def check_adapters(engine: EngineConfig, policy: ServedModelConfig, placement: PlacementConfig | None = None) -> None:
    """Check that adapters can be sent without the model's weights."""
    if not engine.adapters:
        return
    lora, facts = policy.lora if isinstance(policy, PolicyConfig) else None, facts_of(engine.name)
    able = with_ability(lambda other: other.adapters)
    wrong = {
        "needs policy.lora.rank above 0": lora is None or not lora.rank,
        f"only with engine={able}; engine={engine.name} gets merged weights": not facts.adapters,
        "only with engine.tp=1 and engine.pp=1, where what the engine holds can be compared": engine.ranks != 1,
        "only with placement.mode=colocated or overlapped": placement is not None and placement.is_split,
        "not with policy.lora.dora, which engines lack": lora is not None and lora.dora,
        f"policy.lora.rank must be at most {MAX_RANK}": lora is not None and lora.rank > MAX_RANK,
        f"not with a mixture of experts on {facts.title}, whose experts it would give adapters too": (
            not facts.adapters_of_mixtures and experts_in(model_folder(policy.model)) != 0
        ),
    }
    for remedy, applies in wrong.items():
        if applies:
            raise UserError(f"engine.adapters: {remedy}")
