"""Which groups train: a pure function of the metadata of their answers, asked once by whoever resolves the ticket."""

from statistics import fmean

import numpy as np

from spmd_rl.config.schema import FilterConfig


def reject_reason(answers: np.ndarray, min_answers: int, settings: FilterConfig) -> str | None:
    """Return why the group of these answers does not qualify, in two or three words; None if it does.

    `answers`: rows of `outcomes.ANSWER`. Only scored answers have a score; greedy baselines are left out. An answer of
    several segments counts once, with the tokens of all of them.
    """
    sampled = ~answers["greedy"]
    last = sampled & answers["last"]
    scores = answers["score"][answers["scored"] & last].tolist()
    if len(scores) < min_answers:
        return "too few scored"
    if settings.zero_variance and min(scores) == max(scores):
        return "zero variance"
    if settings.min_mean_score is not None and fmean(scores) < settings.min_mean_score:
        return "too hard"
    if settings.max_mean_score is not None and fmean(scores) > settings.max_mean_score:
        return "too easy"
    if settings.max_truncated is not None and answers["truncated"][last].mean() > settings.max_truncated:
        return "too many truncated"
    mean_tokens = answers["num_answer_tokens"][sampled].sum() / max(1, last.sum())
    if settings.max_mean_tokens is not None and mean_tokens > settings.max_mean_tokens:
        return "too long"
    return None
