"""Inputs of the algorithm functions: metadata of samples, and tokens of whole samples."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scored:
    """Metadata of the n scored samples of the global batch, in (ticket, answer) order."""

    scores: Tensor
    """float64 [n], after shaping"""
    groups: Tensor
    """int64 [n]: equal numbers mark a group"""
    lengths: Tensor
    """int64 [n]: sampled tokens"""
    greedy: Tensor | None = None
    """float64 [n]: score of the group's greedy answer (ReMax)"""
    trajectories: Tensor | None = None
    """int64 [n]: trajectory of a step (agents); None: each sample is one"""
    steps: Tensor | None = None
    """int64 [n]: index in the trajectory"""
    states: Tensor | None = None
    """int64 [n]: equal numbers mark equal (group, state before the step) (GiGPO)"""

    terms: Mapping[str, Tensor] | None = None
    """float64 [n] each: parts of the verdicts, by name (GDPO)"""

    def __post_init__(self) -> None:
        assert bool(self.scores.isfinite().all()), "a score is not finite: its verdict must be an error"


@dataclass(frozen=True, slots=True)
class Tokens:
    """The N sampled tokens of whole samples, in order."""

    logprobs: Tensor
    """float [N], of the policy; only these and `entropy` carry gradient"""
    old_logprobs: Tensor
    """float [N], of the trainer before the step's first update"""
    rollout_logprobs: Tensor
    """float [N], of the engine"""
    advantages: Tensor
    entropy: Tensor
    samples: Tensor
    """int64 [N]: 0..S-1, non-decreasing"""
    segments: Tensor
    """int64 [N]: 0..R-1, non-decreasing: runs of sampled tokens (turns)"""
    ref_logprobs: Tensor | None = None
    marked: Tensor | None = None
    """bool [N]: selected over the *global* batch (clip-cov, kl-cov)"""
    right: Tensor | None = None
    """float [N]: 0 in wrong answers, else 1 / (tokens of right answers in the mini-batch) / (the token's weight in the
    loss). None: no answer is right
    """


@dataclass(frozen=True, slots=True)
class Pairs:
    """P pairs of answers. A reward is log pi - log pi_ref, summed over an answer's tokens."""

    chosen_rewards: Tensor
    """float [P], with gradient"""
    rejected_rewards: Tensor
    """float [P], with gradient"""
    chosen_lengths: Tensor
    rejected_lengths: Tensor

    def difference(self, of_means: bool) -> Tensor:
        """Return the reward of the chosen less the rejected answer, float [P]; of_means: of the mean token."""
        if not of_means:
            return self.chosen_rewards - self.rejected_rewards
        return self.chosen_rewards / self.chosen_lengths - self.rejected_rewards / self.rejected_lengths


@dataclass(frozen=True, slots=True)
class Judged:
    """S single answers that were judged good or bad; rewards as of `Pairs`."""

    rewards: Tensor
    """float [S], with gradient"""
    desirable: Tensor
    baseline: float
