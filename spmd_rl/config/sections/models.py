"""Models and their training: `policy`, `reference`, `critic`, `train`."""

from dataclasses import dataclass, field
from os.path import expanduser
from typing import Any, ClassVar

from spmd_rl.config.sections.constraint import ConstraintConfig
from spmd_rl.config.sections.lora import LoraConfig
from spmd_rl.config.values import above, at_least, one_of, require

DTYPES = ("bfloat16", "float32", "float16")
POLICY_DTYPES = ("auto", *DTYPES)
OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("constant", "linear", "cosine")
BACKENDS = {
    "fsdp2": "spmd_rl.train.fsdp2",
    "deepspeed": "spmd_rl.train.deepspeed",
    "megatron": "spmd_rl.train.megatron",
}
"""Packages of the training backends, each with its `BACKEND`; see `config/backends.py`."""
CHECKPOINTING = ("none", "selective", "full")


@dataclass
class ModelConfig:
    """A model by its directory and compute dtype; null means the policy's."""

    model: str | None = None
    """A Hugging Face causal LM directory, or a model of the hub (`ORG/NAME@REVISION`). Default: the policy's, as it was
    before training."""
    dtype: str | None = None
    """Compute dtype: `bfloat16`, `float32` or `float16`. Default: the policy's."""

    def __post_init__(self) -> None:
        self.model = self.model and expanduser(self.model)
        one_of(self, dtype=POLICY_DTYPES if isinstance(self, ServedModelConfig) else DTYPES)


@dataclass
class TrainedModelConfig(ModelConfig):
    """A trained model and its optimizer."""

    optimizer: str = "adamw"
    """`adamw`; or `muon`: the matrices of the layers take orthogonalised steps, the rest (embeddings, output, norms,
    biases) AdamW's. Its steps are scaled to the size of AdamW's, so that `lr` and `weight_decay` suit both. It keeps
    half the state of AdamW, and gathers all matrices once an update.
    """
    lr: float = 1e-6
    """Peak learning rate of the schedule."""
    schedule: str = "constant"
    """Learning rate after the warm-up: `constant`, or a `linear` or `cosine` decay to 0 at `steps`."""
    warmup_steps: int = 0
    """Updates over which the learning rate rises linearly from 0."""
    max_grad_norm: float = 1.0
    """Global L2 norm to which gradients are clipped."""
    weight_decay: float = 0.0
    """Decoupled weight decay, as AdamW has it."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of AdamW's first and second moment."""
    eps: float = 1e-8
    """AdamW's epsilon, added to the root of the second moment."""
    muon_momentum: float = 0.95
    """Decay rate of the mean of gradients under `optimizer=muon`, with Nesterov's look ahead."""
    dither: bool = True
    """Let the float32 master of each weight begin at a random point of the interval that rounds to it, not in the
    middle. The model starts the same to the bit, but small steps are no longer lost to rounding. No effect in float32.
    """
    router_aux_coef: float = 0.0
    """Mixtures of experts: coefficient of the auxiliary loss that balances the load of the experts, 1 when balanced,
    for each layer. Transformers' `router_aux_loss_coef`, in a model's config.json, is not read.
    """
    router_bias_update_speed: float = 0.0
    """Mixtures of experts whose routers have a bias for each expert (DeepSeek-V3, GLM-4.5): change of the bias after
    each update, up if the expert had less than the mean load, else down. 0.001 in DeepSeek-V3.
    """
    freeze_vision_tower: bool = True
    """Models with pictures: keep the vision tower, and what joins it to the language model, as it was. With `false` it
    is trained like the rest; with `lora.rank` its blocks then get adapters too."""
    max_skipped_updates: int = 3
    """Number of consecutive non-finite gradients after which the run stops; each one skips its update on all ranks."""
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, optimizer=OPTIMIZERS, schedule=SCHEDULES)
        at_least(
            self,
            lr=0,
            warmup_steps=0,
            weight_decay=0,
            router_aux_coef=0,
            router_bias_update_speed=0,
            max_skipped_updates=1,
        )
        above(self, max_grad_norm=0, eps=0)
        two_decays = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(two_decays, f"betas: must be two numbers in [0, 1), not {self.betas}")
        require(0 <= self.muon_momentum < 1, f"muon_momentum: must be in [0, 1), not {self.muon_momentum}")


@dataclass
class ServedModelConfig(ModelConfig):
    """The model that generates answers, as a section."""

    router_replay: ClassVar[bool] = False

    model: str = "~/.cache/spmd_rl/models/smollm2-135m-instruct"
    """A Hugging Face causal LM directory (config.json, safetensors, tokenizer), or a model of the hub, which is
    downloaded: `Qwen/Qwen2.5-0.5B-Instruct`, with `@REVISION` for a branch, tag or commit."""
    dtype: str = "auto"
    """Compute and engine dtype: `bfloat16`, `float32`, `float16` (with a loss scale that keeps gradients in its range),
    or `auto`: bfloat16 if the hardware of all ranks supports it, else float32. Master weights and optimizer state are
    always float32.
    """
    trust_remote_code: bool = False
    """Run Python code from a model directory. Only for directories you trust, and only as a command-line override."""


