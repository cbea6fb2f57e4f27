"""Scores, advantages, losses and importance correction: `algorithm`.

docs/ALGORITHMS.md has formulas, sources and advice.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spmd_rl.config.values import above, at_least, one_of, require, within

# The names in the dicts of `algo`, each with the keys that it reads; a test compares the two. `algo` itself needs
# torch.
SAMPLE_ADVANTAGES: Mapping[str, tuple[str, ...]] = {
    "grpo": ("norm_std",),
    "dr_grpo": (),
    "rloo": (),
    "reinforce": (),
    "reinforce_pp_baseline": (),
    "remax": (),
    "opo": (),
    "lite_ppo": (),
    "maxrl": (),
    "pass_at_k": ("pass_k", "pass_score"),
    "gdpo": ("reward_weights",),
    "starpo": ("norm_std", "norm_over_steps"),
    "step_reinforce": ("step_reward_gamma",),
    "gigpo": ("norm_std", "norm_over_steps", "step_reward_gamma", "episode_reward_weight", "step_reward_weight"),
}
TOKEN_ADVANTAGES: Mapping[str, tuple[str, ...]] = {
    "gae": ("gamma", "lam"),
    "turn_gae": ("step_reward_gamma", "lam"),
    "reinforce_returns": ("gamma",),
}
ADVANTAGES = {**SAMPLE_ADVANTAGES, **TOKEN_ADVANTAGES}
STEP_ADVANTAGES = ("starpo", "step_reinforce", "gigpo")
AGENTIC_ADVANTAGES = (*STEP_ADVANTAGES, "turn_gae")
CLIP = ("clip_low", "clip_high")
LOSSES: Mapping[str, tuple[str, ...]] = {
    "ppo_clip": CLIP,
    "dual_clip": (*CLIP, "dual_clip"),
    "segment_clip": CLIP,
    "gspo": CLIP,
    "gspo_token": CLIP,
    "raft_pp": CLIP,
    "vanilla_pg": (),
    "tis": (),
    "cispo": CLIP,
    "topr": (),
    "dppo_tv": (*CLIP, "dppo_cap"),
    "dppo_kl": (*CLIP, "dppo_cap"),
    "sapo": ("sapo_tau_pos", "sapo_tau_neg"),
    "gmpo": CLIP,
    "kimi": ("kimi_tau",),
    "clip_cov": CLIP,
    "kl_cov": ("kl_cov_coef",),
}
OWN = re.compile(r".+:.+")
CHOICES = {"clip_cov": ("clip_cov_ratio", "clip_cov_low", "clip_cov_high"), "kl_cov": ("kl_cov_ratio",)}
"""Losses that select tokens of the global batch, and the keys of the selection"""
LOSS_AGGS: Mapping[str, tuple[str, ...]] = {
    "token-mean": (),
    "seq-mean-token-mean": (),
    "seq-mean-token-sum": (),
    "seq-mean-token-sum-norm": ("loss_agg_length",),
}
KL_ESTIMATORS = ("k1", "k2", "k3", "abs")
NORMS = ("none", "batch", "group", "domain", "running")
LEVELS = ("off", "token", "segment", "sequence", "geometric")


@dataclass
class CorrectionConfig:
    """Importance weights that correct the mismatch between engine and trainer: `algorithm.correction`.

    The engine's kernels and precision give other logprobs of the same tokens: `train_infer/abs_diff/mean`.
    """

    level: str = "off"
    """Scope of one importance weight: `token`, `segment` (a turn), `sequence` (product over a sample), `geometric`
    (mean over a sample) or `off`. Needs no forward pass. Off by default, as algorithms are published; `token` is
    advised if `train_infer/abs_diff/mean` exceeds 0.01, as with an engine in bfloat16 or FP8."""
    upper: float | None = 2.0
    """Limit at which importance weights are truncated (null: none)."""
    mask_low: float | None = None
    """Weight below which tokens, segments or samples are masked in the loss; divisors still count them."""
    mask_high: float | None = None
    """Weight above which tokens, segments or samples are masked in the loss."""

    def __post_init__(self) -> None:
        one_of(self, level=LEVELS)
        at_least(self, upper=1, mask_low=0)
        above(self, mask_high=self.mask_low or 0)


BOUNDS = {
    "max_abs_diff": ("train_infer/abs_diff/mean", "above"),
    "min_ess": ("train_infer/ess", "below"),
    "max_lag": ("rollout/lag/max", "above"),
}
"""Metric of each key of `algorithm.bounds`, and the side that breaks it"""


@dataclass
class BoundsConfig:
    """Bounds on the distance between samples and trained policy: `algorithm.bounds`. Null: no bound."""

    max_abs_diff: float | None = 1.0
    """Largest `train_infer/abs_diff/mean`, in nats, between engine and trainer, lag included. Usual with an engine in
    bfloat16: 0.002 to 0.05; with a lag of one version and a large learning rate, some tenths."""
    min_ess: float | None = 0.1
    """Smallest `train_infer/ess`: effective share of the tokens under the raw importance weights."""
    max_lag: int | None = None
    """Largest age of a token in versions, as caused by `rollout.partial_rollout` or `placement.max_staleness`."""
    on_breach: str = "warn"
    """Response to a broken bound: `warn`, once per run of such steps, or `stop`, on all ranks before the update. `stop`
    computes the trainer's logprobs first: one more forward pass if a step has a single update on current samples."""

    def __post_init__(self) -> None:
        one_of(self, on_breach=("warn", "stop"))
        above(self, max_abs_diff=0)
        within(self, min_ess=(0, 1))
        at_least(self, max_lag=0)

    def outside(self, metrics: Mapping[str, float | None]) -> dict[str, str]:
        """Return a description of each broken bound, by key."""
        found = {}
        for key, (name, side) in BOUNDS.items():
            bound, value = getattr(self, key), metrics.get(name)
            if bound is None or value is None:
                continue
            inside = value <= bound if side == "above" else value >= bound
            # A NaN is outside, too.
            if not inside:
                found[key] = f"{name} is {value:.4g}, {side} algorithm.bounds.{key}={bound:g}"
        return found


