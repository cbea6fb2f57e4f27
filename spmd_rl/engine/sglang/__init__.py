"""SGLang in the rank's process: its scheduler, driven turn by turn, one replica over `engine.tp` neighbouring ranks.

Pinned to one version; `tests/unit/test_sglang_contract.py` checks its private names. Tokens are drawn by the native
engine's rule: a token depends only on its logits, its request's seed and its position. Torch-free until it builds.
"""

from typing import Any

from spmd_rl.config.engines import EngineFacts


def build(*args: Any) -> Any:
    """[all] Build the engine of this rank, see `engine.build`."""
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
