"""The embedded engine: continuous batching over a Hugging Face module in the rank's process.

The default, and the reference for tests of the other engines. One token per running request and step; paged KV cache
with shared prefixes of prompts and earlier turns. Left out: tensor parallelism, sliding windows, chunked prefill,
preemption, and shared prefixes of hybrid models. Torch-free until it builds.
"""

from typing import Any

from spmd_rl.config.engines import EngineFacts


def build(*args: Any) -> Any:
    """[all] Build the engine of this rank, see `engine.build`."""
    from spmd_rl.engine.native.engine import build

    return build(*args)  # [all]


ENGINE = EngineFacts(build=build, title="the native engine", reports_experts=True, states=True, pictures=True)
