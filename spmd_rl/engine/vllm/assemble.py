"""Construction of an engine over vLLM."""

from pathlib import Path
from typing import Any

import torch

from spmd_rl.base.hub import model_folder
from spmd_rl.config.architectures import sees_pictures
from spmd_rl.config.sections.constraint import ConstraintConfig
from spmd_rl.config.sections.engine import EngineConfig
from spmd_rl.config.sections.models import ServedModelConfig
from spmd_rl.distributed import World
from spmd_rl.engine.base import Engine
from spmd_rl.engine.fused_weights import expected_shapes
from spmd_rl.engine.replicated import ReplicatedEngine, replica_group
from spmd_rl.engine.sequence import text_of_model
from spmd_rl.engine.vllm.guest import hosted
from spmd_rl.model.constraint import constraint_of
from spmd_rl.model.low_precision import W8A8, shapes_by_rows


def build(
    settings: EngineConfig, policy: ServedModelConfig, sleeps: bool, world: World, constraint: ConstraintConfig
) -> Engine:
    """[all] Return an engine of the policy's architecture and dtype on this rank's device."""
    with world.collective("engine: start vllm"), hosted(world.device.type, settings.pp):  # [all]
        from spmd_rl.engine.vllm import low_precision
        from spmd_rl.engine.vllm.adapter_slot import AdapterSlot, engine_args
        from spmd_rl.engine.vllm.constrained import constrain
        from spmd_rl.engine.vllm.engine import VllmEngine
        from spmd_rl.engine.vllm.start import start

        shapes = expected_shapes(policy.model, policy.trust_remote_code)
        dtype, args, outputs = getattr(torch, policy.dtype), settings.args, None
        if settings.adapters:
            args = args | engine_args(policy.lora.rank)
        if settings.quantization in W8A8:
            shapes = shapes_by_rows(shapes, settings.quantization)
            args = low_precision.engine_args(settings.quantization, args)
            outputs = low_precision.Outputs(settings.quantization, dtype)
            if world.device.type == "cpu" and settings.quantization == "w8a8_int8":
                low_precision.check_int8()
        sleeps = sleeps and world.device.type != "cpu"
        found = constraint_of(constraint, policy.model, policy.trust_remote_code)
        llm = start(
            policy.model,
            dtype,
            world.device,
            tp=settings.tp,
            pp=settings.pp,
            max_running=settings.max_running,
            kv_tokens=settings.kv_tokens,
            local_rank=world.local_rank,
            replica=replica_group(world, "vllm", settings.ranks),  # [replica]
            sleeps=sleeps,
            trust=policy.trust_remote_code,
            drafts=settings.drafts,
            args={"async_scheduling": runs_ahead(settings, world.device.type, found is not None)} | args,
        )
        if found:
            constrain(llm, found)
        text_of = text_of_model(policy.model, policy.trust_remote_code)
        slot = AdapterSlot(llm) if settings.adapters else None
        one = VllmEngine(
            llm,
            shapes,
            sleeps=sleeps,
            text_of=text_of,
            slot=slot,
            is_constrained=found is not None,
            outputs=outputs,
            pictures=_build_pictures(llm, model_folder(policy.model)),
        )
    return one if settings.ranks == 1 else ReplicatedEngine(one, world, settings.ranks)  # [all]


def runs_ahead(settings: EngineConfig, device_type: str, is_constrained: bool) -> bool:
    """Return the default of `async_scheduling`."""
    return device_type != "cpu" and settings.pp == 1 and not settings.drafts and not is_constrained


def _build_pictures(llm: Any, folder: Path) -> Any:
    if not sees_pictures(folder):
        return None
    # An engine of text alone imports neither of them, nor Pillow.
    from spmd_rl.engine.vllm.pictures import VllmPictures
    from spmd_rl.model.pictures import build_processor

    return VllmPictures(llm, build_processor(folder))
