"""Which groups train: a pure function of their answers' metadata. Who resolves a ticket asks, and tells all others."""

from statistics import fmean

import numpy as np

from spmd_rl.config.schema import FilterConfig


def why_not(answers: np.ndarray, min_answers: int, settings: FilterConfig) -> str | None:
    """Why the group of these answers (rows of `outcomes.ANSWER`) does not qualify, in two or three words; else None.

    Only scored answers have a score; a greedy baseline is not asked.
    """
    sampled = ~answers["greedy"]
    scores = answers["score"][answers["scored"] & sampled].tolist()
    if len(scores) < min_answers:
        return "too few scored"
    if settings.zero_variance and min(scores) == max(scores):
        return "zero variance"
    if settings.min_mean_score is not None and fmean(scores) < settings.min_mean_score:
        return "too hard"
    if settings.max_mean_score is not None and fmean(scores) > settings.max_mean_score:
        return "too easy"
    if settings.max_truncated is not None and answers["truncated"][sampled].mean() > settings.max_truncated:
        return "too many truncated"
    if settings.max_mean_tokens is not None and answers["num_answer_tokens"][sampled].mean() > settings.max_mean_tokens:
        return "too long"
    return None