@dataclass
class EvaluatedModelConfig(ServedModelConfig):
    """The model that is evaluated."""

    model: str = ServedModelConfig.model
    """A Hugging Face causal LM directory, a model of the hub (`Qwen/Qwen2.5-0.5B-Instruct`, with `@REVISION`), a
    checkpoint, or a run directory, which means its newest checkpoint.
    """
    checkpoint: str | None = None
    """A checkpoint, trained from `model`, whose weights are used. A run or a checkpoint as `model` sets both."""


@dataclass
class PolicyConfig(ServedModelConfig, TrainedModelConfig):
    """The policy and its optimizer."""

    router_replay: bool = False
    """Mixtures of experts: training sends each sampled token to the experts that the engine chose for it, so that small
    differences between the two do not become large ones (R3). Needs the router's choices from `engine=native` or
    `sglang`.
    """


@dataclass
class BackendConfig:
    """The training backend of a role, and the layout and memory of its model."""

    name: str = "fsdp2"
    """Training backend: `fsdp2`, `deepspeed` or `megatron`."""
    tp: int = 1
    """Number of tensor-parallel ranks that share one copy of the model."""
    cp: int = 1
    """Number of context-parallel ranks that share the tokens of a micro-batch, for sequences too long for one rank.
    `tokens_per_microbatch` is their total.
    """
    ep: int = 1
    """Number of expert-parallel ranks that share the experts of a mixture: each holds 1/ep of every layer's, and tokens
    travel to them. They are ranks of `dp_shard` x `cp` x `tp`, and take none away from the data.
    """
    pp: int = 1
    """Number of pipeline stages, among which the layers are divided; micro-batches pass through them (1F1B), so that an
    update should have several times as many as there are stages. All ranks of a pipeline hold the same data shard.
    """
    vpp: int = 1
    """Number of chunks of the layers that each pipeline stage holds, in turns with the other stages (interleaved 1F1B):
    stages wait a vpp-th as long for each other, send vpp times as much, and keep a few more activations.
    """
    dp_replicate: int = 1
    """Number of copies of the model, each sharded over ranks / tp / dp_replicate of them (HSDP). With one copy a node,
    weights are gathered within a node, and only gradients cross between nodes, once an update.
    """
    tokens_per_microbatch: int = 4096
    """Token budget of one forward and backward pass, from which the number of micro-batches follows (there is no
    gradient accumulation to set). A longer single sequence gets a separate micro-batch.
    """
    activation_checkpointing: str = "none"
    """Activations recomputed in the backward pass instead of being kept: `full`, those of each layer, for a third more
    compute; `selective`, all but attention and every second matrix product; `none`. `true` is `full`, `false` is
    `none`.
    """
    reshard_after_forward: bool | None = None
    """Free the gathered weights of a layer after each use. With `false` they stay until the optimizer's step, which
    takes two more bytes per weight and saves two gathers per update. Default: `true` on devices, `false` on CPU and
    in pipelines, where it would save two gathers per micro-batch."""
    compile: bool = False
    """Compile the decoder layers with `torch.compile`. The first steps take a minute or more longer, later ones less.
    Needs a C++ compiler on CPU, Triton on GPU."""
    offload: bool = False
    """Keep a role's weights in host memory while it computes nothing, and its optimizer's state except during the
    optimizer's step. The engine's weights leave the device while it does not generate. It has no effect on CPU.
    """
    deterministic: bool = False
    """Compute forward and backward passes with torch's deterministic algorithms. A rerun on a GPU needs it to be
    bitwise equal: attention's backward pass and sums over indices otherwise add in any order. Slower on a GPU; on a CPU
    reruns are equal without it. It changes nothing in vLLM's and SGLang's own kernels.
    """
    stage: int = 3
    """DeepSpeed's ZeRO stage. 1 shards the optimizer's state, 2 gradients too, 3 weights too."""
    offload_optimizer: bool = False
    """DeepSpeed: keep master weights and optimizer state in host memory, where the optimizer's step is computed."""
    offload_param: bool = False
    """DeepSpeed: keep the shards of the weights in host memory too. With `stage=3`."""

    def __post_init__(self) -> None:
        one_of(self, name=BACKENDS)
        at_least(self, tp=1, cp=1, ep=1, pp=1, vpp=1, dp_replicate=1, tokens_per_microbatch=1)
        require(self.stage in (1, 2, 3), f"stage: must be 1, 2 or 3, not {self.stage}")
        value = self.activation_checkpointing
        self.activation_checkpointing = {"True": "full", "False": "none"}.get(str(value), value)
        one_of(self, activation_checkpointing=CHECKPOINTING)

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the layout, as `distributed.Layout` takes them."""
        return {"tp": self.tp, "cp": self.cp, "ep": self.ep, "pp": self.pp, "dp_replicate": self.dp_replicate}

    @property
    def used_axes(self) -> dict[str, int]:
        """Size of `tp`, and those of the other axes with more than one rank."""
        return {axis: size for axis, size in self.axes.items() if size > 1 or axis == "tp"}

    @property
    def ranks_per_shard(self) -> int:
        """Number of ranks that hold the same data shard."""
        return self.tp * self.cp * self.pp


@dataclass
class TrainConfig(BackendConfig):
    """The training backend: group `train`."""

    updates_per_step: int = 1
    """Optimizer updates per training step, each on an equal share of its samples (mini-batches)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, updates_per_step=1)


