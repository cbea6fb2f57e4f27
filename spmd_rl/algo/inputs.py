"""The inputs of the algorithm functions: the metadata of the samples of a step, and the tokens of whole samples."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scored:
    """Metadata of the n samples of the global batch that have a score, in (ticket, answer) order."""

    scores: Tensor
    """float64 [n]: scores of answers after shaping"""
    groups: Tensor
    """int64 [n], equal numbers mark a group"""
    lengths: Tensor
    """int64 [n]: sampled tokens of each answer"""
    greedy: Tensor | None = None
    """float64 [n]: score of the group's greedy answer (ReMax); None without one"""
    trajectories: Tensor | None = None
    """int64 [n]: trajectory to which a step belongs (agents); None: each sample is a trajectory"""
    steps: Tensor | None = None
    """int64 [n]: index of the step in its trajectory"""
    states: Tensor | None = None
    """int64 [n]: equal numbers mark equal (group, state before the step) (GiGPO)"""

    terms: Mapping[str, Tensor] | None = None
    """float64 [n] each: parts of the verdicts that count by themselves, by name (GDPO)"""

    def __post_init__(self) -> None:
        assert bool(self.scores.isfinite().all()), "a score is not finite: its verdict must be an error"


@dataclass(frozen=True, slots=True)
class Tokens:
    """The N sampled tokens of whole samples, in order; a sample is never split over two of these."""

    logprobs: Tensor
    """float [N]: logprobs of the policy; only these and `entropy` carry gradient"""
    old_logprobs: Tensor
    """float [N]: logprobs of the trainer before the first update of the step"""
    rollout_logprobs: Tensor
    """float [N]: logprobs of the engine that sampled"""
    advantages: Tensor
    """float [N]"""
    entropy: Tensor
    """float [N]"""
    samples: Tensor
    """int64 [N]: 0..S-1, non-decreasing"""
    segments: Tensor
    """int64 [N]: 0..R-1, non-decreasing: contiguous runs of sampled tokens (turns)"""
    ref_logprobs: Tensor | None = None
    """float [N]"""
    marked: Tensor | None = None
    """bool [N]: tokens selected over the *global* batch (clip-cov, kl-cov)"""
    right: Tensor | None = None
    """float [N]: 0 in answers that are not right; else 1 / (tokens of right answers in the mini-batch), divided by the
    token's weight in the loss. None: no answer is right"""


@dataclass(frozen=True, slots=True)
class Pairs:
    """P pairs of answers to one prompt each. A reward is log pi - log pi_ref, summed over the tokens of an answer."""

    chosen_rewards: Tensor
    """float [P], with gradient"""
    rejected_rewards: Tensor
    """float [P], with gradient"""
    chosen_lengths: Tensor
    """int64 [P], tokens"""
    rejected_lengths: Tensor
    """int64 [P], tokens"""

    def difference(self, of_means: bool) -> Tensor:
        """Reward of the chosen answer less that of the rejected one, float [P]; of_means: of the mean token."""
        if not of_means:
            return self.chosen_rewards - self.rejected_rewards
        return self.chosen_rewards / self.chosen_lengths - self.rejected_rewards / self.rejected_lengths


@dataclass(frozen=True, slots=True)
class Judged:
    """S single answers that were found good or bad; rewards as of `Pairs`."""

    rewards: Tensor
    """float [S], with gradient"""
    desirable: Tensor
    """bool [S]"""
    baseline: float
    """Mean reward of answers"""
