"""The embedded engine: continuous batching over a Hugging Face module in the rank's own process.

The default, and the reference the other engines are tested against. One token per running request and step, paged KV
cache; what a prompt shares with another one, or with an earlier turn, is computed once. Left out: tensor parallelism,
sliding windows, chunked prefill, preemption. Torch-free until it builds.
"""

from typing import Any

from spmd_rl.config.engines import EngineFacts


def build(*args: Any) -> Any:
    """[all] See `engine.build`."""
    from spmd_rl.engine.native.assemble import build

    return build(*args)  # [all]


ENGINE = EngineFacts(build=build, title="the native engine", reports_experts=True)
