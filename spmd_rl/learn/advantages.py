"""Advantages of a step's answers, or of each turn of an agent, computed from verdicts.

    of answers: scores -> penalties -> norms -> clips -> estimator
    of an agent's steps: scores -> penalties -> divided over steps -> estimator -> norms -> clips
    of tokens: scores -> penalties -> norms -> clips, and later the estimator (`token_advantages.finish`)

Every rank computes the same result from the same metadata (rows of `table.ANSWER`). Answers without a score are
dropped, from their group's baseline too.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from spmd_rl.algo import shaping
from spmd_rl.algo.inputs import Scored
from spmd_rl.algo.moments import Moments, group_mean
from spmd_rl.algo.shaping import clip, repetition_penalty
from spmd_rl.base.errors import UserError
from spmd_rl.batch import as_tensor
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.distributed import World
from spmd_rl.learn.custom import answer_advantage, bind, token_advantage
from spmd_rl.rollout.table import SampleTable, last_segments, trajectories_of
from spmd_rl.types import Group, Prompt, Sample, Verdict, concat


class Samples(Protocol):
    """A step's samples for the learner, such as `rollout.Collected`."""

    step: int
    groups: Sequence[Group]
    """Groups that this rank generated."""
    table: SampleTable


Key = tuple[int, int]
"""(ticket, number) of a sample. A first segment's number is that of its answer."""
NOTHING_SAMPLED, BASELINE, NO_BASELINE = 1, 2, 3
EXCLUDED = {
    NOTHING_SAMPLED: "nothing sampled",
    BASELINE: "greedy baseline",
    NO_BASELINE: "no greedy score",
}


@dataclass(frozen=True, slots=True)
class Spans:
    """The r spans of sampled tokens of m samples, end to end, that get one advantage each."""

    turns: np.ndarray
    """int64 [r]: index of each span's advantage in `StepTable.advantages`"""
    lengths: np.ndarray
    """int64 [r]: sampled tokens of each span"""
    counts: np.ndarray
    """int64 [m]: spans of each sample"""


@dataclass(frozen=True, slots=True)
class StepTable:
    """The n scored answers of a step that can train, in (ticket, answer) order.

    `of` takes them from the metadata of all samples; `credit` adds the columns of their advantages.

    Sizes: n answers, m samples (rows of tokens), k turns of agents, r spans, q advantages (one per answer, or per
    turn).
    """

    answers: np.ndarray
    """`ANSWER` [n]: last sample of each answer"""
    groups: Tensor
    """int64 [n]: ticket of each answer"""
    domains: Tensor
    """int64 [n]: equal numbers mark a domain"""
    scores: Tensor
    lengths: Tensor
    """int64 [n]: sampled tokens of each answer"""
    greedy: Tensor | None
    """float64 [n]: score of the group's greedy answer"""
    samples: np.ndarray
    """`ANSWER` [m]: samples of these answers with a sampled token, in (ticket, answer) order"""
    owners: np.ndarray
    """int64 [m]: answer of each sample"""
    steps: np.ndarray
    """`STEP` [k]: agent turns in these samples, by sample and turn"""
    places: np.ndarray
    """int64 [k]: sample of each turn"""
    excluded: tuple[tuple[Key, str], ...]
    """samples of scored answers that were excluded, with the reason"""
    num_excluded: int
    spans: Spans | None = None
    advantages: np.ndarray | None = None
    """float64 [q]: advantages that `spans` refers to; for an estimator of tokens, the rewards"""
    shaped: Tensor | None = None
    """float64 [n]: scores with penalties, normalised and clipped"""
    masked: Mapping[int, str] | None = None
    """reason for each answer, by row, that is left out of the loss"""
    weights: Tensor | None = None
    """float64 [n - masked]: factor on the loss of each remaining answer"""
    right: Tensor | None = None
    """bool [n]: answers of the supervised term"""

    @classmethod
    def of(cls, table: SampleTable, greedy_answer: int | None = None) -> "StepTable":
        """Return the scored answers of the groups that train. greedy_answer: number of the baseline, which never
        trains.
        """
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
    """Return the (ticket, answer) of each row of `ANSWER`."""
    return list(zip(answers["ticket"].tolist(), answers["answer"].tolist(), strict=True))


