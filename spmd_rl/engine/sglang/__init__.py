"""SGLang in the rank's process: its scheduler, driven turn by turn, a replica over `engine.tp` ranks.

Pinned to one version; `tests/unit/test_sglang_contract.py` checks its private names. Tokens are drawn by the native
engine's rule. Torch-free until it builds.
"""

from typing import Any

from spmd_rl.config.engines import EngineFacts


def build(*args: Any) -> Any:
    """[all] Build this rank's engine, see `engine.build`."""
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
