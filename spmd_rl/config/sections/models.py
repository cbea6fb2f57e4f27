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
"""Packages of the training backends, each with its `BACKEND`."""
CHECKPOINTING = ("none", "selective", "full")


@dataclass
class ModelConfig:
    """A model by its directory and compute dtype; null means the policy's."""

    model: str | None = None
    """A Hugging Face causal LM directory or hub model (`ORG/NAME@REVISION`). Default: the policy's, before training."""
    dtype: str | None = None
    """Compute dtype: `bfloat16`, `float32` or `float16`. Default: the policy's."""

    def __post_init__(self) -> None:
        self.model = self.model and expanduser(self.model)
        one_of(self, dtype=POLICY_DTYPES if isinstance(self, ServedModelConfig) else DTYPES)


@dataclass
class TrainedModelConfig(ModelConfig):
    """A trained model and its optimizer."""

    optimizer: str = "adamw"
    """`adamw`, or `muon`: orthogonalised steps for the layers' matrices, AdamW's for the rest (embeddings, output,
    norms, biases). Steps are scaled to AdamW's size, so `lr` and `weight_decay` suit both. Half of AdamW's state; all
    matrices are gathered once an update."""
    lr: float = 1e-6
    """Peak learning rate of the schedule."""
    schedule: str = "constant"
    """Learning rate after warm-up: `constant`, or a `linear` or `cosine` decay to 0 at `steps`."""
    warmup_steps: int = 0
    """Updates of linear warm-up from 0."""
    max_grad_norm: float = 1.0
    """Largest global L2 norm of the gradient."""
    weight_decay: float = 0.0
    """Decoupled weight decay, as in AdamW."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of AdamW's first and second moment."""
    eps: float = 1e-8
    """AdamW's epsilon, added to the second moment's root."""
    muon_momentum: float = 0.95
    """Decay rate of Muon's gradient mean, with Nesterov momentum."""
    dither: bool = True
    """Start each weight's float32 master at a random point that rounds to it. The model is the same to the bit, and
    small steps are not lost to rounding. No effect in float32."""
    router_aux_coef: float = 0.0
    """Mixtures of experts: coefficient of each layer's load-balancing loss, which is 1 when balanced. A model's own
    `router_aux_loss_coef` is not read."""
    router_bias_update_speed: float = 0.0
    """Mixtures of experts with router biases (DeepSeek-V3, GLM-4.5): step by which each update raises the bias of
    experts below mean load and lowers the others. 0.001 in DeepSeek-V3."""
    freeze_vision_tower: bool = True
    """Models with pictures: freeze the vision tower and its projector. `false` trains them; with `lora.rank`, by
    adapters on the tower's blocks."""
    max_skipped_updates: int = 3
    """Consecutive non-finite gradients, each of which skips its update, before the run stops."""
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
    """The model that generates answers."""

    router_replay: ClassVar[bool] = False

    model: str = "~/.cache/spmd_rl/models/smollm2-135m-instruct"
    """A Hugging Face causal LM directory (config.json, safetensors, tokenizer), or a hub model to download:
    `Qwen/Qwen2.5-0.5B-Instruct`, with `@REVISION` for a branch, tag or commit."""
    dtype: str = "auto"
    """Compute and engine dtype: `bfloat16`, `float32`, `float16` (with loss scaling), or `auto`: bfloat16 if all ranks'
    hardware supports it, else float32. Master weights and optimizer state are float32."""
    trust_remote_code: bool = False
    """Run Python code of a trusted model directory. Only as a command-line override."""


@dataclass
class EvaluatedModelConfig(ServedModelConfig):
    """The model that is evaluated."""

    model: str = ServedModelConfig.model
    """A Hugging Face causal LM directory, a hub model (`Qwen/Qwen2.5-0.5B-Instruct`, with `@REVISION`), a checkpoint,
    or a run directory: its newest checkpoint."""
    checkpoint: str | None = None
    """A checkpoint, trained from `model`, to load. A run or checkpoint as `model` sets both."""


