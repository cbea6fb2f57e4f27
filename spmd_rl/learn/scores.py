"""From the verdicts of a step to the scores that advantages are made of: penalties, norms and clips.

Every rank holds the same metadata (rows of `table.ANSWER`) and finds the same. A verdict that is not a score takes
its answer out altogether, out of its group's baseline too. An answer, or trajectory, may have several samples: the
segments that `Sample.last` ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from spmd_rl.algo import shaping
from spmd_rl.algo.inputs import Scored
from spmd_rl.algo.moments import Moments
from spmd_rl.batch import as_tensor
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.learn.binding import bind
from spmd_rl.rollout.table import SampleTable, last_segments
from spmd_rl.types import Group


class Samples(Protocol):
    """What a step learns from, whoever made it; `rollout.Collected`, for one."""

    step: int
    groups: Sequence[Group]
    """This rank's."""
    table: SampleTable
    """Equal on all ranks."""


Key = tuple[int, int]
"""(ticket, answer)"""
NOTHING_SAMPLED, BASELINE, NO_BASELINE = 1, 2, 3
EXCLUDED = {
    NOTHING_SAMPLED: "nothing sampled",
    BASELINE: "greedy baseline",
    NO_BASELINE: "no greedy score",
}
"""Why a scored answer is not among those that may train."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """The n scored answers of a step that may train, in (ticket, answer) order; each holds a sampled token."""

    answers: np.ndarray
    """`ANSWER` [n]: of each its last sample, which bears its verdict"""
    groups: Tensor
    """int64 [n]: ticket"""
    domains: Tensor
    """int64 [n]: equal numbers mark a domain"""
    scores: Tensor
    """float64 [n], as judged"""
    lengths: Tensor
    """int64 [n], sampled tokens of all its samples"""
    greedy: Tensor | None
    """float64 [n]: score of the group's greedy answer; None where there is none"""
    samples: np.ndarray
    """`ANSWER` [m]: the samples of these answers that hold a sampled token, in (ticket, answer) order"""
    owners: np.ndarray
    """int64 [m]: the answer that each sample belongs to"""
    steps: np.ndarray
    """`STEP` [k]: the agent's turns in these samples, by sample and turn"""
    places: np.ndarray
    """int64 [k]: the sample that holds each turn"""
    excluded: tuple[tuple[Key, str], ...]
    """samples of scored answers of these groups that are not among these, each with the reason"""
    num_excluded: int
    """scored answers that may not train"""

    @classmethod
    def of(cls, collected: Samples, greedy_answer: int | None = None) -> "Metadata":
        """Of the groups that train. greedy_answer: the number of the answer that is a baseline and never trains."""
        table = collected.table
        samples, steps = table.accepted, table.steps
        if len(steps) or not samples["last"].all():
            samples = samples[np.lexsort((samples["answer"], samples["ticket"]))]
        ends = last_segments(samples)
        lengths = np.bincount(ends, samples["num_answer_tokens"], len(samples)).astype(np.int64)
        judged = samples["last"] & samples["scored"]
        reasons = np.where(judged & (lengths == 0), NOTHING_SAMPLED, 0)
        if greedy_answer is not None:
            _exclude_baselines(samples, judged & (reasons == 0), greedy_answer, reasons)
        rows = np.flatnonzero(judged & (reasons == 0))
        numbers = np.full(len(samples), -1)
        numbers[rows] = np.arange(len(rows))
        owners = numbers[ends]
        trains = (owners >= 0) & (samples["num_answer_tokens"] > 0)
        why = np.where((owners >= 0) & ~trains, NOTHING_SAMPLED, reasons[ends])
        answers = samples[rows]
        greedy = None if greedy_answer is None else _baselines(samples, reasons, answers)
        steps, places = _steps_of(samples[trains], steps)
        return cls(
            answers=answers,
            groups=as_tensor(answers["ticket"]),
            domains=as_tensor(table.domains[table.tickets.searchsorted(answers["ticket"])]),
            scores=as_tensor(answers["score"], np.float64),
            lengths=as_tensor(lengths[rows]),
            greedy=None if greedy is None else as_tensor(greedy, np.float64),
            samples=samples[trains],
            owners=owners[trains],
            steps=steps,
            places=places,
            excluded=tuple(zip(keys(samples[why > 0]), [EXCLUDED[w] for w in why[why > 0].tolist()], strict=True)),
            num_excluded=int(np.count_nonzero(reasons)),
        )