def _exclude_baselines(samples: np.ndarray, judged: np.ndarray, greedy_answer: int, reasons: np.ndarray) -> None:
    is_baseline = judged & (samples["unit"] == greedy_answer)
    has_baseline = np.isin(samples["ticket"], samples["ticket"][is_baseline])
    reasons[judged & ~has_baseline] = NO_BASELINE
    reasons[is_baseline] = BASELINE


def _baselines(samples: np.ndarray, reasons: np.ndarray, answers: np.ndarray) -> np.ndarray:
    baselines = samples[reasons == BASELINE]
    order = baselines["ticket"].argsort()
    return baselines["score"][order[np.searchsorted(baselines["ticket"], answers["ticket"], sorter=order)]]


def _steps_of(samples: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the `STEP` rows of these samples, sorted by sample and turn, and the index of each one's sample."""
    if not len(steps):
        return steps, np.empty(0, np.int64)
    width = 1 + max(int(rows["answer"].max(initial=0)) for rows in (samples, steps))
    held, wanted = (rows["ticket"] * width + rows["answer"] for rows in (samples, steps))
    chosen = np.flatnonzero(np.isin(wanted, held))
    places = held.searchsorted(wanted[chosen])
    order = np.lexsort((steps["step"][chosen], places))
    return steps[chosen[order]], places[order]


def adjusted(table: StepTable, settings: AlgorithmConfig, max_tokens: int, penalties: Tensor | None = None) -> Tensor:
    """Return scores, scaled and with penalties, float64 [n]; see `shape`."""
    scores = bind(shaping.scale_shift, settings)(table.scores)
    if settings.format_penalty:
        wrong = as_tensor(table.answers["wrong_format"], np.bool_)
        scores = scores + bind(shaping.format_penalty, settings)(wrong)
    if settings.overlong_coef:
        scores = scores + bind(shaping.overlong_penalty, settings)(table.lengths, max_tokens)
    return scores if penalties is None else scores + penalties


def normalised(
    values: Tensor, groups: Tensor, domains: Tensor, settings: AlgorithmConfig, running: Moments
) -> tuple[Tensor, Moments]:
    """Return values normalised and clipped, float64 [n], and the run's moments."""
    if "running" in (settings.norm_mean_type, settings.norm_std_type):
        running = running.merge(Moments.of(values))
    if settings.normalises:
        values = bind(shaping.normalise, settings)(values, groups, running, domains)
    if settings.reward_clip is not None:
        values = shaping.clip(values, settings.reward_clip)
    return values, running


def shape(
    table: StepTable,
    settings: AlgorithmConfig,
    running: Moments,
    max_tokens: int,
    penalties: Tensor | None = None,
    terms: Mapping[str, Tensor] | None = None,
) -> tuple[Scored, Moments]:
    """Return scores with penalties, normalised and clipped, and the moments of the run's scores.

    max_tokens: limit of an answer. penalties: float64 [n], added to the scores. terms: see `Scored`.
    """
    scores = adjusted(table, settings, max_tokens, penalties)
    scores, running = normalised(scores, table.groups, table.domains, settings, running)
    # The greedy score is only scaled: a baseline without the penalties is unbiased too, as any function of the prompt
    # is.
    greedy = None if table.greedy is None else bind(shaping.scale_shift, settings)(table.greedy)
    return Scored(scores, table.groups, table.lengths, greedy, terms=terms), running


def credit(
    table: StepTable,
    settings: AlgorithmConfig,
    running: Moments,
    max_tokens: int,
    penalties: Mapping[Key, float] | None = None,
    terms: Mapping[Key, Sequence[float]] | None = None,
    kl: Tensor | None = None,
) -> tuple[StepTable, Moments]:
    """Return the table with the advantages of answers or turns, and the moments of the run's scores, these included.

    running: the moments before this step. max_tokens: limit of an answer. penalties: added to the scores. terms: in the
    order of `algorithm.reward_weights`. kl: float64 [q], subtracted from the reward of each turn.
    """
    extra = None if penalties is None else as_tensor([penalties[key] for key in keys(table.answers)], np.float64)
    columns = None
    if terms is not None:
        rows = [terms[key] for key in keys(table.answers)]
        columns = {
            name: as_tensor([row[i] for row in rows], np.float64) for i, name in enumerate(settings.reward_weights)
        }
    right = (table.scores >= settings.pass_score) & bool(settings.sft_coef)
    masked, weights = mask(table, settings)
    table = replace(table, masked=masked, weights=weights, right=right)
    # None for a token-level estimator, which starts from the scores (`token_advantages.finish`).
    estimator = answer_advantage(settings)
    # One advantage per answer, the usual case.
    if not (settings.credits_steps or (len(table.steps) and token_advantage(settings))):
        if kl is not None:
            extra = -kl if extra is None else extra - kl
        scored, running = shape(table, settings, running, max_tokens, extra, columns)
        advantages = estimator(scored) if estimator else scored.scores
        return replace(table, advantages=advantages.numpy(), spans=whole_samples(table), shaped=scored.scores), running
    scores = adjusted(table, settings, max_tokens, extra)
    if settings.normalises and not estimator:
        scores, running = normalised(scores, table.groups, table.domains, settings, running)
    scored, spans = by_step(table, scores, settings)
    if kl is not None:
        scored = replace(scored, scores=scored.scores - kl)
    values = estimator(scored) if estimator else scored.scores
    # Of the step estimators, only `step_reinforce` allows norms: its returns are normalised, not the scores.
    if settings.normalises and estimator:
        values, running = normalised(values, scored.groups, table.domains[scored.trajectories], settings, running)
    return replace(table, advantages=values.numpy(), spans=spans, shaped=scores), running


def all_alike(table: SampleTable) -> StepTable:
    """Return the table of a step in which all sampled tokens of an update weigh the same."""
    data = StepTable.of(table)
    ones = torch.ones(len(data.answers), dtype=torch.float64)
    columns = {"advantages": ones.numpy(), "shaped": ones, "weights": ones.clone(), "right": ones < 0}
    return replace(data, spans=whole_samples(data), masked={}, **columns)


def whole_samples(table: StepTable) -> Spans:
    """Return one span per sample."""
    return Spans(table.owners, table.samples["num_answer_tokens"].astype(np.int64), np.ones_like(table.owners))


def by_step(table: StepTable, scores: Tensor, settings: AlgorithmConfig) -> tuple[Scored, Spans]:
    """Return a `Scored` with one row per step, whose rewards add up to their answer's score, and the steps' spans.

    scores: float64 [n], with penalties. The difference between an answer's score and its rewards (a penalty, a
    rewarder's verdict) is added to its last step; if scores are normalised, its last step gets the whole score. An
    answer without an agent's turn is one step. `reward_clip` clips each reward.
    """
    n, steps = len(table.answers), table.steps
    owners = table.owners[table.places]
    single = np.ones(n, np.bool_)
    single[owners] = False
    alone = np.flatnonzero(single)
    trajectories = np.concatenate((owners, alone))
    rewards = np.zeros(len(trajectories))
    if not settings.normalises or settings.credits_steps:
        rewards[: len(steps)] = settings.reward_scale * steps["reward"]
    numbers = np.concatenate((steps["step"].astype(np.int64), np.zeros_like(alone)))
    order = np.lexsort((numbers, trajectories))
    # Of each answer, in order; each has at least one step.
    last = order[np.append(np.diff(trajectories[order]) != 0, True)] if len(order) else order
    totals = np.zeros(n)
    np.add.at(totals, trajectories, rewards)
    missing = scores.numpy() - totals
    rewards[last] += np.where(np.isclose(totals, scores.numpy(), rtol=1e-12, atol=1e-12), 0.0, missing)
    shaped = torch.from_numpy(rewards)
    if settings.reward_clip is not None and not settings.normalises:
        shaped = clip(shaped, settings.reward_clip)
    lengths = np.concatenate((steps["num_tokens"].astype(np.int64), table.lengths.numpy()[alone]))
    scored = Scored(
        scores=shaped,
        groups=table.groups[trajectories],
        lengths=as_tensor(lengths),
        trajectories=as_tensor(trajectories),
        steps=as_tensor(numbers),
        states=_states(table, alone),
    )
    return scored, _spans(table, alone)


def _states(table: StepTable, alone: np.ndarray) -> Tensor:
    pairs = np.stack((table.steps["ticket"], table.steps["state"].view(np.int64)), axis=1)
    states = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
    return as_tensor(np.concatenate((states, len(states) + np.arange(len(alone)))))


def _spans(table: StepTable, alone: np.ndarray) -> Spans:
    """Return one span per agent turn, in the rows of `by_step`, and one per sample of answers `alone` without turns."""
    others = np.flatnonzero(np.isin(table.owners, alone))
    places = np.concatenate((table.places, others))
    turns = np.concatenate((np.arange(len(table.steps)), len(table.steps) + alone.searchsorted(table.owners[others])))
    lengths = np.concatenate((table.steps["num_tokens"], table.samples["num_answer_tokens"][others])).astype(np.int64)
    order = places.argsort(kind="stable")
    counts = np.bincount(places, minlength=len(table.samples))
    sums = np.bincount(places, lengths, len(table.samples))
    assert np.array_equal(sums, table.samples["num_answer_tokens"]), "sampled tokens that no step has"
    return Spans(turns[order], lengths[order], counts)


def mask(table: StepTable, settings: AlgorithmConfig) -> tuple[dict[int, str], Tensor]:
    """Return the masked answers, in order, with their first reason; and weights of the others, float64 of mean 1.

    A masked answer still counts in its group's baseline, unlike an unscored one.
    """
    solved = group_mean(table.scores, table.groups) if settings.difficulty_loss_weight else None
    keep: dict[str, Tensor] = {}
    if settings.max_len_mask:
        keep["truncated"] = shaping.max_len_mask(as_tensor(table.answers["truncated"], np.bool_))
    if settings.difficulty_mask:
        keep["too easy or too hard"] = bind(shaping.difficulty_mask, settings)(table.scores, table.groups)
    if settings.variance_top_p is not None:
        keep["too little variance"] = bind(shaping.variance_mask, settings)(table.scores, table.groups)
    if settings.error_max_len_clip:
        keep["long and wrong"] = bind(shaping.error_max_len_mask, settings)(table.scores, table.lengths)
    kept = torch.ones(len(table.answers), dtype=torch.bool)
    reasons: dict[int, str] = {}
    for reason, passed in keep.items():
        kept &= passed
        for row in (~passed).nonzero().flatten().tolist():
            reasons.setdefault(row, reason)
    weights = torch.ones(len(table.answers), dtype=torch.float64)
    if solved is not None:
        weights = weights * shaping.difficulty_weight(1 - solved)
    if settings.length_loss_weight:
        weights = weights * shaping.length_weight(table.lengths)
    return dict(sorted(reasons.items())), shaping.mean_one(weights[kept])


def verdict_parts(
    groups: Iterable[Group], names: Sequence[str], world: World
) -> dict[tuple[int, int], tuple[float, ...]]:
    """[all] Return the parts `names` of each scored answer of all ranks, by key of its last sample.

    groups: this rank's. UserError on all ranks if a verdict lacks one.
    """
    rows, problems = [], []
    for group in groups:
        for samples in trajectories_of(group.samples):
            verdict = samples[-1].verdict
            if verdict.scored:
                problems += [_missing(name, group.prompt, verdict) for name in names if name not in verdict.parts]
                rows.append([*samples[-1].key, *(verdict.parts.get(name, 0.0) for name in names)])
    with world.phase("coordination"):
        records = world.gather("prepare: terms of verdicts", [problems[:1], rows])  # [all]
    for problem in (problem for theirs, _ in records for problem in theirs):
        raise UserError(problem)
    return {(ticket, answer): tuple(values) for _, theirs in records for ticket, answer, *values in theirs}


def repetition_penalties(
    trajectories: Iterable[Sequence[Sample]], settings: AlgorithmConfig, world: World
) -> dict[Key, float]:
    """[all] Return each answer's penalty for repetition over all its turns, by key of its last sample.

    trajectories: the samples of each of this rank.
    """
    penalty = bind(repetition_penalty, settings)
    mine = []
    for samples in trajectories:
        turns = [turn.token_ids for sample in samples for turn in sample.turns]
        mine.append([*samples[-1].key, penalty(torch.tensor(concat(turns, "i"), dtype=torch.int64))])
    with world.phase("coordination"):
        records = world.gather("prepare: repetition", mine)  # [all]
    return {(ticket, answer): value for record in records for ticket, answer, value in record}


def _missing(name: str, prompt: Prompt, verdict: Verdict) -> str:
    has = ", ".join(sorted(verdict.parts)) or "none"
    return f"algorithm.reward_weights.{name}: a verdict of reward.{prompt.domain} has no such part; it has {has}"
