"""The group filter: a pure function of the answers' metadata, applied where the ticket is resolved."""

from statistics import fmean

import numpy as np

from spmd_rl.config.schema import FilterConfig

ADVICE = {
    "too few scored": "fewer than rollout.min_answers answers to such a prompt got a score: another line says why",
    "zero variance": "all answers to such a prompt scored alike, from which nothing is learned: take harder problems "
    "where the score is high, easier ones where it is low, or more rollout.answers_per_prompt; "
    "rollout.filter.zero_variance=false trains on these prompts too",
    "too hard": "they scored below rollout.filter.min_mean_score: lower it, or take easier problems",
    "too easy": "they scored above rollout.filter.max_mean_score: raise it, or take harder problems",
    "too many truncated": "more answers than rollout.filter.max_truncated allows were cut off: raise it, or "
    "rollout.max_new_tokens",
    "too long": "their answers are longer than rollout.filter.max_mean_tokens: raise it",
}


def reject_reason(answers: np.ndarray, min_answers: int, settings: FilterConfig) -> str | None:
    """Return why a group does not qualify, in two or three words; None if it does.

    answers: rows of `table.ANSWER`. Unscored answers and greedy baselines are ignored. An answer of several segments
    counts once, with all their tokens.
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