def keys(answers: np.ndarray) -> list[Key]:
    """Of rows of `ANSWER`."""
    return list(zip(answers["ticket"].tolist(), answers["answer"].tolist(), strict=True))


def _exclude_baselines(samples: np.ndarray, judged: np.ndarray, greedy_answer: int, reasons: np.ndarray) -> None:
    """Set the reasons of the baselines, and of the answers without one, among the `judged` rows (bool [m])."""
    is_baseline = judged & (samples["unit"] == greedy_answer)
    has_baseline = np.isin(samples["ticket"], samples["ticket"][is_baseline])
    reasons[judged & ~has_baseline] = NO_BASELINE
    reasons[is_baseline] = BASELINE


def _baselines(samples: np.ndarray, reasons: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """The score of each answer's baseline."""
    baselines = samples[reasons == BASELINE]
    order = baselines["ticket"].argsort()
    return baselines["score"][order[np.searchsorted(baselines["ticket"], answers["ticket"], sorter=order)]]


def _steps_of(samples: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows of `STEP` of these samples, sorted by sample and turn, and the place of each one's sample."""
    if not len(steps):
        return steps, np.empty(0, np.int64)
    width = 1 + max(int(rows["answer"].max(initial=0)) for rows in (samples, steps))
    held, wanted = (rows["ticket"] * width + rows["answer"] for rows in (samples, steps))
    chosen = np.flatnonzero(np.isin(wanted, held))
    places = held.searchsorted(wanted[chosen])
    order = np.lexsort((steps["step"][chosen], places))
    return steps[chosen[order]], places[order]


def adjusted(data: Metadata, settings: AlgorithmConfig, max_tokens: int, penalties: Tensor | None = None) -> Tensor:
    """Scores, scaled and with penalties. float64 [n]. Parameters as in `shape`."""
    scores = bind(shaping.scale_shift, settings)(data.scores)
    if settings.format_penalty:
        wrong = as_tensor(data.answers["wrong_format"], np.bool_)
        scores = scores + bind(shaping.format_penalty, settings)(wrong)
    if settings.overlong_coef:
        scores = scores + bind(shaping.overlong_penalty, settings)(data.lengths, max_tokens)
    return scores if penalties is None else scores + penalties


def normalised(
    values: Tensor, groups: Tensor, domains: Tensor, settings: AlgorithmConfig, running: Moments
) -> tuple[Tensor, Moments]:
    """Values normalised and clipped, and the moments of all of the run, these included. float64 [n]."""
    if "running" in (settings.norm_mean_type, settings.norm_std_type):
        running = running.merge(Moments.of(values))
    if settings.normalises:
        values = bind(shaping.normalise, settings)(values, groups, running, domains)
    if settings.reward_clip is not None:
        values = shaping.clip(values, settings.reward_clip)
    return values, running


def shape(
    data: Metadata, settings: AlgorithmConfig, running: Moments, max_tokens: int, penalties: Tensor | None = None
) -> tuple[Scored, Moments]:
    """Scores with penalties, normalised and clipped; and the moments of all scores of the run, these included.

    max_tokens: the limit of an answer. penalties: float64 [n], what else is added to the scores.
    """
    scores = adjusted(data, settings, max_tokens, penalties)
    scores, running = normalised(scores, data.groups, data.domains, settings, running)
    # penalties are the answers' own: a baseline may be any function of the prompt
    greedy = None if data.greedy is None else bind(shaping.scale_shift, settings)(data.greedy)
    return Scored(scores, data.groups, data.lengths, greedy), running
