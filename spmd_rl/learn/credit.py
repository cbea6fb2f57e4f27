"""Who gets which advantage: whole answers, or each turn of an agent; and which sampled tokens it reaches.

An estimator of answers gives one number to an answer, which reaches the sampled tokens of all its turns and segments.
One of steps gives a number to each turn of an agent, which reaches the tokens of that turn alone; for one of tokens,
that number is the reward at the turn's last token. So a trajectory is trained once, not once for each of its turns.
And which answers are masked out of the loss, and how much each of the others weighs in it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spmd_rl.algo import masks
from spmd_rl.algo.groups import group_mean
from spmd_rl.algo.inputs import Scored
from spmd_rl.algo.moments import Moments
from spmd_rl.algo.shaping import clip
from spmd_rl.batch import as_tensor
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.learn.binding import bind
from spmd_rl.learn.own import answer_advantage, token_advantage
from spmd_rl.learn.scores import Metadata, adjusted, normalised, shape


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of sampled tokens that are credited as one, of m samples, end to end: r of them."""

    turns: np.ndarray
    """int64 [r]: equal numbers get one advantage: one for each answer, or for each turn of an agent"""
    lengths: np.ndarray
    """int64 [r]: sampled tokens"""
    counts: np.ndarray
    """int64 [m]: runs of each sample"""


@dataclass(frozen=True, slots=True)
class Credit:
    """The advantages of a step."""

    advantages: np.ndarray
    """float64 [q]: of each turn that `runs` names; before a token-level estimator, its reward"""
    runs: Runs
    scores: Tensor
    """float64 [n]: the shaped scores of answers"""
    running: Moments
    """the moments of the run's scores, these included"""


def credit(
    data: Metadata, settings: AlgorithmConfig, running: Moments, max_tokens: int, penalties: Tensor | None = None
) -> Credit:
    """Advantages of the answers, or of their turns where the estimator tells these apart. Parameters as in `shape`."""
    estimator = answer_advantage(settings)  # a token-level estimator starts from the scores
    if not (settings.credits_steps or (len(data.steps) and token_advantage(settings))):
        scored, running = shape(data, settings, running, max_tokens, penalties)
        advantages = estimator(scored) if estimator else scored.scores
        return Credit(advantages.numpy(), whole_samples(data), scored.scores, running)
    scores = adjusted(data, settings, max_tokens, penalties)
    if settings.normalises and not estimator:
        scores, running = normalised(scores, data.groups, data.domains, settings, running)
    scored, runs = by_step(data, scores, settings)
    values = estimator(scored) if estimator else scored.scores
    if settings.normalises and estimator:  # returns: the scores of steps
        values, running = normalised(values, scored.groups, data.domains[scored.trajectories], settings, running)
    return Credit(values.numpy(), runs, scores, running)


def whole_samples(data: Metadata) -> Runs:
    """One run for each sample: an answer has one advantage."""
    return Runs(data.owners, data.samples["num_answer_tokens"].astype(np.int64), np.ones_like(data.owners))


