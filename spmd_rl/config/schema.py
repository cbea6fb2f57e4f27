"""The settings of a run: one dataclass a section, each field with its default and its meaning beside it.

Torch-free. A section checks its values when it is built (`__post_init__`); what needs files, imports or the number of
ranks is checked in `checks.py`. YAML files under `configs/` say only what differs from these defaults.
"""

from dataclasses import dataclass, field
from os.path import expanduser
from typing import Any

from spmd_rl.config.values import above, at_least, one_of, require, within

DTYPES = ("bfloat16", "float32")
SCHEDULES = ("constant", "linear", "cosine")
CLAIMS = ("store", "static")
ACCEPTS = ("ticket",)
# The names in the dicts of `algo`, which needs torch; a test holds the two together.
ADVANTAGES = ("grpo",)
LOSSES = ("ppo_clip",)
LOSS_AGGS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
KL_ESTIMATORS = ("k1", "k2", "k3")


@dataclass
class RunConfig:
    """Where a run lives."""

    name: str | None = None
    """Default: a hash of every setting that changes samples or gradients, so that the same line resumes its run."""
    dir: str | None = None
    """Default: `runs/<pipeline>/<run.name>`. Must be shared by all nodes."""


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
    max_skipped_updates: int = 3
    """So many non-finite gradients in a row stop the run; each alone skips its update on all ranks."""
    trust_remote_code: bool = False
    """Run Python code that a model directory brings. Only for directories you trust."""

    def __post_init__(self) -> None:
        self.model = expanduser(self.model)
        one_of(self, dtype=DTYPES, schedule=SCHEDULES)
        at_least(self, lr=0, warmup_steps=0, weight_decay=0, max_skipped_updates=1)
        above(self, max_grad_norm=0)
        two_decays = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(two_decays, f"betas: must be two numbers in [0, 1), not {self.betas}")


@dataclass
class ReferenceConfig:
    """The frozen reference of the KL term; loaded only when `algorithm.kl_coef` > 0."""

    model: str | None = None
    """Default: the policy's directory, as it was before training."""
    dtype: str | None = None
    """Default: the policy's."""

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
    offload: bool = False
    """Keep weights and optimizer state in host memory while generating. No effect on CPU."""

    def __post_init__(self) -> None:
        one_of(self, name=("fsdp2",))
        at_least(self, tp=1, pp=1, cp=1, ep=1, tokens_per_microbatch=1, updates_per_step=1)


@dataclass
class EngineConfig:
    """The generation engine: group `engine`."""

    name: str = "native"
    """`native`"""
    tp: int = 1
    """Ranks that hold one copy of the engine."""
    max_running: int = 64
    """Requests decoded side by side in a replica."""
    kv_tokens: int = 32768
    """Tokens of KV cache in a replica."""

    def __post_init__(self) -> None:
        one_of(self, name=("native",))
        at_least(self, tp=1, max_running=1, kv_tokens=1)


@dataclass
class FilterConfig:
    """Which groups qualify for training: `rollout.filter`."""

    zero_variance: bool = True
    """Drop groups whose scores are all equal: they carry no gradient."""
    min_mean_score: float | None = None
    """Drop groups whose mean score lies below (too hard)."""
    max_mean_score: float | None = None
    """Drop groups whose mean score lies above (too easy)."""

    def __post_init__(self) -> None:
        low, high = self.min_mean_score, self.max_mean_score
        empty = low is not None and high is not None and low > high
        require(not empty, f"min_mean_score: {low} lies above max_mean_score {high}: no group can qualify")


