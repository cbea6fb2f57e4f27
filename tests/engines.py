"""Real vLLM and SGLang engines for tests, in this process. Skips where they cannot be imported.

    with vllm_engine(tiny("llama", path, **VLLM_SIZES)) as engine: ...

Starting one takes seconds: share it across the tests of a module.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spmd_rl.config.schema import EngineConfig, PolicyConfig
from spmd_rl.config.sections.constraint import ConstraintConfig
from spmd_rl.config.sections.lora import LoraConfig
from spmd_rl.distributed import World, solo
from spmd_rl.engine import build
from spmd_rl.types import Completion, Request

NO_CONSTRAINT = ConstraintConfig()
VLLM_SIZES = {"hidden_size": 128, "head_dim": 32}
"""For `tiny`: vLLM's attention on the CPU knows no smaller heads."""

VLLM_TORCH = "2.13."
"""The torch whose symbols vLLM's build for the CPU is linked against."""

has_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or not torch.__version__.startswith(VLLM_TORCH),
    reason=f"vLLM is not installed, or torch is not {VLLM_TORCH}x, for which its build for the CPU is made",
)
needs_sglang = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here: `make test-sglang` has it"
)
SHARDS_BYTES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
needs_nf4 = pytest.mark.skipif(not SHARDS_BYTES, reason="torch is older than 2.13, whose FSDP2 shards no bytes (NF4)")
OTHERS = [pytest.param("vllm", marks=needs_vllm), pytest.param("sglang", marks=needs_sglang)]
"""Engines beside the native one, as parameters of a test: skipped where they are not installed."""


def answers(engine: Any, *requests: Request) -> dict[str, Completion]:
    """All completions of some requests, by id."""
    for request in requests:
        engine.add(request)
    done = {}
    while engine.num_unfinished:
        done |= {completion.id: completion for completion in engine.step()}
    return done


@contextmanager
def one_rank() -> Iterator[World]:
    """A world of one rank with process groups, over the default group that is there or one of its own."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with solo() as world:
            yield world
    finally:
        if own:
            _leave_vllm()
            dist.destroy_process_group()


def _leave_vllm() -> None:
    """Forget the groups of a vLLM that has failed at its start or in a test: they end with the default group."""
    if state := sys.modules.get("vllm.distributed.parallel_state"):
        with suppress(AssertionError, ValueError):
            state.destroy_model_parallel()
        state._WORLD = state._NODE_COUNT = None


@contextmanager
def started_engine(
    name: str,
    path: Path | str,
    dtype: str = "float32",
    max_running: int = 8,
    kv_tokens: int = 2048,
    lora: LoraConfig | None = None,
    constraint: ConstraintConfig = NO_CONSTRAINT,
    router_replay: bool = False,
    **others: Any,
) -> Iterator[object]:
    """A started engine without weights, at world 1, over the default group that is there or one of its own.

    others: further settings of `engine`.
    """
    others |= {"max_running": max_running, "kv_tokens": kv_tokens, "adapters": lora is not None}
    settings = EngineConfig(name=name, **others)
    policy = PolicyConfig(model=str(path), dtype=dtype, lora=lora or LoraConfig(), router_replay=router_replay)
    with one_rank() as world:
        engine = build(settings, policy, False, world, constraint)
        try:
            yield engine
        finally:
            engine.close()


vllm_engine = partial(started_engine, "vllm")
sglang_engine = partial(started_engine, "sglang")