@dataclass
class PolicyConfig(ServedModelConfig, TrainedModelConfig):
    """The policy and its optimizer."""

    router_replay: bool = False
    """Mixtures of experts: train each sampled token with the experts that the engine chose, so that small differences
    stay small (R3). With `engine=native` or `sglang`."""


@dataclass
class BackendConfig:
    """Training backend, layout and memory of a role."""

    name: str = "fsdp2"
    """Training backend: `fsdp2`, `deepspeed` or `megatron`."""
    tp: int = 1
    """Tensor-parallel ranks per copy of the model."""
    cp: int = 1
    """Context-parallel ranks that share a micro-batch of `tokens_per_microbatch`, for sequences too long for one rank.
    """
    ep: int = 1
    """Expert-parallel ranks, each with 1/ep of every layer's experts; tokens travel to them. They are among the ranks
    of `dp_shard` x `cp` x `tp`."""
    pp: int = 1
    """Pipeline stages that divide the layers (1F1B); an update should have several micro-batches per stage. A
    pipeline's ranks hold the same data shard."""
    vpp: int = 1
    """Chunks of layers per pipeline stage (interleaved 1F1B): stages wait 1/vpp as long, send vpp times as much, and
    keep some more activations."""
    dp_replicate: int = 1
    """Copies of the model, each sharded over ranks / tp / dp_replicate (HSDP). With one copy a node, only gradients
    cross between nodes, once an update."""
    tokens_per_microbatch: int = 4096
    """Token budget of a micro-batch, which determines how many there are (instead of gradient accumulation steps). A
    longer sequence gets its own."""
    activation_checkpointing: str = "none"
    """Activations to recompute in the backward pass: `full` (each layer's, for a third more compute), `selective` (all
    but attention and every second matrix product) or `none`. `true` is `full`, `false` is `none`."""
    reshard_after_forward: bool | None = None
    """Free a layer's gathered weights after each use. `false` keeps them until the optimizer's step: two more bytes per
    weight, two gathers fewer per update. Default: `true` on devices, `false` on CPU and in pipelines, where it saves
    two gathers per micro-batch."""
    compile: bool = False
    """Compile decoder layers with `torch.compile`: first steps take a minute or more longer, later ones less. Needs
    a C++ compiler on CPU, Triton on GPU. Experts are left out."""
    offload: bool = False
    """Keep idle roles' weights in host memory, optimizer state outside its step too, and the engine's weights while it
    does not generate. No effect on CPU."""
    deterministic: bool = False
    """Use torch's deterministic algorithms, for bitwise reruns on a GPU: attention's backward pass and indexed sums
    otherwise add in any order. Slower on a GPU; not needed on CPU. Does not affect vLLM's and SGLang's kernels."""
    stage: int = 3
    """ZeRO stage of DeepSpeed: 1 shards optimizer state, 2 also gradients, 3 also weights."""
    offload_optimizer: bool = False
    """DeepSpeed: keep master weights and optimizer state, and step, in host memory."""
    offload_param: bool = False
    """DeepSpeed with `stage=3`: keep weight shards in host memory too."""

    def __post_init__(self) -> None:
        one_of(self, name=BACKENDS)
        at_least(self, tp=1, cp=1, ep=1, pp=1, vpp=1, dp_replicate=1, tokens_per_microbatch=1)
        require(self.stage in (1, 2, 3), f"stage: must be 1, 2 or 3, not {self.stage}")
        value = self.activation_checkpointing
        self.activation_checkpointing = {"True": "full", "False": "none"}.get(str(value), value)
        one_of(self, activation_checkpointing=CHECKPOINTING)

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the layout, for `distributed.Layout`."""
        return {"tp": self.tp, "cp": self.cp, "ep": self.ep, "pp": self.pp, "dp_replicate": self.dp_replicate}

    @property
    def used_axes(self) -> dict[str, int]:
        """Size of `tp`, and of other axes above 1."""
        return {axis: size for axis, size in self.axes.items() if size > 1 or axis == "tp"}

    @property
    def ranks_per_shard(self) -> int:
        """Ranks that hold the same data shard."""
        return self.tp * self.cp * self.pp


@dataclass
class TrainConfig(BackendConfig):
    """The training backend: group `train`."""

    updates_per_step: int = 1
    """Optimizer updates (mini-batches) per step, on equal shares of its samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, updates_per_step=1)


