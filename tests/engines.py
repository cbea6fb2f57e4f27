"""Real vLLM and SGLang engines for tests, in this process. Skips where they cannot be imported.

    with vllm_engine(tiny("llama", path, **VLLM_SIZES)) as engine: ...

Starting one takes seconds: share it across the tests of a module.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from spmd_rl.config.schema import EngineConfig, PolicyConfig
from spmd_rl.config.sections.constraint import ConstraintConfig
from spmd_rl.config.sections.lora import LoraConfig
from spmd_rl.distributed import World, solo
from spmd_rl.engine import build

NO_CONSTRAINT = ConstraintConfig()
VLLM_SIZES = {"hidden_size": 128, "head_dim": 32}
"""For `tiny`: vLLM's attention on the CPU knows no smaller heads."""

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
needs_sglang = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here: `make test-sglang` has it"
)


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
            dist.destroy_process_group()


@contextmanager
def started_engine(
    name: str,
    path: Path | str,
    dtype: str = "float32",
    max_running: int = 8,
    kv_tokens: int = 2048,
    lora: LoraConfig | None = None,
    constraint: ConstraintConfig = NO_CONSTRAINT,
    quantization: str | None = None,
) -> Iterator[object]:
    """A started engine without weights, at world 1, over the default group that is there or one of its own."""
    sizes = {"max_running": max_running, "kv_tokens": kv_tokens}
    settings = EngineConfig(name=name, adapters=lora is not None, quantization=quantization, **sizes)
    policy = PolicyConfig(model=str(path), dtype=dtype, lora=lora or LoraConfig())
    with one_rank() as world:
        engine = build(settings, policy, False, world, constraint)
        yield engine
        engine.close()


vllm_engine = partial(started_engine, "vllm")
sglang_engine = partial(started_engine, "sglang")
