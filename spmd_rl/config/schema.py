"""Settings of a pipeline: one dataclass a section, each field with default and meaning.

A section (`sections/`) checks its values when built; `checks.py` checks what needs files, imports or the number of
ranks. YAML files in `configs/` hold only differences from these defaults.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import ClassVar

from spmd_rl.base.errors import UserError
from spmd_rl.config.generation import GenerationSettings
from spmd_rl.config.model_files import trained_model
from spmd_rl.config.sections.algorithm import AGENTIC_ADVANTAGES, OWN, AlgorithmConfig
from spmd_rl.config.sections.data import DataConfig, RewardsConfig
from spmd_rl.config.sections.data import RewardConfig as RewardConfig
from spmd_rl.config.sections.engine import EngineConfig
from spmd_rl.config.sections.env import EnvsConfig, WarmupConfig
from spmd_rl.config.sections.models import (
    CriticConfig,
    EvaluatedModelConfig,
    FollowingReferenceConfig,
    ModelConfig,
    PolicyConfig,
    RoleConfig,
    ServedModelConfig,
    TrainConfig,
)
from spmd_rl.config.sections.placement import PlacementConfig
from spmd_rl.config.sections.rollout import HELD_OUT, EvalConfig, EvaluationConfig, RolloutConfig, SamplingConfig
from spmd_rl.config.sections.rollout import FilterConfig as FilterConfig
from spmd_rl.config.sections.run import (
    CheckpointConfig,
    JournalConfig,
    PlanConfig,
    PublishConfig,
    RunConfig,
    SidecarConfig,
    TrackConfig,
)
from spmd_rl.config.sections.run import DeviceSpecConfig as DeviceSpecConfig
from spmd_rl.config.sections.teachers import TeachersConfig
from spmd_rl.config.values import at_least, require

EVALUATE = "python -m spmd_rl.evaluate"


@dataclass
class JobConfig:
    """Settings of every pipeline: model, run and measurements.

    Subclasses add sections. Checks and terminal lines apply to every pipeline with a section of that name and type: see
    `apply`.
    """

    pipeline: ClassVar[str] = ""
    borrows: ClassVar[bool] = False
    """True if it accepts other pipelines' experiments, as far as it has their sections"""
    steps: ClassVar[int] = 0

    seed: int = 0
    """Random seed of data order, sampling and all else."""
    debug: bool = False
    """Score in this process, without sidecars, so that `breakpoint()` works in rewards and environments. One rank
    only."""
    profile: bool = False
    """Write a torch profiler trace of this process's second step into `run.dir/traces`."""
    run: RunConfig = field(default_factory=RunConfig)
    policy: ServedModelConfig = field(default_factory=ServedModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    journal: JournalConfig = field(default_factory=JournalConfig)

    def __post_init__(self) -> None:
        at_least(self, seed=0)

    @property
    def kind(self) -> str:
        """Part of a run's name after its model."""
        return self.pipeline

    @property
    def roles(self) -> list[RoleConfig]:
        """Settings of the pipeline's models, the policy first."""
        return [self.role("policy")]

    def role(self, name: str, own: ModelConfig | None = None) -> RoleConfig:
        """Return the settings of role `name`. own: its section, if named otherwise."""
        own, policy = own or getattr(self, name), self.policy
        return RoleConfig(
            name=name,
            own=own,
            model=own.model or policy.model,
            dtype=own.dtype or policy.dtype,
            trust_remote_code=policy.trust_remote_code,
            train=self.train if name == "policy" else replace(self.train, **own.train),
            total_updates=self.passes(name) * self.train.updates_per_step,
        )

    def passes(self, name: str) -> int:
        """Return how often a role trains on all samples of a step, over the run."""
        return self.steps


@dataclass
class PipelineConfig(JobConfig):
    """Settings of every pipeline that trains."""

    steps: int = 100
    """Number of training steps in all."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.steps > 0, f"steps: must be at least 1, not {self.steps}; {EVALUATE} evaluates and trains nothing")


@dataclass
class RlConfig(PipelineConfig):
    """Settings of reinforcement learning: generate, score, learn."""

    reference: FollowingReferenceConfig = field(default_factory=FollowingReferenceConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    teacher: TeachersConfig = field(default_factory=TeachersConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardsConfig = field(default_factory=RewardsConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    publish: PublishConfig = field(default_factory=PublishConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    sidecar: SidecarConfig = field(default_factory=SidecarConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        # A replay has no engine that could answer held-out prompts.
        if self.rollout.replay:
            self.eval.every = 0
        if self.publish.probe_every is None:
            self.publish.probe_every = self.eval.every if self.placement.is_split else 1
        longest = self.rollout.max_prompt_tokens + self.rollout.max_new_tokens
        require(
            self.engine.kv_tokens >= longest,
            f"engine.kv_tokens: {self.engine.kv_tokens} cannot hold one request of "
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest}",
        )
        limit, k, n = self.rollout.max_answer_tokens, self.algorithm.pass_k, self.rollout.answers_per_prompt
        cut = self.teacher.by_domain and self.rollout.truncates
        require(not cut, "rollout.top_p: with a teacher, sampling must not cut tokens off (top_k, top_p, min_p)")
        require(
            self.algorithm.advantage != "pass_at_k" or k < n,
            f"algorithm.pass_k: {k} must be less than rollout.answers_per_prompt {n}, or no group has a gradient",
        )
        require(
            (self.algorithm.overlong_tokens or 0) <= limit,
            f"algorithm.overlong_tokens: {self.algorithm.overlong_tokens} is more than an answer can have, {limit}",
        )

    @property
    def kind(self) -> str:
        """Part of a run's name: the recipe."""
        return self.algorithm.name

    @property
    def num_shown(self) -> int:
        """Number of first steps on demonstrations."""
        return 0

    @property
    def has_turns(self) -> bool:
        """True if an episode may have several turns."""
        return self.rollout.target is not None and self.rollout.max_turns != 1

    @property
    def generation(self) -> GenerationSettings:
        """Extract of the settings for generation."""
        return GenerationSettings(
            self.rollout,
            self.reward,
            self.seed,
            self.engine.kv_tokens,
            self.algorithm.uses_greedy,
            bool(self.eval.every),
            self.placement.patience,
        )

    @property
    def roles(self) -> list[RoleConfig]:
        """Settings of the policy and other roles that the algorithm needs."""
        used = {"policy": True, "reference": self.algorithm.uses_reference, "critic": self.algorithm.uses_critic}
        constraint = self.rollout.constraint
        asked = [replace(self.role(name), constraint=constraint) for name, wanted in used.items() if wanted]
        return asked + [self.role(*teacher) for teacher in self.teacher.sections.items()]

    def passes(self, name: str) -> int:
        """Return `JobConfig.passes`: the critic first trains alone, and demonstrations are used once."""
        shown = min(self.num_shown, self.steps) if name == "policy" else 0
        alone = max(self.algorithm.critic_warmup if name == "policy" else 0, self.num_shown)
        return shown + self.algorithm.sample_epochs * max(0, self.steps - alone)


@dataclass
class RlvrConfig(RlConfig):
    """Settings of `python -m spmd_rl.rlvr`."""

    pipeline = "rlvr"
    data: DataConfig = field(default_factory=DataConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.algorithm.advantage not in AGENTIC_ADVANTAGES,
            f"algorithm.advantage: {self.algorithm.advantage} compares the steps of an agent, and rlvr has none",
        )
        own = self.rollout.target or OWN.fullmatch(self.algorithm.advantage) or OWN.fullmatch(self.algorithm.loss)
        for key in () if own else _keys_of_agents(self):
            raise UserError(f"{key}: unknown key; rlvr's answers have one turn, python -m spmd_rl.agentic has it")
        require(not self.rollout.redundancy, "rollout.redundancy: is for environments; rlvr has none")
        if not self.data.eval:
            self.eval.prompts = self.eval.prompts or HELD_OUT

    @property
    def generation(self) -> GenerationSettings:
        """Extract of the settings, with those of prompts."""
        return replace(super().generation, data=self.data)


def _keys_of_agents(cfg: RlvrConfig) -> Iterator[str]:
    for name in (section.name for section in fields(cfg) if is_dataclass(getattr(cfg, section.name))):
        section = getattr(cfg, name)
        marked = [field for field in fields(section) if "agents" in field.metadata]
        yield from (f"{name}.{field.name}" for field in marked if getattr(section, field.name) != field.default)


@dataclass
class AgenticConfig(RlConfig):
    """Settings of `python -m spmd_rl.agentic`."""

    pipeline = "agentic"
    env: EnvsConfig = field(default_factory=EnvsConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)

    @property
    def has_turns(self) -> bool:
        """True if an episode may have several turns."""
        return self.rollout.max_turns != 1

    def __post_init__(self) -> None:
        super().__post_init__()
        r = self.rollout
        self.eval.prompts = self.eval.prompts or HELD_OUT
        require(not self.teacher.hints, "teacher.hint: not supported with environments, only by rlvr")
        whole = not r.redundancy or r.slice_size >= r.answers_per_prompt
        require(whole, "rollout.redundancy: needs whole groups; leave rollout.answers_per_claim out")
        greedy = r.redundancy and self.algorithm.uses_greedy
        require(not greedy, f"rollout.redundancy: {self.algorithm.advantage} needs its greedy answer; must be 0")
        for tag, env in self.env.tags.items():
            shown = r.max_turns or "{turns_left}" not in env.template + env.next_template
            require(bool(shown), f"env.{tag}.template: {{turns_left}} needs a limit of turns; set rollout.max_turns")

    @property
    def num_shown(self) -> int:
        """Number of first steps on demonstrations."""
        return self.warmup.steps


@dataclass
class HostConfig:
    """Sections of a sidecar host started by hand."""

    reward: RewardsConfig = field(default_factory=RewardsConfig)
    env: EnvsConfig = field(default_factory=EnvsConfig)


@dataclass
class EvaluateConfig(JobConfig):
    """Settings of `python -m spmd_rl.evaluate`."""

    pipeline = "evaluate"
    borrows = True
    policy: EvaluatedModelConfig = field(default_factory=EvaluatedModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollout: SamplingConfig = field(default_factory=SamplingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    env: EnvsConfig = field(default_factory=EnvsConfig)
    reward: RewardsConfig = field(default_factory=RewardsConfig)
    eval: EvaluationConfig = field(default_factory=EvaluationConfig)
    sidecar: SidecarConfig = field(default_factory=SidecarConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.data.train or self.data.eval
        require(not (given and self.env.tags), "env: either rows (data) or environments (env) are evaluated, not both")
        # What is not for a user to say: nothing is trained between two publishes, so that all ranks generate
        self.placement, self.publish = PlacementConfig(), PublishConfig(probe_every=0)
        if self.policy.checkpoint is None:
            self.policy.model, self.policy.checkpoint = trained_model("policy.model", self.policy.model)
        if not self.data.eval:
            self.eval.prompts = self.eval.prompts or HELD_OUT
        if self.eval.metrics is None:
            n = self.eval.answers
            ks = sorted({n, *(1 << bit for bit in range(n.bit_length()) if 1 << bit <= n)} - {0})
            self.eval.metrics = ["ci95", *(f"pass@{k}" for k in ks), *(f"maj@{k}" for k in ks if k > 2)]

    @property
    def roles(self) -> list[RoleConfig]:
        """Settings of the policy alone."""
        return [replace(self.role("policy"), constraint=self.rollout.constraint)]

    @property
    def envs(self) -> EnvsConfig | None:
        """Environments to play; None if rows are evaluated."""
        return self.env if self.env.tags else None

    @property
    def generation(self) -> GenerationSettings:
        """Extract of the settings for generation."""
        rollout, rows = RolloutConfig(**vars(self.rollout)), None if self.envs else self.data
        return GenerationSettings(rollout, self.reward, self.seed, self.engine.kv_tokens, evaluates=True, data=rows)
