"""Advantages, losses and what corrects them: `algorithm`."""

from dataclasses import dataclass

from spmd_rl.config.values import at_least, one_of, within

# The names in the dicts of `algo`, which needs torch; a test holds the two together.
ADVANTAGES = ("grpo",)
LOSSES = ("ppo_clip",)
LOSS_AGGS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
KL_ESTIMATORS = ("k1", "k2", "k3")


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
