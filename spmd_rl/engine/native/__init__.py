"""Embedded engine: continuous batching over a Hugging Face module in the rank's process.

The default, and the reference of other engines' tests. One token per running request and step; paged KV cache with
shared prefixes. Left out: tensor parallelism, sliding windows, chunked prefill, preemption, shared prefixes of hybrid
models. Torch-free until it builds.
"""

from typing import Any

from spmd_rl.config.engines import EngineFacts


def build(*args: Any) -> Any:
    """[all] Build this rank's engine, see `engine.build`."""
    from spmd_rl.engine.native.engine import build

    return build(*args)  # [all]


ENGINE = EngineFacts(build=build, title="the native engine", reports_experts=True, states=True, pictures=True)
