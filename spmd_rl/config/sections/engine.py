"""What generates: `engine`."""

from dataclasses import dataclass, field
from typing import Any

from spmd_rl.config.values import at_least, one_of, require

SIMULATED = ("fp8", "int8", "int4")
"""Quantizations of the weights that are published: every engine takes the rounded ones."""
QUANTIZATIONS = (*SIMULATED, "w8a8_fp8", "w8a8_int8")
ENGINES = {name: f"spmd_rl.engine.{name}" for name in ("native", "vllm", "sglang")}
"""Engines: the packages that have their `ENGINE`, see `config/engines.py`."""


@dataclass
class EngineConfig:
    """The generation engine: group `engine`."""

    name: str = "native"
    """Generation engine: `native` is embedded and needs no package; `vllm` and `sglang` run them in the process of each
    rank."""
    tp: int = 1
    """Number of neighbouring ranks that share one copy of the engine (a replica) by tensor parallelism."""
    pp: int = 1
    """With `engine=vllm`: number of stages, of `tp` ranks each, that have some of a replica's layers. They take turns:
    for models that `tp` alone cannot hold."""
    max_running: int = 64
    """Largest number of requests that a replica decodes at the same time."""
    kv_tokens: int = 32768
    """Size of a replica's KV cache in tokens; `vllm` rounds it up to whole blocks."""
    quantization: str | None = None
    """Round the weights that answers are generated with as an engine in `fp8` (blocks of 128 x 128), `int8` (rows) or
    `int4` (groups of 32) would hold them: simulated, nothing is faster or smaller. `w8a8_int8`, `w8a8_fp8`: vLLM holds
    the layers' matrices so, by row, and computes in it. Correct for any by `algorithm.correction.level=token`."""
    drafts: int = 0
    """With `engine=vllm`: verify up to so many tokens at once that followed an answer's last ones before, in fewer
    steps. The tokens are others than without, equally distributed. On CPUs large batches do without."""
    adapters: bool = False
    """With `policy.lora`, on `vllm` and `sglang`: answer with the adapters beside the frozen weights, so that after the
    first publish adapters alone are sent. Default: each publish sends whole weights, with adapters merged into them."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's `EngineArgs`, such as `engine.args.max_num_batched_tokens=8192`, or of SGLang's
    `ServerArgs`. Those that other settings give, or that the engine leans on, are refused. `native` takes none."""

    def __post_init__(self) -> None:
        one_of(self, name=ENGINES, quantization=QUANTIZATIONS)
        at_least(self, tp=1, pp=1, max_running=1, kv_tokens=1, drafts=0)
        require(self.pp == 1 or not self.drafts, "drafts: not with engine.pp above 1; must be 0")
        is_ahead, steps = self.args.get("async_scheduling"), self.pp > 1 or self.drafts
        require(not (is_ahead and steps), "args.async_scheduling: not with engine.pp above 1 or engine.drafts")

    @property
    def ranks(self) -> int:
        """Of one replica."""
        return self.tp * self.pp

    @property
    def axes(self) -> str:
        """The sizes along which they stand."""
        return f"tp {self.tp}" + f" x pp {self.pp}" * (self.pp > 1)
