"""vLLM in the rank's process: the engine for throughput, a replica over `engine.tp` x `engine.pp` ranks.

`tests/unit/test_vllm_contract.py` tests the behaviour needed here, `test_vllm_surface.py` names, parameters and
defaults. Torch-free until it builds.
"""

from typing import Any

from spmd_rl.config.engines import EngineFacts


def build(*args: Any) -> Any:
    """[all] Build this rank's engine, see `engine.build`."""
    from spmd_rl.engine.vllm.assemble import build

    return build(*args)  # [all]


ENGINE = EngineFacts(
    build=build,
    title="vLLM",
    package="vllm",
    axes=("tp", "pp"),
    takes_args=True,
    quantizations=("w8a8_fp8", "w8a8_int8"),
    drafts=True,
    adapters=True,
    adapters_of_mixtures=True,
    temperatures=(0.01, 2),
    sliding_windows=True,
    latent_attention=True,
    no_states=" (its CPU kernels of gated delta nets take bfloat16 alone, those of LFM2 and of GPUs are unproven)",
    pictures=True,
    picture_package="torchvision",
)
