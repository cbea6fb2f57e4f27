"""Settings of the generation engine: `engine`."""

from dataclasses import dataclass, field
from typing import Any

from spmd_rl.config.values import at_least, one_of, require

SIMULATED = ("fp8", "int8", "int4")
"""Quantizations that any engine simulates by rounding published weights"""
QUANTIZATIONS = (*SIMULATED, "w8a8_fp8", "w8a8_int8")
ENGINES = {name: f"spmd_rl.engine.{name}" for name in ("native", "vllm", "sglang")}
"""Packages of the engines, each with its `ENGINE`."""


@dataclass
class EngineConfig:
    """The generation engine: group `engine`."""

    name: str = "native"
    """`native` (embedded, needs no package), `vllm` or `sglang`, in the process of each rank."""
    tp: int = 1
    """Neighbouring ranks that share one copy of the engine (a replica) by tensor parallelism."""
    pp: int = 1
    """Pipeline stages of a replica, of `tp` ranks each, for models too large for `tp` (vLLM)."""
    max_running: int = 64
    """Most requests that a replica decodes at once."""
    kv_tokens: int = 32768
    """Size of a replica's KV cache in tokens; `vllm` rounds up to whole blocks."""
    quantization: str | None = None
    """Rounding of the weights for generation: `fp8` (blocks of 128 x 128), `int8` (rows) or `int4` (groups of 32) are
    simulated, so nothing is faster or smaller. `w8a8_int8`, `w8a8_fp8`: vLLM stores and multiplies the layers' matrices
    in this form. Combine with `algorithm.correction.level=token`."""
    drafts: int = 0
    """Draft tokens under `engine=vllm`, taken from earlier text of the answer and verified at once. Other tokens from
    the same distribution; large batches on CPUs get slower."""
    adapters: bool = False
    """Publish only adapters after the first publish, and answer with them on the frozen weights (`vllm` or `sglang`,
    with `policy.lora`). Default: publish merged weights."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's `EngineArgs`, as `engine.args.max_num_batched_tokens=8192`, or SGLang's `ServerArgs`.
    Those that other settings determine are refused."""

    def __post_init__(self) -> None:
        one_of(self, name=ENGINES, quantization=QUANTIZATIONS)
        at_least(self, tp=1, pp=1, max_running=1, kv_tokens=1, drafts=0)
        require(self.pp == 1 or not self.drafts, "drafts: not supported with engine.pp above 1; must be 0")
        is_ahead, steps = self.args.get("async_scheduling"), self.pp > 1 or self.drafts
        require(
            not (is_ahead and steps), "args.async_scheduling: not supported with engine.pp above 1 or engine.drafts"
        )

    @property
    def ranks(self) -> int:
        """Number of ranks in one replica."""
        return self.tp * self.pp

    @property
    def axes(self) -> str:
        """Parallel sizes of a replica, as text."""
        return f"tp {self.tp}" + f" x pp {self.pp}" * (self.pp > 1)
