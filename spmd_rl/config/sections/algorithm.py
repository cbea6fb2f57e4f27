"""Scores, advantages, losses and what corrects them: `algorithm`, and `algorithm.correction`.

The formulas, their sources and when to use which stand in docs/ALGORITHMS.md. Left out: which setting needs which
pipeline (`schema.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from spmd_rl.config.values import above, at_least, one_of, require, within

# The names in the dicts of `algo`, which needs torch, each with the keys that it reads; a test holds the two together.
SAMPLE_ADVANTAGES: Mapping[str, tuple[str, ...]] = {
    "grpo": ("norm_std",),
    "dr_grpo": (),
    "rloo": (),
    "reinforce": (),
    "reinforce_pp_baseline": (),
    "remax": (),
    "opo": (),
    "lite_ppo": (),
    "pass_at_k": ("pass_k", "pass_score"),
    "starpo": ("norm_std",),
    "step_reinforce": ("step_reward_gamma",),
    "gigpo": ("norm_std", "step_reward_gamma", "episode_reward_weight", "step_reward_weight"),
}
TOKEN_ADVANTAGES: Mapping[str, tuple[str, ...]] = {"gae": ("gamma", "lam"), "reinforce_returns": ("gamma",)}
ADVANTAGES = {**SAMPLE_ADVANTAGES, **TOKEN_ADVANTAGES}
AGENTIC_ADVANTAGES = ("starpo", "step_reinforce", "gigpo")
"""They compare the steps of trajectories, which only an agent has."""
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
    "sapo": ("sapo_tau_pos", "sapo_tau_neg"),
    "gmpo": CLIP,
    "kimi": ("kimi_tau",),
    "clip_cov": CLIP,
    "kl_cov": ("kl_cov_coef",),
}
CHOICES = {"clip_cov": ("clip_cov_ratio", "clip_cov_low", "clip_cov_high"), "kl_cov": ("kl_cov_ratio",)}
"""Losses that choose tokens over the global batch, and the keys that only the choice reads."""
LOSS_AGGS: Mapping[str, tuple[str, ...]] = {
    "token-mean": (),
    "seq-mean-token-mean": (),
    "seq-mean-token-sum": (),
    "seq-mean-token-sum-norm": ("loss_agg_length",),
}
KL_ESTIMATORS = ("k1", "k2", "k3", "abs")
NO_FULL_KL = (
    "full needs the logits of policy and reference over the whole vocabulary, which no trainer holds; "
    f"known: {', '.join(KL_ESTIMATORS)}"
)
NORMS = ("none", "batch", "group", "running")
LEVELS = ("off", "token", "segment", "sequence", "geometric")


@dataclass
class CorrectionConfig:
    """Importance weights for the mismatch between the engine that sampled and the trainer: `algorithm.correction`.

    The engine computes with other kernels, and often in another precision, so its logprobs of its own tokens are not
    quite the trainer's. `train_infer/abs_diff/mean` says how far they are apart.
    """

    level: str = "off"
    """What one weight covers: `token`, `segment` (a turn), `sequence` (product over a sample), `geometric` (mean over a
    sample) or `off`. Off by default, so that an algorithm is what its paper says; with an engine in bfloat16 or FP8,
    and `train_infer/abs_diff/mean` above 0.01, `token` is advised. Costs no forward pass."""
    upper: float | None = 2.0
    """Weights are truncated here (null: not at all)."""
    mask_low: float | None = None
    """A token, segment or sample whose weight lies below is left out of the loss. It still counts in the divisors."""
    mask_high: float | None = None
    """The same for weights above."""

    def __post_init__(self) -> None:
        one_of(self, level=LEVELS)
        at_least(self, upper=1, mask_low=0)
        above(self, mask_high=self.mask_low or 0)


@dataclass
class AlgorithmConfig:
    """Advantages and loss: group `algorithm`."""

    name: str = "grpo"
    """For humans and the run's name."""

    advantage: str = "grpo"
    """Advantage estimator. Of whole answers: `grpo`, `dr_grpo`, `rloo`, `reinforce`, `reinforce_pp_baseline`, `remax`,
    `opo`, `lite_ppo`, `pass_at_k`; of an agent's steps: `starpo`, `step_reinforce`, `gigpo`; of tokens: `gae` (with a
    critic), `reinforce_returns`."""
    norm_std: bool = True
    """Divide centred scores by the group's standard deviation (off: Dr.GRPO)."""
    gamma: float = 1.0
    """Discount from token to token, for token-level estimators and for a KL penalty in the reward."""
    lam: float = 1.0
    """GAE's lambda: 1 has no bias of the critic and all of the variance."""
    pass_k: int = 4
    """k of pass@k."""
    pass_score: float = 1.0
    """A score of at least this is right (`pass_at_k`, `error_max_len_clip`)."""
    step_reward_gamma: float = 0.95
    """Discount from step to step of a trajectory."""
    episode_reward_weight: float = 1.0
    """GiGPO's weight of the comparison of trajectories."""
    step_reward_weight: float = 1.0
    """GiGPO's weight of the comparison of steps that met the same state."""
    whiten_advantages: bool = False
    """Shift and scale the advantages of all tokens of the global batch to mean 0 and standard deviation 1."""
    advantage_clip: float | None = None
    """Hold advantages within plus and minus this, after all else."""

    reward_scale: float = 1.0
    """Factor on every score, first of all."""
    reward_shift: float = 0.0
    """Added to every score after `reward_scale`."""
    format_penalty: float = 0.0
    """Taken from the score of an answer in the wrong format."""
    repetition_coef: float = 0.0
    """Taken from the score for the share of n-grams that repeat an earlier one."""
    repetition_ngram: int = 3
    """n of these n-grams, in tokens."""
    overlong_coef: float = 0.0
    """DAPO's soft punishment of answers near the token limit `rollout.max_new_tokens`: what the longest lose."""
    overlong_tokens: int | None = None
    """Tokens before the limit over which that punishment rises. Default: a quarter of the limit."""
    norm_mean_type: str = "none"
    """Scores less their mean over `batch`, `group` or the run so far (`running`); `none`."""
    norm_std_type: str = "none"
    """Scores over their standard deviation in `batch`, `group` or the run so far (`running`); `none`."""
    reward_clip: float | None = None
    """Hold scores within plus and minus this, after normalisation."""

    max_len_mask: bool = False
    """Leave answers out of the loss that were cut off at the token limit; they stay in their group's baseline."""
    difficulty_mask: bool = False
    """Leave groups out of the loss whose mean score lies outside of the two thresholds."""
    difficulty_low_threshold: float = 0.0
    """Groups must score more than this on average."""
    difficulty_high_threshold: float = 1.0
    """Groups must score less than this on average."""
    error_max_len_clip: bool = False
    """Leave wrong answers (score below `pass_score`) out of the loss that are long."""
    error_max_len_threshold: int = 4096
    """Tokens from which a wrong answer is long."""
    difficulty_loss_weight: bool = False
    """Weigh groups by 0.5 + 1.5 (1 - mean score): harder prompts more. The mean weight is 1."""
    length_loss_weight: bool = False
    """Weigh answers from 1.5 (the shortest of the step) to 0.5 (the longest). The mean weight is 1."""

    loss: str = "ppo_clip"
    """Policy loss: `ppo_clip`, `dual_clip`, `segment_clip`, `gspo`, `gspo_token`, `raft_pp`, `vanilla_pg`, `tis`,
    `cispo`, `topr`, `sapo`, `gmpo`, `kimi`, `clip_cov`, `kl_cov`."""
    loss_agg: str = "token-mean"
    """Weight of each token: `token-mean`, `seq-mean-token-mean`, `seq-mean-token-sum` or `seq-mean-token-sum-norm`
    (over `loss_agg_length`); counts are global."""
    loss_agg_length: int | None = None
    """The constant of `seq-mean-token-sum-norm`. Default: `rollout.max_new_tokens`."""
    clip_low: float = 0.2
    """Lower clip range of the importance ratio: 1 - clip_low."""
    clip_high: float = 0.2
    """Upper clip range of the importance ratio: 1 + clip_high."""
    dual_clip: float = 3.0
    """Largest ratio of a token with a negative advantage (`loss=dual_clip`)."""
    sapo_tau_pos: float = 1.0
    """SAPO's steepness of the gate for positive advantages."""
    sapo_tau_neg: float = 1.05
    """The same for negative advantages."""
    kimi_tau: float = 0.1
    """Kimi k1.5's weight of the pull to the old policy."""
    clip_cov_ratio: float = 2e-4
    """Share of all tokens whose gradient clip-cov takes away."""
    clip_cov_low: float = 1.0
    """Tokens of a covariance above this may be chosen (`loss=clip_cov`)."""
    clip_cov_high: float = 5.0
    """Tokens of a covariance below this may be chosen."""
    kl_cov_ratio: float = 2e-3
    """Share of all tokens, those of the largest covariance, that kl-cov pulls back."""
    kl_cov_coef: float = 1.0
    """Weight of kl-cov's pull to the old policy."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the loss."""
    sft_coef: float = 0.0
    """Weight of supervised learning on answers of positive advantage."""

    kl_coef: float = 0.0
    """Weight of the KL penalty to the frozen reference, in the loss."""
    kl_estimator: str = "k3"
    """Of the penalty in the loss: `k1`, `k2`, `k3` (Schulman, Approximating KL Divergence) or `abs`."""
    kl_reward_coef: float = 0.0
    """Weight of the KL penalty to the frozen reference, in the reward of each token. With both weights 0 no reference
    is loaded."""
    kl_reward_estimator: str = "k1"
    """Of the penalty in the reward."""
    target_kl: float | None = None
    """Nats per answer towards which an adaptive controller drives the weights above (null: they are fixed)."""
    kl_horizon: float = 10000.0
    """Answers over which the controller may change a weight by a fifth."""

    value_clip: float | None = None
    """Hold the critic's values within plus and minus this of the old ones (null: not at all)."""
    critic_warmup: int = 0
    """Steps in which the critic learns and the policy does not."""

    correction: CorrectionConfig = field(default_factory=CorrectionConfig)

    def __post_init__(self) -> None:
        one_of(self, advantage=ADVANTAGES, loss=LOSSES, loss_agg=LOSS_AGGS, norm_mean_type=NORMS, norm_std_type=NORMS)
        for key in ("kl_estimator", "kl_reward_estimator"):
            require(getattr(self, key) != "full", f"{key}: {NO_FULL_KL}")
        one_of(self, kl_estimator=KL_ESTIMATORS, kl_reward_estimator=KL_ESTIMATORS)
        within(self, gamma=(0, 1), lam=(0, 1), step_reward_gamma=(0, 1))
        within(self, clip_cov_ratio=(0, 1), kl_cov_ratio=(0, 1))
        at_least(self, clip_low=0, clip_high=0, dual_clip=1, kimi_tau=0, kl_cov_coef=0, entropy_coef=0, sft_coef=0)
        at_least(self, kl_coef=0, kl_reward_coef=0, critic_warmup=0, pass_k=1, loss_agg_length=1)
        at_least(self, overlong_coef=0, overlong_tokens=1, format_penalty=0, repetition_coef=0, repetition_ngram=1)
        at_least(self, error_max_len_threshold=1)
        above(self, sapo_tau_pos=0, sapo_tau_neg=0, advantage_clip=0, reward_clip=0, value_clip=0)
        above(self, target_kl=0, kl_horizon=0, difficulty_high_threshold=self.difficulty_low_threshold)
        above(self, clip_cov_high=self.clip_cov_low)
        log_band = self.loss == "gmpo"  # its band is of the logarithm
        require(log_band or self.clip_low <= 1, f"clip_low: must be between 0 and 1, not {self.clip_low}")
        require(self.target_kl is None or self.uses_reference, "target_kl: needs kl_coef or kl_reward_coef above 0")
        plain = self.norm_mean_type == self.norm_std_type == "none"
        require(plain or not self.uses_greedy, "norm_mean_type: remax has its baseline, leave both norms at none")
        counts = self.advantage == "pass_at_k"  # normalised, no score would reach `pass_score`
        require(plain or not counts, "norm_mean_type: pass_at_k counts right answers, leave both norms at none")
        critics = ", ".join(name for name in ADVANTAGES if needs_critic(name))
        for key, said in (("value_clip", self.value_clip is not None), ("critic_warmup", self.critic_warmup > 0)):
            require(self.uses_critic or not said, f"{key}: there is no critic; only advantage={critics} has one")

    @property
    def uses_reference(self) -> bool:
        """Whether a frozen reference is loaded."""
        return self.kl_coef > 0 or self.kl_reward_coef > 0

    @property
    def uses_greedy(self) -> bool:
        """Whether each prompt gets a greedy answer beside its samples, as a baseline."""
        return self.advantage == "remax"

    @property
    def uses_critic(self) -> bool:
        """Whether a critic is trained."""
        return needs_critic(self.advantage)


def needs_critic(advantage: str) -> bool:
    """Whether the estimator of this name reads a critic's values."""
    return advantage == "gae"
