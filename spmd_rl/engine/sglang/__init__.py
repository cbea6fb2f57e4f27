"""SGLang in the rank's own process: its scheduler, driven by hand, one replica over `engine.tp` neighbouring ranks.

Pinned to one version, whose private names `tests/unit/test_sglang_contract.py` finds. Tokens are drawn by the native
engine's rule, so that a token depends on its logits, its request's seed and its place alone.
Torch-free until it builds.
"""

from typing import Any

from spmd_rl.config.engines import EngineFacts


def build(*args: Any) -> Any:
    """[all] See `engine.build`."""
    from spmd_rl.engine.sglang.assemble import build

    return build(*args)  # [all]


ENGINE = EngineFacts(
    build=build,
    title="SGLang",
    package="sglang",
    axes=("tp",),
    takes_args=True,
    adapters=True,
    reports_experts=True,
    sliding_windows=True,
    latent_attention=True,
)
