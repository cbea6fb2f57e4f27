"""What the algorithm functions take: the metadata of a step's samples, and the sampled tokens of whole samples.

Left out: anything of ranks, devices and settings; `learn/` fills these in.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scored:
    """Metadata of every scored sample of the global batch, in (ticket, answer) order; n samples."""

    scores: Tensor
    """float64 [n], after shaping"""
    groups: Tensor
    """int64 [n], equal numbers mark a group"""
    lengths: Tensor
    """int64 [n], answer tokens"""
    greedy: Tensor | None = None
    """float64 [n]: score of the group's greedy answer (ReMax); None where nobody asked"""
    trajectories: Tensor | None = None
    """int64 [n]: trajectory of a step sample (agentic); None: each sample is its own"""
    steps: Tensor | None = None
    """int64 [n]: place of the step in its trajectory"""
    states: Tensor | None = None
    """int64 [n]: equal numbers mark equal (group, state before the step) (GiGPO)"""

    def __post_init__(self) -> None:
        assert bool(self.scores.isfinite().all()), "a score that is not finite is no score: its verdict is an error"


@dataclass(frozen=True, slots=True)
class Tokens:
    """The N sampled tokens of whole samples, in order; a sample is never split over two of these."""

    logprobs: Tensor
    """float [N]; the only one with a gradient, together with `entropy`"""
    old_logprobs: Tensor
    """float [N]: the trainer's, before the first update of the step"""
    rollout_logprobs: Tensor
    """float [N]: the engine's"""
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