def by_step(data: Metadata, scores: Tensor, settings: AlgorithmConfig) -> tuple[Scored, Runs]:
    """The steps of the answers with their rewards, such that those of an answer add up to its score; and their tokens.

    scores: float64 [n], with penalties. What the rewards of an answer's steps do not add up to, a penalty or the word
    of a rewarder, counts with its last step; all of it does if scores are normalised, which are those of whole answers.
    An answer without any turn of an agent is one step.
    """
    n, steps = len(data.answers), data.steps
    owners = data.owners[data.places]
    single = np.ones(n, np.bool_)
    single[owners] = False
    alone = np.flatnonzero(single)
    trajectories = np.concatenate((owners, alone))
    rewards = np.zeros(len(trajectories))
    if not settings.normalises or settings.credits_steps:
        rewards[: len(steps)] = settings.reward_scale * steps["reward"]
    numbers = np.concatenate((steps["step"].astype(np.int64), np.zeros_like(alone)))
    order = np.lexsort((numbers, trajectories))
    last = order[np.append(np.diff(trajectories[order]) != 0, True)] if len(order) else order  # by trajectory
    totals = np.zeros(n)
    np.add.at(totals, trajectories, rewards)
    missing = scores.numpy() - totals
    rewards[last] += np.where(np.isclose(totals, scores.numpy(), rtol=1e-12, atol=1e-12), 0.0, missing)
    shaped = torch.from_numpy(rewards)
    if settings.reward_clip is not None and not settings.normalises:
        shaped = clip(shaped, settings.reward_clip)
    lengths = np.concatenate((steps["num_tokens"].astype(np.int64), data.lengths.numpy()[alone]))
    scored = Scored(
        scores=shaped,
        groups=data.groups[trajectories],
        lengths=as_tensor(lengths),
        trajectories=as_tensor(trajectories),
        steps=as_tensor(numbers),
        states=_states(data, alone),
    )
    return scored, _runs(data, alone)


def _states(data: Metadata, alone: np.ndarray) -> Tensor:
    """Equal numbers for equal (ticket, state); an answer without turns of an agent has a state of its own."""
    pairs = np.stack((data.steps["ticket"], data.steps["state"].view(np.int64)), axis=1)
    states = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
    return as_tensor(np.concatenate((states, len(states) + np.arange(len(alone)))))


def _runs(data: Metadata, alone: np.ndarray) -> Runs:
    """One run for each turn of an agent, and one for each sample of the answers that are `alone`, without such turns.

    Turns are numbered as the rows of `by_step`.
    """
    others = np.flatnonzero(np.isin(data.owners, alone))
    places = np.concatenate((data.places, others))
    turns = np.concatenate((np.arange(len(data.steps)), len(data.steps) + alone.searchsorted(data.owners[others])))
    lengths = np.concatenate((data.steps["num_tokens"], data.samples["num_answer_tokens"][others])).astype(np.int64)
    order = places.argsort(kind="stable")
    counts = np.bincount(places, minlength=len(data.samples))
    sums = np.bincount(places, lengths, len(data.samples))
    assert np.array_equal(sums, data.samples["num_answer_tokens"]), "sampled tokens that no step has"
    return Runs(turns[order], lengths[order], counts)


def mask(data: Metadata, settings: AlgorithmConfig) -> tuple[dict[int, str], Tensor]:
    """The answers that are masked out of the loss, in order, each with the first reason; and weights of the others.

    A masked answer keeps its place in its group's baseline, unlike one without a score. A weight, float64 of mean 1,
    is a factor of the answer's loss beside its share of the mean.
    """
    solved = group_mean(data.scores, data.groups) if settings.difficulty_loss_weight else None
    keep: dict[str, Tensor] = {}
    if settings.max_len_mask:
        keep["truncated"] = masks.max_len_mask(as_tensor(data.answers["truncated"], np.bool_))
    if settings.difficulty_mask:
        keep["too easy or too hard"] = bind(masks.difficulty_mask, settings)(data.scores, data.groups)
    if settings.variance_top_p is not None:
        keep["too little variance"] = bind(masks.variance_mask, settings)(data.scores, data.groups)
    if settings.error_max_len_clip:
        keep["long and wrong"] = bind(masks.error_max_len_mask, settings)(data.scores, data.lengths)
    kept = torch.ones(len(data.answers), dtype=torch.bool)
    reasons: dict[int, str] = {}
    for reason, passed in keep.items():
        kept &= passed
        for row in (~passed).nonzero().flatten().tolist():
            reasons.setdefault(row, reason)
    weights = torch.ones(len(data.answers), dtype=torch.float64)
    if solved is not None:
        weights = weights * masks.difficulty_weight(1 - solved)
    if settings.length_loss_weight:
        weights = weights * masks.length_weight(data.lengths)
    return dict(sorted(reasons.items())), masks.mean_one(weights[kept])