PARTIAL_TRAIN = {"partial": BackendConfig}


@dataclass
class ReferenceConfig(ModelConfig):
    """Frozen reference of the KL term in its compute dtype; loaded only with `algorithm.kl_coef` > 0."""

    train: dict[str, Any] = field(default_factory=dict, metadata=PARTIAL_TRAIN)
    """Keys of `train` that differ for this role, such as `tp=2`; not `updates_per_step`."""


@dataclass
class CriticConfig(TrainedModelConfig):
    """Critic of PPO, with a value head; only with `algorithm.advantage=gae` or `turn_gae`."""

    lr: float = 1e-5
    """Peak learning rate of the critic's schedule."""
    train: dict[str, Any] = field(default_factory=dict, metadata=PARTIAL_TRAIN)
    """Keys of `train` that differ for this role, such as `tp=2`; not `updates_per_step`."""


@dataclass
class FollowingReferenceConfig(ReferenceConfig):
    """Reference of the KL term, loaded only with `algorithm.kl_coef` or `kl_reward_coef` > 0: the initial weights, or
    weights that follow the policy."""

    sync_steps: int | None = None
    """Steps between updates from the policy (null: never)."""
    mixup: float = 1.0
    """Policy's share in an update: 1 copies its weights, less is a moving average in float32."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, sync_steps=1)
        require(0 < self.mixup <= 1, f"mixup: must be above 0 and at most 1, not {self.mixup}")


@dataclass(frozen=True)
class RoleConfig:
    """Settings of a role, completed from the policy's."""

    name: str
    """`policy`, `reference`, `critic`, `teacher` or `teacher.<domain>`"""
    own: ModelConfig
    model: str
    dtype: str
    trust_remote_code: bool
    train: TrainConfig
    total_updates: int
    """Updates until the end of the learning rate's schedule"""
    section: str = ""
    """Section of the settings, if not `name`"""
    value_bias: bool = True
    """True if the value head has a bias: a critic's, not a reward model's"""
    constraint: ConstraintConfig = field(default_factory=ConstraintConfig)
    """Grammar of the answers to judge"""
    is_denoiser: bool = False

    @property
    def kind(self) -> str:
        """`policy`, `reference`, `critic` or `teacher`"""
        return self.name.partition(".")[0]

    @property
    def optimizer(self) -> TrainedModelConfig | None:
        """Section with optimizer settings; None if frozen."""
        return self.own if isinstance(self.own, TrainedModelConfig) else None

    @property
    def sync_steps(self) -> int | None:
        """Steps between updates of a reference from the policy."""
        return self.own.sync_steps if isinstance(self.own, FollowingReferenceConfig) else None

    @property
    def lora(self) -> LoraConfig:
        """Adapters of the role; rank 0 without any."""
        return self.optimizer.lora if self.optimizer else LoraConfig()

    @property
    def held_dtype(self) -> str:
        """Dtype of the weights held: under frozen adapters' bases, the compute dtype."""
        mixes = self.sync_steps is not None and self.own.mixup < 1
        return "float32" if mixes or (self.optimizer is not None and not self.lora.rank) else self.dtype

    def is_base_of(self, policy: "RoleConfig") -> bool:
        """Return True if this is the policy with its adapters off."""
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
