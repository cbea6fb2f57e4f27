"""Construction of an engine over SGLang."""

import torch

from spmd_rl.config.sections.constraint import ConstraintConfig
from spmd_rl.config.sections.engine import EngineConfig
from spmd_rl.config.sections.models import ServedModelConfig
from spmd_rl.distributed import World
from spmd_rl.engine.base import Engine
from spmd_rl.engine.fused_weights import expected_shapes
from spmd_rl.engine.replicated import ReplicatedEngine, replica_group
from spmd_rl.engine.sequence import text_of_model
from spmd_rl.engine.sglang.guest import hosted
from spmd_rl.model.constraint import constraint_of

START_SECONDS = 600
"""Limit without progress on importing and starting SGLang"""


def build(
    settings: EngineConfig, policy: ServedModelConfig, sleeps: bool, world: World, constraint: ConstraintConfig
) -> Engine:
    """[all] Return an engine of the policy's architecture and dtype on this rank's device."""
    tp, sleeps = settings.tp, sleeps and world.device.type != "cpu"
    patience = world.journal.extend_timeout(START_SECONDS)
    with world.collective("engine: start sglang"), patience, hosted(world.device.type):  # [all]
        from spmd_rl.engine.sglang.adapter_slot import SglangAdapter, engine_args
        from spmd_rl.engine.sglang.engine import FUSIONS, SglangEngine
        from spmd_rl.engine.sglang.start import start

        shapes = expected_shapes(policy.model, policy.trust_remote_code)
        replica = replica_group(world, "sglang", tp)  # [replica]
        scheduler = start(
            policy.model,
            getattr(torch, policy.dtype),
            world.device,
            tp=tp,
            max_running=settings.max_running,
            kv_tokens=settings.kv_tokens,
            replica=replica,
            sleeps=sleeps,
            trust=policy.trust_remote_code,
            constraint=constraint_of(constraint, policy.model, policy.trust_remote_code),
            records_experts=policy.router_replay,
            args=settings.args | (engine_args(policy.lora, world.device.type) if settings.adapters else {}),
        )
        text_of = text_of_model(policy.model, policy.trust_remote_code)
        runner = scheduler.tp_worker.model_runner
        slot = SglangAdapter(runner.lora_manager, shapes, FUSIONS) if settings.adapters else None
        one = SglangEngine(scheduler, shapes, replica, sleeps=sleeps, text_of=text_of, slot=slot)
    return one if tp == 1 else ReplicatedEngine(one, world, tp)  # [all]
