"""From the metadata of a step to one number per sample: shaped scores, who is left out of the loss, and loss weights.

Every rank holds the same metadata (rows of `outcomes.ANSWER`) and finds the same. A verdict that is not a score takes
its sample out altogether, out of its group's baseline too; a mask takes it out of the loss alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spmd_rl.algo import masks, shaping
from spmd_rl.algo.groups import group_mean
from spmd_rl.algo.inputs import Scored
from spmd_rl.algo.moments import Moments
from spmd_rl.batch import column
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.learn.binding import bind
from spmd_rl.rollout import Collected

Key = tuple[int, int]


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
    aside: tuple[tuple[Key, str], ...]
    """scored samples of the groups that are not among these, each with the reason"""

    @classmethod
    def of(cls, collected: Collected, greedy_answer: int | None = None) -> "Metadata":
        """Of the groups that train. greedy_answer: the number of the answer that is a baseline and never trains."""
        answers = collected.outcomes.accepted
        answers = answers.compress(answers["scored"] & (answers["num_answer_tokens"] > 0))
        greedy, aside = None, ()
        if greedy_answer is not None:
            answers, greedy, aside = _without_baselines(answers, greedy_answer)
        return cls(
            answers=answers,
            groups=column(answers["ticket"]),
            scores=column(answers["score"], np.float64),
            lengths=column(answers["num_answer_tokens"]),
            greedy=None if greedy is None else column(greedy, np.float64),
            aside=aside,
        )


def keys(answers: np.ndarray) -> list[Key]:
    """Of rows of `ANSWER`."""
    return list(zip(answers["ticket"].tolist(), answers["answer"].tolist(), strict=True))


def _without_baselines(
    answers: np.ndarray, greedy_answer: int
) -> tuple[np.ndarray, np.ndarray, tuple[tuple[Key, str], ...]]:
    """The rows that may train, the score of each one's baseline, and `Metadata.aside`."""
    is_baseline = answers["answer"] == greedy_answer
    baselines = answers.compress(is_baseline)
    is_aside = is_baseline | ~np.isin(answers["ticket"], baselines["ticket"])
    reasons = np.where(is_baseline[is_aside], "greedy baseline", "no greedy score").tolist()
    aside = tuple(zip(keys(answers.compress(is_aside)), reasons, strict=True))
    answers = answers.compress(~is_aside)
    order = baselines["ticket"].argsort()
    mine = order[np.searchsorted(baselines["ticket"], answers["ticket"], sorter=order)]
    return answers, baselines["score"][mine], aside


def shape(
    data: Metadata, settings: AlgorithmConfig, running: Moments, max_tokens: int, penalties: Tensor | None = None
) -> tuple[Scored, Moments]:
    """Scores with penalties, normalised and clipped; and the moments of all scores of the run, these included.

    max_tokens: the limit of an answer. penalties: float64 [n], what else is added to the scores.
    """
    scores = bind(shaping.scale_shift, settings)(data.scores)
    if settings.format_penalty:
        wrong = column(data.answers["wrong_format"], np.bool_)
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


def left_out(data: Metadata, settings: AlgorithmConfig) -> dict[int, str]:
    """The rows that are left out of the loss, in order, each with the first reason."""
    reasons: dict[int, str] = {}
    for reason, keep in _masks(data, settings):
        for row in (~keep).nonzero().flatten().tolist():
            reasons.setdefault(row, reason)
    return dict(sorted(reasons.items()))


def _masks(data: Metadata, settings: AlgorithmConfig) -> Iterator[tuple[str, Tensor]]:
    if settings.max_len_mask:
        yield "truncated", masks.max_len_mask(column(data.answers["truncated"], np.bool_))
    if settings.difficulty_mask:
        yield "too easy or too hard", bind(masks.difficulty_mask, settings)(data.scores, data.groups)
    if settings.error_max_len_clip:
        yield "long and wrong", bind(masks.error_max_len_mask, settings)(data.scores, data.lengths)


def loss_weights(data: Metadata, settings: AlgorithmConfig, kept: np.ndarray | slice) -> Tensor:
    """Factor of the loss of each sample of the rows `kept` beside its share of the mean: float64, of mean 1."""
    weights = torch.ones(len(data.answers), dtype=torch.float64)
    if settings.difficulty_loss_weight:
        weights = weights * masks.difficulty_weight(1 - group_mean(data.scores, data.groups))
    if settings.length_loss_weight:
        weights = weights * masks.length_weight(data.lengths)
    return masks.mean_one(weights[kept])
