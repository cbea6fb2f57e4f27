"""Which groups train: a pure function of a group's verdicts."""

from statistics import fmean

from spmd_rl.config.schema import FilterConfig
from spmd_rl.types import Group


def why_not(group: Group, min_answers: int, settings: FilterConfig) -> str | None:
    """Why the group does not qualify, in one or two words; None if it does. Only scored answers count."""
    scores = [sample.verdict.score for sample in group.samples if sample.verdict.scored]
    if len(scores) < min_answers:
        return "too few scored"
    if settings.zero_variance and min(scores) == max(scores):
        return "zero variance"
    if settings.min_mean_score is not None and fmean(scores) < settings.min_mean_score:
        return "too hard"
    if settings.max_mean_score is not None and fmean(scores) > settings.max_mean_score:
        return "too easy"
    return None
