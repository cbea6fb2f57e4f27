"""From the verdicts of a step to the scores that advantages are made of: penalties, norms and clips.

Every rank holds the same metadata (rows of `outcomes.ANSWER`) and finds the same. A verdict that is not a score takes
its sample out altogether, out of its group's baseline too.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from spmd_rl.algo import shaping
from spmd_rl.algo.inputs import Scored
from spmd_rl.algo.moments import Moments
from spmd_rl.batch import as_tensor
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.learn.binding import bind
from spmd_rl.rollout import Collected

Key = tuple[int, int]
"""(ticket, answer)"""


@dataclass(frozen=True, slots=True)
class Metadata:
    """The n scored samples of a step that may train, in (ticket, answer) order; each holds a sampled token."""

    answers: np.ndarray
    """`ANSWER` [n]"""
    groups: Tensor
    """int64 [n]: ticket"""
    scores: Tensor
    """float64 [n], as judged"""
    lengths: Tensor
    """int64 [n], sampled tokens"""
    greedy: Tensor | None
    """float64 [n]: score of the group's greedy answer; None where there is none"""
    excluded: tuple[tuple[Key, str], ...]
    """scored samples of the groups that are not among these, each with the reason"""

    @classmethod
    def of(cls, collected: Collected, greedy_answer: int | None = None) -> "Metadata":
        """Of the groups that train. greedy_answer: the number of the answer that is a baseline and never trains."""
        answers = collected.outcomes.accepted
        answers = answers.compress(answers["scored"] & (answers["num_answer_tokens"] > 0))
        greedy, excluded = None, ()
        if greedy_answer is not None:
            answers, greedy, excluded = _without_baselines(answers, greedy_answer)
        return cls(
            answers=answers,
            groups=as_tensor(answers["ticket"]),
            scores=as_tensor(answers["score"], np.float64),
            lengths=as_tensor(answers["num_answer_tokens"]),
            greedy=None if greedy is None else as_tensor(greedy, np.float64),
            excluded=excluded,
        )


def keys(answers: np.ndarray) -> list[Key]:
    """Of rows of `ANSWER`."""
    return list(zip(answers["ticket"].tolist(), answers["answer"].tolist(), strict=True))


def _without_baselines(
    answers: np.ndarray, greedy_answer: int
) -> tuple[np.ndarray, np.ndarray, tuple[tuple[Key, str], ...]]:
    """The rows that may train, the score of each one's baseline, and `Metadata.excluded`."""
    is_baseline = answers["answer"] == greedy_answer
    baselines = answers.compress(is_baseline)
    is_excluded = is_baseline | ~np.isin(answers["ticket"], baselines["ticket"])
    reasons = np.where(is_baseline[is_excluded], "greedy baseline", "no greedy score").tolist()
    excluded = tuple(zip(keys(answers.compress(is_excluded)), reasons, strict=True))
    answers = answers.compress(~is_excluded)
    order = baselines["ticket"].argsort()
    mine = order[np.searchsorted(baselines["ticket"], answers["ticket"], sorter=order)]
    return answers, baselines["score"][mine], excluded


def shape(
    data: Metadata, settings: AlgorithmConfig, running: Moments, max_tokens: int, penalties: Tensor | None = None
) -> tuple[Scored, Moments]:
    """Scores with penalties, normalised and clipped; and the moments of all scores of the run, these included.

    max_tokens: the limit of an answer. penalties: float64 [n], what else is added to the scores.
    """
    scores = bind(shaping.scale_shift, settings)(data.scores)
    if settings.format_penalty:
        wrong = as_tensor(data.answers["wrong_format"], np.bool_)
        scores = scores + bind(shaping.format_penalty, settings)(wrong)
    if settings.overlong_coef:
        scores = scores + bind(shaping.overlong_penalty, settings)(data.lengths, max_tokens)
    if penalties is not None:
        scores = scores + penalties
    if "running" in (settings.norm_mean_type, settings.norm_std_type):
        running = running.merge(Moments.of(scores))
    if (settings.norm_mean_type, settings.norm_std_type) != ("none", "none"):
        scores = bind(shaping.normalise, settings)(scores, data.groups, running)
    if settings.reward_clip is not None:
        scores = shaping.clip(scores, settings.reward_clip)
    # penalties are the samples' own: a baseline may be any function of the prompt
    greedy = None if data.greedy is None else bind(shaping.scale_shift, settings)(data.greedy)
    return Scored(scores, data.groups, data.lengths, greedy), running