@dataclass
class AlgorithmConfig:
    """Scores, advantages and loss: group `algorithm`."""

    name: str = "grpo"
    """Name of the recipe, part of the default `run.name`."""

    advantage: str = "grpo"
    """Advantage estimator. Of answers: `grpo`, `dr_grpo`, `rloo`, `reinforce`, `reinforce_pp_baseline`, `remax`, `opo`,
    `lite_ppo`, `maxrl`, `pass_at_k`, `gdpo`; of agents' steps: `starpo`, `step_reinforce`, `gigpo`, `turn_gae` (with a
    critic); of tokens: `gae` (with a critic), `reinforce_returns`. Or your own, as `module:function`."""
    norm_std: bool = True
    """Divide centred scores by their group's standard deviation (`false`: Dr.GRPO)."""
    gamma: float = 1.0
    """Discount per token, for token-level estimators."""
    lam: float = 1.0
    """Lambda of GAE; 1: no bias from the critic, largest variance."""
    reward_weights: dict[str, float] = field(default_factory=dict)
    """Weights of several rewards for `gdpo`, by name of the verdict's part: `{correct: 1, form: 0.5}`.
    `rewards.composite:CompositeReward` names its parts. Other estimators use the rewarder's sum."""
    pass_k: int = 4
    """Number k of answers in `pass_at_k`."""
    pass_score: float = 1.0
    """Score from which an answer is right (`pass_at_k`, `error_max_len_clip`, `sft_coef`)."""
    step_reward_gamma: float = field(default=0.95, metadata={"agents": True})
    """Discount per step of a trajectory."""
    norm_over_steps: bool = field(default=False, metadata={"agents": True})
    """Count a trajectory in its group's mean and deviation once per step, as verl-agent and ROLL do (`starpo`,
    `gigpo`)."""
    episode_reward_weight: float = field(default=1.0, metadata={"agents": True})
    """Weight of the advantage between trajectories in GiGPO."""
    step_reward_weight: float = field(default=1.0, metadata={"agents": True})
    """Weight of the advantage between steps of equal state in GiGPO."""
    whiten_advantages: bool = False
    """Normalise the advantages of all tokens of the global batch to mean 0 and deviation 1."""
    advantage_clip: float | None = None
    """Bound of the final advantages, positive and negative (null: none)."""

    reward_scale: float = 1.0
    """Factor that multiplies every score first."""
    reward_shift: float = 0.0
    """Number added to every score after `reward_scale`."""
    format_penalty: float = 0.0
    """Penalty of an answer in the wrong format."""
    repetition_coef: float = 0.0
    """Penalty per share of n-grams that repeat an earlier one."""
    repetition_ngram: int = 3
    """Tokens in an n-gram of `repetition_coef`."""
    overlong_coef: float = 0.0
    """DAPO's soft penalty of answers near the token limit: `rollout.max_new_tokens`, times `rollout.max_turns` if
    given."""
    overlong_tokens: int | None = None
    """Tokens before the limit over which the overlong penalty rises. Default: a fifth of the limit."""
    norm_mean_type: str = "none"
    """Mean that is subtracted from scores: over the `batch`, `group`, `domain` (agents: environment tag) or run so far
    (`running`), or `none`. With `step_reinforce`, of the steps' returns."""
    norm_std_type: str = "none"
    """Standard deviation that divides scores: over the `batch`, `group`, `domain` or run so far (`running`), or `none`.
    """
    reward_clip: float | None = None
    """Bound of normalised scores, positive and negative (null: none)."""

    max_len_mask: bool = False
    """Mask truncated answers in the loss; they stay in their group's baseline."""
    difficulty_mask: bool = False
    """Mask groups in the loss whose mean score is outside the difficulty thresholds."""
    difficulty_low_threshold: float = 0.0
    """Mean score that `difficulty_mask` requires groups to exceed."""
    difficulty_high_threshold: float = 1.0
    """Mean score that `difficulty_mask` requires groups to stay below."""
    variance_top_p: float | None = None
    """Share of the summed standard deviations of all groups' scores: only the groups with the largest, which together
    hold it, train. RAGEN-2's code has 0.9 (null: all train)."""
    variance_eps: float = 0.01
    """Tolerance of `variance_top_p`, in units of the deviations; a step with less variance trains on nothing."""
    error_max_len_clip: bool = False
    """Mask long wrong answers (score below `pass_score`) in the loss."""
    error_max_len_threshold: int = 4096
    """Number of tokens that makes a wrong answer long for `error_max_len_clip`."""
    difficulty_loss_weight: bool = False
    """Weight each group's loss by 0.5 + 1.5 (1 - mean score), scaled to mean 1: hard prompts count more."""
    length_loss_weight: bool = False
    """Weight answers' losses from 1.5 (shortest of the step) to 0.5 (longest), scaled to mean 1."""

    loss: str = "ppo_clip"
    """Policy loss: `ppo_clip`, `dual_clip`, `segment_clip`, `gspo`, `gspo_token`, `raft_pp`, `vanilla_pg`, `tis`,
    `cispo`, `topr`, `dppo_tv`, `dppo_kl`, `sapo`, `gmpo`, `kimi`, `clip_cov`, `kl_cov`. Or your own, as
    `module:function`."""
    old_logprobs: str = "trainer"
    """Denominator of the importance ratio: logprobs of the `trainer` before the step's first update (decoupled PPO's
    proximal policy; `correction` handles its mismatch with the engine), or of the `engine` at sampling (the behaviour
    policy). With `engine`, the ratio itself corrects lag and mismatch, `correction` has no effect, and a forward pass
    is saved."""
    args: dict[str, Any] = field(default_factory=dict)
    """Parameters, by name, of your own loss or advantage that are no keys of `algorithm`."""
    loss_agg: str = "token-mean"
    """Loss aggregation: `token-mean`, `seq-mean-token-mean`, `seq-mean-token-sum` or `seq-mean-token-sum-norm` (divided
    by `loss_agg_length`), by counts of the global batch."""
    loss_agg_length: int | None = None
    """Divisor of `seq-mean-token-sum-norm`. Default: `rollout.max_new_tokens`, times `rollout.max_turns` if given."""
    clip_low: float = 0.2
    """Importance ratios are clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """Importance ratios are clipped above at 1 + clip_high."""
    dual_clip: float = 3.0
    """Largest ratio of tokens with negative advantage (`loss=dual_clip`)."""
    dppo_cap: float = 20.0
    """Largest ratio of a token (`loss=dppo_tv`, `dppo_kl`)."""
    sapo_tau_pos: float = 1.0
    """Steepness of SAPO's gate, positive advantages."""
    sapo_tau_neg: float = 1.05
    """Steepness of SAPO's gate, negative advantages."""
    kimi_tau: float = 0.1
    """Weight of Kimi k1.5's penalty for leaving the old policy."""
    clip_cov_ratio: float = 2e-4
    """Share of tokens that lose their gradient (`loss=clip_cov`)."""
    clip_cov_low: float = 1.0
    """Least covariance of the tokens that `loss=clip_cov` may select."""
    clip_cov_high: float = 5.0
    """Largest covariance of the tokens that `loss=clip_cov` may select."""
    kl_cov_ratio: float = 2e-3
    """Share of tokens, of largest covariance, that `loss=kl_cov` penalises."""
    kl_cov_coef: float = 1.0
    """Weight of the KL penalty of `loss=kl_cov`."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the loss."""
    sft_coef: float = 0.0
    """Weight of a supervised loss on right answers, the mean over their tokens."""

    kl_coef: float = 0.0
    """Weight of the KL to the frozen reference in the loss."""
    kl_estimator: str = "k3"
    """Estimator of the KL penalty in the loss: `k1`, `k2`, `k3` (Schulman, Approximating KL Divergence) or `abs`."""
    kl_reward_coef: float = 0.0
    """Weight of the KL to the frozen reference in the reward of each token; with an advantage of answers (steps), of
    the whole answer (step), before its baseline. If this and `kl_coef` are 0, no reference is loaded."""
    kl_reward_estimator: str = "k1"
    """Estimator of the KL in the reward: as `kl_estimator`."""
    target_kl: float | None = None
    """KL in nats per answer that an adaptive controller of the KL weights aims at (null: fixed weights)."""
    kl_horizon: float = 10000.0
    """Answers over which the controller may change a KL weight by a fifth."""

    sample_epochs: int = 1
    """Passes over a step's samples, each of `train.updates_per_step` updates. The first takes mini-batches in order,
    later ones in new random orders. Old logprobs, advantages and values stay."""
    value_clip: float | None = None
    """Distance from old values to which the critic's are clipped (null: no clipping)."""
    critic_warmup: int = 0
    """Initial steps in which only the critic is trained."""

    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    bounds: BoundsConfig = field(default_factory=BoundsConfig)

    def __post_init__(self) -> None:
        own = {key: value for key in ("advantage", "loss") if OWN.fullmatch(value := getattr(self, key))}
        known = {key: names for key, names in (("advantage", ADVANTAGES), ("loss", LOSSES)) if key not in own}
        one_of(self, **known, loss_agg=LOSS_AGGS, norm_mean_type=NORMS, norm_std_type=NORMS)
        require(
            bool(own) or not self.args, "args: only for a loss or an advantage of your own, given as module:function"
        )
        one_of(self, old_logprobs=("trainer", "engine"))
        one_of(self, kl_estimator=KL_ESTIMATORS, kl_reward_estimator=KL_ESTIMATORS)
        within(self, gamma=(0, 1), lam=(0, 1), step_reward_gamma=(0, 1))
        within(self, clip_cov_ratio=(0, 1), kl_cov_ratio=(0, 1), variance_top_p=(0, 1))
        above(self, variance_top_p=0)
        at_least(self, clip_low=0, clip_high=0, dual_clip=1, kimi_tau=0, kl_cov_coef=0, entropy_coef=0, sft_coef=0)
        at_least(self, kl_coef=0, kl_reward_coef=0, critic_warmup=0, sample_epochs=1, pass_k=1, loss_agg_length=1)
        at_least(self, overlong_coef=0, overlong_tokens=1, format_penalty=0, repetition_coef=0, repetition_ngram=1)
        at_least(self, error_max_len_threshold=1, variance_eps=0)
        at_least(self, dppo_cap=1)
        above(self, sapo_tau_pos=0, sapo_tau_neg=0, advantage_clip=0, reward_clip=0, value_clip=0)
        above(self, target_kl=0, kl_horizon=0, difficulty_high_threshold=self.difficulty_low_threshold)
        above(self, clip_cov_high=self.clip_cov_low)
        # With the engine's logprobs below, the ratio is the importance weight already: it would count twice.
        corrects = self.correction.level != "off"
        require(
            not corrects or self.old_logprobs == "trainer",
            "old_logprobs: with engine the ratio corrects itself; correction.level must be off",
        )
        # GMPO clips the logarithm of the ratio, whose bounds may exceed 1.
        log_band = self.loss == "gmpo"
        require(log_band or self.clip_low <= 1, f"clip_low: must be between 0 and 1, not {self.clip_low}")
        require(self.target_kl is None or self.uses_reference, "target_kl: needs kl_coef or kl_reward_coef above 0")
        plain = not self.normalises
        own_baseline = self.advantage in ("remax", "starpo", "gigpo")
        require(
            plain or not own_baseline,
            f"norm_mean_type: {self.advantage} has its own baseline; both norm_*_type must be none",
        )
        self._check_terms()
        # After normalisation no score would reach `pass_score`.
        counts = self.advantage in ("pass_at_k", "maxrl")
        require(
            plain or not counts, f"norm_mean_type: {self.advantage} counts right answers; both norm_*_type must be none"
        )
        require(
            not (counts and self.kl_reward_coef),
            f"kl_reward_coef: {self.advantage} counts right answers, and a penalty changes their scores; use kl_coef",
        )
        for key, given in (("value_clip", self.value_clip is not None), ("critic_warmup", self.critic_warmup > 0)):
            require(
                self.uses_critic or not given,
                f"{key}: has no effect without a critic, which only advantage=gae and turn_gae have",
            )

    def _check_terms(self) -> None:
        if self.advantage != "gdpo":
            return
        require(bool(self.reward_weights), "reward_weights: gdpo needs them, as in {correct: 1, form: 0.5}")
        # GDPO reads the parts of a verdict, so settings that shape its score would silently do nothing.
        none = self.normalises or self.reward_clip is not None or self.difficulty_mask or self.difficulty_loss_weight
        of_scores = (self.format_penalty, self.repetition_coef, self.overlong_coef, self.reward_shift)
        of_scores += (self.kl_reward_coef,)
        require(
            not (none or any(of_scores)) and self.reward_scale == 1,
            "advantage: gdpo reads the parts of verdicts and not their score; leave what shapes scores (reward_*, "
            "norm_*_type, *_penalty, *_coef of repetition, overlong and KL, difficulty_*) at its default",
        )

    @property
    def normalises(self) -> bool:
        """True if scores are normalised before the advantages."""
        return (self.norm_mean_type, self.norm_std_type) != ("none", "none")

    @property
    def credits_steps(self) -> bool:
        """True if each step of an agent gets an advantage."""
        return self.advantage in STEP_ADVANTAGES

    @property
    def uses_reference(self) -> bool:
        """True if a frozen reference is loaded."""
        return self.kl_coef > 0 or self.kl_reward_coef > 0

    @property
    def uses_greedy(self) -> bool:
        """True if each prompt also gets a greedy answer, as baseline."""
        return self.advantage == "remax"

    @property
    def uses_critic(self) -> bool:
        """True if a critic is trained."""
        return self.advantage in ("gae", "turn_gae")
