"""Which groups train: a pure function of their answers' metadata, so that every rank finds the same."""

from collections.abc import Sequence
from statistics import fmean

from spmd_rl.config.schema import FilterConfig
from spmd_rl.rollout.collected import AnswerOutcome


def why_not(answers: Sequence[AnswerOutcome], min_answers: int, settings: FilterConfig) -> str | None:
    """Why the group does not qualify, in two or three words; None if it does.

    Only scored answers have a score; a greedy baseline is not asked.
    """
    answers = [answer for answer in answers if not answer.greedy]
    scores = [answer.score for answer in answers if answer.scored]
    if len(scores) < min_answers:
        return "too few scored"
    if settings.zero_variance and min(scores) == max(scores):
        return "zero variance"
    if settings.min_mean_score is not None and fmean(scores) < settings.min_mean_score:
        return "too hard"
    if settings.max_mean_score is not None and fmean(scores) > settings.max_mean_score:
        return "too easy"
    if settings.max_truncated is not None and fmean([a.truncated for a in answers]) > settings.max_truncated:
        return "too many truncated"
    if (
        settings.max_mean_tokens is not None
        and fmean([a.num_answer_tokens for a in answers]) > settings.max_mean_tokens
    ):
        return "too long"
    return None
