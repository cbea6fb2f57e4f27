"""The models, what trains them and what generates with them: `policy`, `reference`, `train`, `engine`."""

from dataclasses import dataclass, field, replace
from os.path import expanduser
from typing import Any

from spmd_rl.config.values import above, at_least, one_of, require

DTYPES = ("bfloat16", "float32")
SCHEDULES = ("constant", "linear", "cosine")
BACKENDS = ("fsdp2",)
ENGINES = ("native", "vllm")


@dataclass
class PolicyConfig:
    """The model that is trained, and its optimizer (AdamW)."""

    model: str = "~/.cache/spmd_rl/models/smollm2-135m-instruct"
    """A Hugging Face causal LM directory (config.json, safetensors, tokenizer)."""
    dtype: str = "bfloat16"
    """Compute and engine dtype: `bfloat16` or `float32`. Master weights and optimizer state are float32 throughout."""
    lr: float = 2e-5
    """Peak learning rate."""
    schedule: str = "constant"
    """`constant`, `linear` or `cosine` decay to 0 at `steps`, after the warm-up."""
    warmup_steps: int = 0
    """Updates over which the learning rate rises linearly from 0."""
    max_grad_norm: float = 1.0
    """Global L2 norm to which gradients are clipped."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW's moment decays."""
    eps: float = 1e-8
    """AdamW's epsilon, added to the root of the second moment."""
    max_skipped_updates: int = 3
    """So many non-finite gradients in a row stop the run; each alone skips its update on all ranks."""
    trust_remote_code: bool = False
    """Run Python code that a model directory brings. Only for directories you trust."""

    def __post_init__(self) -> None:
        self.model = expanduser(self.model)
        check_trained(self)


def check_trained(section: Any) -> None:
    """The dtype and the optimizer of a model that is trained."""
    one_of(section, dtype=DTYPES, schedule=SCHEDULES)
    at_least(section, lr=0, warmup_steps=0, weight_decay=0, max_skipped_updates=1)
    above(section, max_grad_norm=0, eps=0)
    two_decays = len(section.betas) == 2 and all(0 <= beta < 1 for beta in section.betas)
    require(two_decays, f"betas: must be two numbers in [0, 1), not {section.betas}")


@dataclass
class TrainOverrides:
    """Where the training backend of a role differs from `train`; null takes the policy's."""

    name: str | None = None
    """`fsdp2`"""
    tp: int | None = None
    """Tensor-parallel ranks per model copy."""
    tokens_per_microbatch: int | None = None
    """Token budget of one forward and backward."""
    activation_checkpointing: bool | None = None
    """Recompute each layer's activations in the backward pass."""
    reshard_after_forward: bool | None = None
    """Give gathered layers back after use."""
    compile: bool | None = None
    """Compile the decoder layers."""
    offload: bool | None = None
    """Keep weights and optimizer state in host memory while generating."""

    def __post_init__(self) -> None:
        one_of(self, name=BACKENDS)
        at_least(self, tp=1, tokens_per_microbatch=1)

    def over(self, train: "TrainConfig") -> "TrainConfig":
        """The settings of `train`, with those of this section that are not null in their place."""
        return replace(train, **{key: value for key, value in vars(self).items() if value is not None})


@dataclass
class ReferenceConfig:
    """The frozen reference of the KL term, held in its compute dtype; loaded only when `algorithm.kl_coef` > 0."""

    model: str | None = None
    """Default: the policy's directory, as it was before training."""
    dtype: str | None = None
    """Default: the policy's."""
    train: TrainOverrides = field(default_factory=TrainOverrides)

    def __post_init__(self) -> None:
        self.model = self.model and expanduser(self.model)
        one_of(self, dtype=DTYPES)


@dataclass
class TrainConfig:
    """The training backend: group `train`."""

    name: str = "fsdp2"
    """`fsdp2`"""
    tp: int = 1
    """Tensor-parallel ranks per model copy."""
    pp: int = 1
    """Pipeline stages per model copy."""
    cp: int = 1
    """Context-parallel ranks per sequence."""
    ep: int = 1
    """Expert-parallel ranks."""
    tokens_per_microbatch: int = 4096
    """Token budget of one forward and backward; a longer single sequence gets a micro-batch of its own."""
    updates_per_step: int = 1
    """Optimizer steps on one step's samples."""
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass: less memory, a third more compute."""
    reshard_after_forward: bool | None = None
    """Give gathered layers back after use. `false` keeps them until the optimizer has stepped: two bytes a weight more,
    two gathers an update less. Default: `true` on devices, `false` on CPU."""
    compile: bool = False
    """Compile the decoder layers (`torch.compile`): faster steps after a minute or so of compiling in the first ones.
    Needs a C++ compiler on CPU, Triton on GPU; not together with `activation_checkpointing`."""
    offload: bool = False
    """Keep weights and optimizer state in host memory while generating. No effect on CPU."""

    def __post_init__(self) -> None:
        one_of(self, name=BACKENDS)
        at_least(self, tp=1, pp=1, cp=1, ep=1, tokens_per_microbatch=1, updates_per_step=1)
        # torch may meet a layer's second pass with another graph than its first, and then refuses
        both = self.compile and self.activation_checkpointing
        require(not both, "compile: not together with activation_checkpointing")
        require(not (self.compile and self.tp > 1), "compile: not together with tp > 1")


@dataclass
class EngineConfig:
    """The generation engine: group `engine`."""

    name: str = "native"
    """`native`: embedded, needs nothing. `vllm`: vLLM in the process of each rank."""
    tp: int = 1
    """Tensor-parallel ranks that hold one copy of the engine; replica r is ranks r tp to (r + 1) tp - 1."""
    max_running: int = 64
    """Requests decoded side by side in a replica."""
    kv_tokens: int = 32768
    """Tokens of KV cache in a replica; `vllm` rounds up to whole blocks."""

    def __post_init__(self) -> None:
        one_of(self, name=ENGINES)
        at_least(self, tp=1, max_running=1, kv_tokens=1)