@dataclass
class RolloutConfig:
    """Generation and scoring of one step."""

    prompts_per_step: int = 8
    """K: groups that a step trains on."""
    answers_per_prompt: int = 8
    """Samples in a group."""
    max_prompt_tokens: int = 512
    """A longer rendered prompt is an error at start."""
    max_new_tokens: int = 12
    """Token limit of an answer."""
    temperature: float = 1.0
    """Sampling temperature; 0 is refused in training."""
    claim: str = "store"
    """`store`: replicas claim tickets from one atomic counter as slots free up. `static`: dealt round-robin (exact)."""
    accept: str = "ticket"
    """`ticket`: the first K qualifying tickets in ticket order, free of length bias."""
    extra_prompts: int = 0
    """Tickets started beyond K at once, so that filtered groups need no second round."""
    max_tickets_per_step: int | None = None
    """Tickets a step may start before it trains on fewer groups. Default 4 K."""
    min_answers: int = 2
    """A group with fewer scored answers does not qualify."""
    filter: FilterConfig = field(default_factory=FilterConfig)

    def __post_init__(self) -> None:
        one_of(self, claim=CLAIMS, accept=ACCEPTS)
        at_least(self, prompts_per_step=1, answers_per_prompt=1, max_prompt_tokens=1, max_new_tokens=1, min_answers=1)
        at_least(self, extra_prompts=0, max_tickets_per_step=self.prompts_per_step)
        above(self, temperature=0)
        enough = self.min_answers <= self.answers_per_prompt
        require(enough, f"min_answers: {self.min_answers} is more than answers_per_prompt {self.answers_per_prompt}")


@dataclass
class AlgorithmConfig:
    """Advantages and loss: group `algorithm`."""

    name: str = "grpo"
    """For humans and the run's name."""
    advantage: str = "grpo"
    """Advantage estimator: `grpo`."""
    norm_std: bool = True
    """Divide GRPO's centred scores by the group's standard deviation (off: Dr.GRPO)."""
    loss: str = "ppo_clip"
    """Policy loss: `ppo_clip`."""
    clip_low: float = 0.2
    """Lower clip range of the importance ratio: 1 - clip_low."""
    clip_high: float = 0.2
    """Upper clip range of the importance ratio: 1 + clip_high."""
    loss_agg: str = "token-mean"
    """Weight of each token: `token-mean`, `seq-mean-token-mean` or `seq-mean-token-sum`; counts are global."""
    kl_coef: float = 0.0
    """Weight of the KL penalty to the frozen reference, in the loss. 0 loads no reference."""
    kl_estimator: str = "k3"
    """`k1`, `k2` or `k3` (Schulman, Approximating KL Divergence)."""

    def __post_init__(self) -> None:
        one_of(self, advantage=ADVANTAGES, loss=LOSSES, loss_agg=LOSS_AGGS, kl_estimator=KL_ESTIMATORS)
        within(self, clip_low=(0, 1))
        at_least(self, clip_high=0, kl_coef=0)


@dataclass
class DataConfig:
    """Prompts. See docs/DATA.md for row schema and rules."""

    train: str = "reasoning_gym:chain_sum"
    """A JSONL file, a comma-separated list of them, or `reasoning_gym:<task>`."""
    eval: str | None = None
    """The same, for held-out prompts. Default: the held-out share of `train`."""
    holdout: float = 0.25
    """Share of the content hashes that is held out when `eval` is not given."""
    size: int = 1000
    """Rows generated before duplicates are dropped (reasoning_gym only)."""
    seed: int = 0
    """Generator seed (reasoning_gym only)."""
    args: dict[str, Any] = field(default_factory=dict)
    """Generator parameters (reasoning_gym only)."""
    format: str = "{question}"
    """The user message; `{question}` stands for the problem's text. Rows with `messages` are taken as they are."""
    system: str | None = None
    """A system message in front of every prompt that brings none."""

    def __post_init__(self) -> None:
        self.train = expand_list(self.train)
        self.eval = self.eval and expand_list(self.eval)
        above(self, holdout=0)
        require(self.holdout < 1, f"holdout: must be less than 1, not {self.holdout}")
        at_least(self, size=1)
        require("{question}" in self.format, f"format: must contain {{question}}, is {self.format!r}")


@dataclass
class RewardConfig:
    """One domain's rewarder: `reward.<domain>`."""

    target: str
    """`module:Class`, importable; your own file on PYTHONPATH is as good as one of ours."""
    args: dict[str, Any] = field(default_factory=dict)
    """Constructor arguments."""
    workers: int = 1
    """Processes per node."""
    timeout: float = 10.0
    """Seconds until a score becomes a `timeout` verdict."""

    def __post_init__(self) -> None:
        module, _, name = self.target.partition(":")
        require(bool(module and name), f"target: must be module:Class, not {self.target!r}")
        at_least(self, workers=1)
        above(self, timeout=0)


