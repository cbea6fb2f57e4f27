"""From the metadata of a step to one number per sample: shaped scores, who is left out of the loss, and loss weights.

Every rank holds the same metadata (`Outcome`) and finds the same. A verdict that is not a score takes its sample out
altogether, out of its group's baseline too; a mask takes it out of the loss alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_rl.algo import masks, shaping
from spmd_rl.algo.groups import group_mean
from spmd_rl.algo.inputs import Scored
from spmd_rl.algo.moments import Moments
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.learn.binding import bind
from spmd_rl.rollout import Collected
from spmd_rl.rollout.collected import AnswerOutcome

Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Metadata:
    """The n scored samples of a step that may train, in (ticket, answer) order; each holds a sampled token."""

    answers: tuple[AnswerOutcome, ...]
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
        rows, baselines, aside = [], [], []
        for o in collected.accepted:
            scored = [a for a in o.answers if a.scored and a.num_answer_tokens]
            baseline = next((a.score for a in scored if a.answer == greedy_answer), None)
            for a in scored:
                if a.answer == greedy_answer:
                    aside.append(((o.ticket, a.answer), "greedy baseline"))
                elif greedy_answer is not None and baseline is None:
                    aside.append(((o.ticket, a.answer), "no greedy score"))
                else:
                    rows.append((o.ticket, a))
                    baselines.append(baseline)
        return cls(
            answers=tuple(a for _, a in rows),
            groups=torch.tensor([ticket for ticket, _ in rows], dtype=torch.int64),
            scores=torch.tensor([a.score for _, a in rows], dtype=torch.float64),
            lengths=torch.tensor([a.num_answer_tokens for _, a in rows], dtype=torch.int64),
            greedy=None if greedy_answer is None else torch.tensor(baselines, dtype=torch.float64),
            aside=tuple(aside),
        )

    @property
    def keys(self) -> tuple[Key, ...]:
        """(ticket, answer)"""
        return tuple((ticket, a.answer) for ticket, a in zip(self.groups.tolist(), self.answers, strict=True))


def shape(
    data: Metadata, settings: AlgorithmConfig, running: Moments, max_tokens: int, penalties: Tensor | None = None
) -> tuple[Scored, Moments]:
    """Scores with penalties, normalised and clipped; and the moments of all scores of the run, these included.

    max_tokens: the limit of an answer. penalties: float64 [n], what else is added to the scores.
    """
    scores = bind(shaping.scale_shift, settings)(data.scores)
    if settings.format_penalty:
        wrong = torch.tensor([a.status == "wrong_format" for a in data.answers], dtype=torch.bool)
        scores = scores + bind(shaping.format_penalty, settings)(wrong)
    if settings.overlong_coef:
        scores = scores + bind(shaping.overlong_penalty, settings)(data.lengths, max_tokens)
    if penalties is not None:
        scores = scores + penalties
    if "running" in (settings.norm_mean_type, settings.norm_std_type):
        running = running.merge(Moments.of(scores))
    scores = bind(shaping.normalise, settings)(scores, data.groups, running)
    if settings.reward_clip is not None:
        scores = shaping.clip(scores, settings.reward_clip)
    # penalties are the samples' own: a baseline may be any function of the prompt
    greedy = None if data.greedy is None else bind(shaping.scale_shift, settings)(data.greedy)
    return Scored(scores, data.groups, data.lengths, greedy), running


def left_out(data: Metadata, settings: AlgorithmConfig) -> list[str | None]:
    """Why each sample is left out of the loss; None for those that train. The first reason counts."""
    reasons: list[str | None] = [None] * len(data.answers)
    for reason, keep in _masks(data, settings):
        for row, kept in enumerate(keep.tolist()):
            if not kept and reasons[row] is None:
                reasons[row] = reason
    return reasons


def _masks(data: Metadata, settings: AlgorithmConfig) -> Iterator[tuple[str, Tensor]]:
    if settings.max_len_mask:
        yield "truncated", masks.max_len_mask(torch.tensor([a.truncated for a in data.answers], dtype=torch.bool))
    if settings.difficulty_mask:
        yield "too easy or too hard", bind(masks.difficulty_mask, settings)(data.scores, data.groups)
    if settings.error_max_len_clip:
        yield "long and wrong", bind(masks.error_max_len_mask, settings)(data.scores, data.lengths)


def loss_weights(data: Metadata, settings: AlgorithmConfig, kept: Tensor) -> Tensor:
    """Factor of the loss of each sample of the rows `kept` beside its share of the mean: float64, of mean 1."""
    weights = torch.ones(len(data.answers), dtype=torch.float64)
    if settings.difficulty_loss_weight:
        weights = weights * masks.difficulty_weight(1 - group_mean(data.scores, data.groups))
    if settings.length_loss_weight:
        weights = weights * masks.length_weight(data.lengths)
    return masks.mean_one(weights[kept])
