"""What a plan of each backend says that a rank holds, against what two real ranks hold: tiny models on the CPU."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor
from torch.distributed.tensor import DTensor

from spmd_rl.config.load import load
from spmd_rl.config.packages import installed
from spmd_rl.config.schema import RlvrConfig
from spmd_rl.distributed import World
from spmd_rl.learn.losses import bind_loss
from spmd_rl.tools.plan.memory_tracker import MemoryTracker
from spmd_rl.tools.plan.rank import full_batch, trace
from spmd_rl.train import build_role
from tests.dist.harness import run_ranks
from tests.models import EXPERTS, tiny

TOKENS = 256
CASES = {
    "fsdp2": ("llama", ["policy.dtype=bfloat16"]),
    "fsdp2 pp": ("llama", ["train.pp=2", "policy.dtype=float32"]),
    **{f"deepspeed {n}": ("llama", [f"train.stage={n}", "policy.dtype=bfloat16"]) for n in (1, 2, 3)},
    "deepspeed float32": ("llama", ["train.stage=1", "policy.dtype=float32"]),
    "deepspeed adapters": ("llama", ["train.stage=3", "policy.dtype=bfloat16", "policy.lora.rank=4"]),
    "deepspeed offload": ("llama", ["train.stage=3", "policy.dtype=bfloat16", "train.offload_optimizer=true"]),
    "megatron": ("llama", ["policy.dtype=bfloat16"]),
    "megatron tp": ("llama", ["train.tp=2", "policy.dtype=float32"]),
    "megatron pp": ("llama", ["train.pp=2", "policy.dtype=bfloat16"]),
    "megatron pp adapters": ("llama", ["train.pp=2", "policy.dtype=bfloat16", "policy.lora.rank=4"]),
    "megatron ep": ("qwen3_moe", ["train.ep=2", "policy.dtype=bfloat16"]),
}
QUICK = {"fsdp2", "deepspeed 2", "megatron", "megatron ep"}
UNTOLD = {"deepspeed float32", "megatron pp adapters"}
"""Cases whose gradients a plan does not tell from other memory: open."""
PACKAGES = {"deepspeed": "deepspeed", "megatron": "megatron-core"}


def marks(case: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.xfail(strict=True)] * (case in UNTOLD) + [pytest.mark.slow] * (case not in QUICK)


def settings(model: str, overrides: list[str]) -> RlvrConfig:
    common = [f"policy.model={model}", "plan.device=cpu", f"train.tokens_per_microbatch={TOKENS}"]
    lengths = ["rollout.max_prompt_tokens=64", "rollout.max_new_tokens=64", "rollout.prompts_per_step=16"]
    return load("rlvr", RlvrConfig, [*common, *lengths, "rollout.answers_per_prompt=4", *overrides])


def num_bytes(tensors: Iterable[Tensor]) -> int:
    parts = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum({s._cdata: s.nbytes() for s in (part.untyped_storage() for part in parts)}.values())


def measured(world: World, model: str, overrides: list[str], count: int) -> dict[str, Any]:
    """Bytes that a real rank holds before and in an update of so many micro-batches."""
    cfg, held = settings(model, overrides), {}
    with MemoryTracker() as book:
        role = build_role(cfg.role("policy"), world)
        for kind, tensors in role.model.held().items():
            held[kind] = num_bytes(tensors)
        gradients = role.model.gradients

        def counted() -> Any:
            found = gradients()
            held["gradients"] = num_bytes(found.values())
            return found

        role.model.gradients = counted
        with book.window("update"):
            role.update(full_batch(cfg.algorithm, 128, count, TOKENS, 259), bind_loss(cfg.algorithm), 1.0)
    for entry in book.entries:
        if entry.made_by == "aten::from_file":  # through which ranks of one machine meet: no rank's own
            entry.tag = "transport"
    return held | {"peak": book.peak(book.span("update"), ["transport"]).total}


@pytest.mark.parametrize("case", [pytest.param(case, marks=marks(case)) for case in CASES])
def test_real_ranks_hold_what_was_planned(case: str, tmp_path: Path) -> None:
    name = case.split()[0]
    if name in PACKAGES and installed(PACKAGES[name]) is None:
        pytest.skip(f"{name} is not installed")
    kind, overrides = CASES[case]
    model, overrides = str(tiny(kind, tmp_path, **EXPERTS.get(kind, {}))), [f"train={name}", *overrides]
    found = run_ranks(2, measured, model, overrides, 3 if " pp" in case else 2, timeout=280)
    for rank, real in enumerate(found):
        with mock.patch.dict(os.environ):  # DeepSpeed sets LOCAL_RANK
            planned = trace(settings(model, overrides), rank, 2)
        update = planned.phases["update"][0].peak
        assert planned.held["policy weights"] == real["weights"]
        assert planned.held["policy optimizer"] == real["optimizer"]
        assert update.by_tag["policy gradients"] == real["gradients"]
        assert update.total == pytest.approx(real["peak"], rel=0.1)