@dataclass
class RewardsConfig:
    """Section `reward`: in YAML `error_budget` stands beside the domains; the loader sorts them into this."""

    error_budget: float = 0.1
    """Share of a step's answers whose verdict may be no score before the run stops and says why."""
    domains: dict[str, RewardConfig] = field(default_factory=dict, metadata={"inline": "<domain>"})
    """`reward.<domain>.*`"""

    def __post_init__(self) -> None:
        within(self, error_budget=(0, 1))


@dataclass
class EvalConfig:
    """Held-out evaluation."""

    every: int = 10
    """Steps between evaluations; also before the first and after the last. 0: never."""
    prompts: int = 64
    """Held-out prompts used (all, if there are fewer)."""
    answers: int = 4
    """Sampled answers per prompt, beside one greedy answer."""
    temperature: float | None = None
    """Default: the rollout temperature."""

    def __post_init__(self) -> None:
        at_least(self, every=0, prompts=1, answers=1)
        above(self, temperature=0)


@dataclass
class CheckpointConfig:
    """Saving and resuming."""

    every: int = 50
    """Steps between checkpoints, beside the one at the end; 0: only that one."""
    keep: int = 2
    """Newest checkpoints kept."""
    export_hf: bool = False
    """Write `hf/` (safetensors, config, tokenizer) beside each checkpoint; the last one always has it."""
    resume: str = "auto"
    """`auto`: continue if `run.dir` holds a checkpoint. `never`: refuse a used directory. Or a checkpoint's path: of
    another run, to begin from; of this one, to go back to."""

    def __post_init__(self) -> None:
        self.resume = expanduser(self.resume)
        at_least(self, every=0, keep=1)


@dataclass
class TrackConfig:
    """Trackers beside the run directory's own files. None needs an account."""

    wandb: str = "off"
    """`off`, `offline` or `online`."""
    tensorboard: bool = False
    """Write event files into `run.dir/tensorboard`."""
    swanlab: str = "off"
    """`off`, `offline` or `cloud`."""

    def __post_init__(self) -> None:
        one_of(self, wandb=("off", "offline", "online"), swanlab=("off", "offline", "cloud"))


@dataclass
class JournalConfig:
    """Stall detection."""

    stall_seconds: float = 300.0
    """If no rank's progress counter moves for so long, all ranks dump their stacks and the job ends."""

    def __post_init__(self) -> None:
        above(self, stall_seconds=0)


@dataclass
class SidecarConfig:
    """Where sidecar hosts listen."""

    bind: str = "ipc"
    """`ipc`: a socket in a private directory. `tcp://127.0.0.1:PORT`: a loopback port."""

    def __post_init__(self) -> None:
        known = self.bind == "ipc" or self.bind.startswith("tcp://")
        require(known, f"bind: must be ipc or tcp://127.0.0.1:PORT, not {self.bind!r}")


@dataclass
class RlvrConfig:
    """`python -m spmd_rl.rlvr`"""

    seed: int = 0
    """Seeds data order, sampling and everything else, by counters."""
    steps: int = 12
    """Training steps."""
    debug: bool = False
    """Score in this process, without sidecars: `breakpoint()` works in a reward. World size 1 only."""
    profile: bool = False
    """Write a torch profiler trace of the second step of this start into the run directory."""
    run: RunConfig = field(default_factory=RunConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardsConfig = field(default_factory=RewardsConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    journal: JournalConfig = field(default_factory=JournalConfig)
    sidecar: SidecarConfig = field(default_factory=SidecarConfig)

    def __post_init__(self) -> None:
        at_least(self, seed=0, steps=0)
        longest = self.rollout.max_prompt_tokens + self.rollout.max_new_tokens
        require(
            self.engine.kv_tokens >= longest,
            f"engine.kv_tokens: {self.engine.kv_tokens} cannot hold one request of "
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest}",
        )


PIPELINES: dict[str, type] = {"rlvr": RlvrConfig}
"""The doors and their settings: `python -m spmd_rl.<name>`, `configs/<name>.yaml`."""


def expand_list(paths: str) -> str:
    """`~` expanded in each path of a comma-separated list."""
    return ",".join(expanduser(path.strip()) for path in paths.split(","))