PARTIAL_TRAIN = {"partial": BackendConfig}
"""Mark of a mapping of the keys of `train` that differ for a role"""


@dataclass
class ReferenceConfig(ModelConfig):
    """The frozen reference of the KL term, held in its compute dtype; loaded only when `algorithm.kl_coef` > 0."""

    train: dict[str, Any] = field(default_factory=dict, metadata=PARTIAL_TRAIN)
    """Keys of `train` that differ for this role, such as `tp=2`; all but `updates_per_step`."""


@dataclass
class CriticConfig(TrainedModelConfig):
    """The critic of PPO, which predicts scores with a value head; it is trained only with `algorithm.advantage=gae` or
    `turn_gae`."""

    lr: float = 1e-5
    """Peak learning rate of the schedule."""
    train: dict[str, Any] = field(default_factory=dict, metadata=PARTIAL_TRAIN)
    """Keys of `train` that differ for this role, such as `tp=2`; all but `updates_per_step`."""


@dataclass
class FollowingReferenceConfig(ReferenceConfig):
    """The reference of the KL term; loaded only when `algorithm.kl_coef` or `kl_reward_coef` > 0. It keeps the initial
    weights, or follows the policy.
    """

    sync_steps: int | None = None
    """Number of steps between updates of the reference from the policy (null: never updated)."""
    mixup: float = 1.0
    """Share of the policy's weights in the updated reference: 1 copies them, less makes a moving average, which is held
    in float32.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, sync_steps=1)
        require(0 < self.mixup <= 1, f"mixup: must be above 0 and at most 1, not {self.mixup}")


@dataclass(frozen=True)
class RoleConfig:
    """Settings of a role: its own section, completed from the policy's."""

    name: str
    """`policy`, `reference`, `critic`, `teacher` or `teacher.<domain>`"""
    own: ModelConfig
    """Section of the role itself."""
    model: str
    dtype: str
    trust_remote_code: bool
    train: TrainConfig
    total_updates: int
    """Number of updates after which the schedule of the learning rate ends."""
    section: str = ""
    """Section of the settings, if it is not `name`."""
    value_bias: bool = True
    """True if the value head has a bias, as a critic's does and a reward model's does not."""
    constraint: ConstraintConfig = field(default_factory=ConstraintConfig)
    """Grammar of the answers that it judges."""
    is_denoiser: bool = False
    """True for a diffusion model."""

    @property
    def kind(self) -> str:
        """`policy`, `reference`, `critic` or `teacher`"""
        return self.name.partition(".")[0]

    @property
    def optimizer(self) -> TrainedModelConfig | None:
        """Section with the settings of an optimizer; None for a frozen role."""
        return self.own if isinstance(self.own, TrainedModelConfig) else None

    @property
    def sync_steps(self) -> int | None:
        """Number of steps between updates of a reference that follows the policy."""
        return self.own.sync_steps if isinstance(self.own, FollowingReferenceConfig) else None

    @property
    def lora(self) -> LoraConfig:
        """Adapters of the role; of rank 0 if it has none."""
        return self.optimizer.lora if self.optimizer else LoraConfig()

    @property
    def held_dtype(self) -> str:
        """Dtype in which the weights are held. Under adapters they are frozen, hence in the compute dtype `dtype`."""
        mixes = self.sync_steps is not None and self.own.mixup < 1
        return "float32" if mixes or (self.optimizer is not None and not self.lora.rank) else self.dtype

    def is_base_of(self, policy: "RoleConfig") -> bool:
        """Return True if this is the policy with its adapters off: frozen, of the same model, computed alike."""
        alike = (self.model, self.dtype, self.train) == (policy.model, policy.dtype, policy.train)
        frozen = self.name == "reference" and self.sync_steps is None
        return alike and frozen and policy.lora.rank > 0

    @property
    def key(self) -> str:
        """Key of its `train` section in the settings."""
        return "train" if (self.section or self.name) == "policy" else f"{self.name}.train"

    @property
    def model_key(self) -> str:
        """Key of its model in the settings."""
        return f"{self.section or self.name}.model"
