"""The inputs of the algorithm functions: the metadata of the samples of a step, and the tokens of whole samples."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scored:
    """Metadata of the n samples of the global batch that have a score, in (ticket, answer) order."""

    scores: Tensor
    """float64 [n], after shaping"""
    groups: Tensor
    """int64 [n], equal numbers mark a group"""
    lengths: Tensor
    """int64 [n], answer tokens"""
    greedy: Tensor | None = None
    """float64 [n]: score of the group's greedy answer (ReMax); None where there is none"""
    trajectories: Tensor | None = None
    """int64 [n]: trajectory to which a step belongs (agents); None: each sample is a trajectory of its own"""
    steps: Tensor | None = None
    """int64 [n]: index of the step in its trajectory"""
    states: Tensor | None = None
    """int64 [n]: equal numbers mark equal (group, state before the step) (GiGPO)"""

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
