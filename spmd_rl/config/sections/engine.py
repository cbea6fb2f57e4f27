"""Settings of the generation engine: `engine`."""

from dataclasses import dataclass, field
from typing import Any

from spmd_rl.config.values import at_least, one_of, require

SIMULATED = ("fp8", "int8", "int4")
"""Quantizations of the published weights, simulated by rounding, for every engine."""
QUANTIZATIONS = (*SIMULATED, "w8a8_fp8", "w8a8_int8")
ENGINES = {name: f"spmd_rl.engine.{name}" for name in ("native", "vllm", "sglang")}
"""Packages of the engines, each with its `ENGINE`; see `config/engines.py`."""


@dataclass
class EngineConfig:
    """The generation engine: group `engine`."""

    name: str = "native"
    """Generation engine: `native` is embedded and needs no package; `vllm` and `sglang` run in the process of each
    rank.
    """
    tp: int = 1
    """Number of neighbouring ranks that share one copy of the engine (a replica) by tensor parallelism."""
    pp: int = 1
    """Number of pipeline stages of a replica under `engine=vllm`, of `tp` ranks each, for models that `tp` alone cannot
    hold. Each stage has some of the layers, and stages take turns.
    """
    max_running: int = 64
    """Largest number of requests that a replica decodes at the same time."""
    kv_tokens: int = 32768
    """Size of a replica's KV cache in tokens; `vllm` rounds it up to whole blocks."""
    quantization: str | None = None
    """Round the weights for generation to `fp8` (blocks of 128 x 128), `int8` (rows) or `int4` (groups of 32):
    simulated, nothing is faster or smaller. `w8a8_int8`, `w8a8_fp8`: vLLM holds the layers' matrices in this form, by
    row, and computes in it. Correct for any by `algorithm.correction.level=token`.
    """
    drafts: int = 0
    """Number of draft tokens under `engine=vllm`, those that followed an answer's last ones before, that are verified
    at once in fewer steps. The tokens differ from those without drafts but have the same distribution. Large batches on
    CPUs are faster without.
    """
    adapters: bool = False
    """Answer with adapters on the frozen weights, on `vllm` and `sglang` with `policy.lora`, so that after the first
    publish only adapters are sent. Default: each publish sends whole weights, with adapters merged into them.
    """
    args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's `EngineArgs`, such as `engine.args.max_num_batched_tokens=8192`, or of SGLang's
    `ServerArgs`. Those that other settings determine, or that the engine depends on, are refused. `native` takes none.
    """

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
        """Parallel sizes of a replica as text."""
        return f"tp {self.tp}" + f" x pp {self.pp}" * (self.pp > 1)
