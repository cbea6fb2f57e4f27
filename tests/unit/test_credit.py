"""Credit for the turns of agents, from samples to the advantage of each token, against plain loops over lists."""

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.algo.moments import Moments
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.distributed import Layout, solo
from spmd_rl.learn import token_advantages
from spmd_rl.types import Group
from tests import plans
from tests.agents import SEGMENTS, Step, collected, group, trajectory

EPS = 1e-6
KEYS = {"step_reward_gamma": 0.5, "episode_reward_weight": 2.0, "step_reward_weight": 0.5}


@dataclass
class Episode:
    """One trajectory, as the reference sees it."""

    ticket: int
    answer: int
    steps: list[Step]
    cuts: tuple[int, ...]
    scored: bool

    @property
    def total(self) -> float:
        return sum(step.reward for step in self.steps)

    @property
    def num_tokens(self) -> int:
        return sum(step.num_tokens for step in self.steps)

    def returns(self, gamma: float) -> list[float]:
        rewards = [step.reward for step in self.steps]
        return [sum(gamma ** (s - t) * rewards[s] for s in range(t, len(rewards))) for t in range(len(rewards))]


@st.composite
def episodes(draw: st.DrawFn) -> list[Episode]:
    """Up to three groups of up to four, singletons too; some without a score, some cut into segments."""
    made = []
    for ticket in range(draw(st.integers(1, 3))):
        for answer in range(draw(st.integers(1, 4))):
            steps = draw(
                st.lists(
                    st.builds(
                        Step,
                        reward=st.integers(-4, 4).map(lambda n: n / 2),
                        state=st.sampled_from([7, 2**64 - 1, -5]),
                        num_tokens=st.integers(1, 4),
                        observation=st.integers(0, 3),
                    ),
                    min_size=1,
                    max_size=5,
                )
            )
            cuts = draw(st.sets(st.integers(1, len(steps) - 1))) if len(steps) > 1 else ()
            made.append(Episode(ticket, answer, steps, tuple(sorted(cuts)), draw(st.integers(0, 4)) > 0))
    return made


def groups_of(made: list[Episode]) -> list[Group]:
    by_ticket = defaultdict(list)
    for e in made:
        status = "ok" if e.scored else "error"
        by_ticket[e.ticket].append(trajectory(e.ticket, e.answer, e.steps, e.cuts, status))
    return [group(ticket, some) for ticket, some in by_ticket.items()]


def finished(groups: list[Group], **keys) -> dict[tuple[int, int], list[float]]:
    """The advantage of each token of each sample that trains, by key."""
    algorithm = AlgorithmConfig(**keys)
    c = collected(groups)
    sizes = {"num_updates": 1, "num_shards": 1, "hidden_size": 64, "max_tokens": 1024}
    plan, _ = plans.plan(c, algorithm, Moments(), **sizes)
    with solo() as world:
        data = Layout(world).data
        batches = plans.redistribute(c, plan, 1, data, world)
        if algorithm.uses_critic:
            batches[0].values = values_of(batches[0])
        token_advantages.finish(batches, plan, algorithm, 0.0, data, seed=0)
        logged = plan.with_advantages(batches, data)
    (batch,) = batches
    parts = zip(
        batch.keys.tolist(),
        batch.advantages.split(batch.starts.diff().tolist()),
        batch.loss_mask.split(batch.starts.diff().tolist()),
        strict=True,
    )
    found = {tuple(key): values[mask].tolist() for key, values, mask in parts}
    runs = np.split(logged.advantages * logged.span_lengths, logged.num_spans.cumsum())[:-1]
    rows = zip(logged.keys.tolist(), runs, logged.num_sampled, strict=True)
    means = {tuple(key): sum(own) / count for key, own, count in rows}
    assert means == pytest.approx({key: fmean(values) for key, values in found.items()}, abs=1e-6)
    return found


def values_of(batch) -> torch.Tensor:
    """A critic's word, made up from the token."""
    return (batch.token_ids / 256).float() * batch.loss_mask


def relative(value: float, peers: list[float], norm_std: bool) -> float:
    centred = value - fmean(peers)
    return centred / ((stdev(peers) if len(peers) > 1 else 0.0) + EPS) if norm_std else centred


def trajectory_wise(made: list[Episode], norm_std: bool) -> list[list[float]]:
    """GRPO over returns: the same for all turns."""
    kept = [e for e in made if e.scored]
    totals = [[o.total for o in kept if o.ticket == e.ticket] for e in kept]
    return [[relative(e.total, peers, norm_std)] * len(e.steps) for e, peers in zip(kept, totals, strict=True)]


def over_steps(made: list[Episode], norm_std: bool) -> list[list[float]]:
    """As verl-agent and ROLL have it: a trajectory counts as often as it has steps."""
    kept = [e for e in made if e.scored]
    totals = [[o.total for o in kept if o.ticket == e.ticket for _ in o.steps] for e in kept]
    return [[relative(e.total, peers, norm_std)] * len(e.steps) for e, peers in zip(kept, totals, strict=True)]


def discounted(made: list[Episode]) -> list[list[float]]:
    return [e.returns(KEYS["step_reward_gamma"]) for e in made if e.scored]


def among_states(made: list[Episode], norm_std: bool) -> list[list[float]]:
    kept = [e for e in made if e.scored]
    met = defaultdict(list)
    for e in kept:
        for step, value in zip(e.steps, e.returns(KEYS["step_reward_gamma"]), strict=True):
            met[e.ticket, step.state % 2**64].append(value)
    return [
        [
            relative(value, met[e.ticket, step.state % 2**64], norm_std)
            for step, value in zip(e.steps, e.returns(KEYS["step_reward_gamma"]), strict=True)
        ]
        for e in kept
    ]


def gigpo(made: list[Episode], norm_std: bool) -> list[list[float]]:
    whole, single = trajectory_wise(made, norm_std), among_states(made, norm_std)
    weights = KEYS["episode_reward_weight"], KEYS["step_reward_weight"]
    return [
        [weights[0] * a + weights[1] * b for a, b in zip(one, other, strict=True)]
        for one, other in zip(whole, single, strict=True)
    ]


def per_token(made: list[Episode], by_turn: list[list[float]]) -> dict[tuple[int, int], list[float]]:
    """Each turn's number at each of its tokens, by the key of its segment."""
    wanted = defaultdict(list)
    for e, values in zip([e for e in made if e.scored], by_turn, strict=True):
        for number, (step, value) in enumerate(zip(e.steps, values, strict=True)):
            segment = sum(number >= cut for cut in e.cuts)
            wanted[e.ticket, e.answer + segment * SEGMENTS] += [value] * step.num_tokens
    return dict(wanted)


def assert_close(got: dict, wanted: dict) -> None:
    assert got.keys() == wanted.keys()
    for key, values in wanted.items():
        assert got[key] == pytest.approx(values, abs=2e-5, rel=2e-6), key


@given(made=episodes(), norm_std=st.booleans())
@settings(max_examples=25, deadline=None)
def test_estimators_reach_the_tokens_that_they_credit(made: list[Episode], norm_std: bool) -> None:
    """Singletons, answers without a score, segments, states that occur once, turns of any length."""
    groups = groups_of(made)
    std = {"norm_std": norm_std}
    often = {"advantage": "starpo", "norm_over_steps": True, **std}
    assert_close(finished(groups, **often), per_token(made, over_steps(made, norm_std)))
    assert_close(finished(groups, advantage="grpo", **std), per_token(made, trajectory_wise(made, norm_std)))
    assert_close(finished(groups, advantage="starpo", **std), per_token(made, trajectory_wise(made, norm_std)))
    assert_close(finished(groups, advantage="gigpo", **std, **KEYS), per_token(made, gigpo(made, norm_std)))
    steps = {"advantage": "step_reinforce", "step_reward_gamma": 0.5}
    assert_close(finished(groups, **steps), per_token(made, discounted(made)))


def sampled(e: Episode, groups: list[Group]) -> list[tuple[tuple[int, int], int, int]]:
    """(key of the segment, number of the turn, token) of each sampled token of a trajectory, in order."""
    found, number = [], 0
    for sample in [s for g in groups for s in g.samples if g.ticket == e.ticket and s.unit == e.answer]:
        for turn in sample.turns:
            found += [(sample.key, number, token) for token in turn.token_ids]
            number += 1
    return found


def token_loop(e: Episode, groups: list[Group], gamma: float, lam: float, critic: bool) -> list[float]:
    """GAE over the sampled tokens of all turns and segments, as if nothing lay between them; without a critic, returns.

    The reward of a turn stands at its last sampled token.
    """
    tokens = sampled(e, groups)
    advantages = [0.0] * len(tokens)
    following = ahead = 0.0
    for i in range(len(tokens) - 1, -1, -1):
        _, number, token = tokens[i]
        ends = i + 1 == len(tokens) or tokens[i + 1][1] != number
        value = token / 256 if critic else 0.0
        error = (e.steps[number].reward if ends else 0.0) + gamma * ahead - value
        following = error + gamma * lam * following
        advantages[i], ahead = following, value
    return advantages


def turn_loop(e: Episode, groups: list[Group], gamma: float, lam: float) -> list[float]:
    """GAE over turns with the critic's value at the first token of each, the same at all tokens of a turn."""
    tokens = sampled(e, groups)
    firsts = [next(token for _, n, token in tokens if n == number) / 256 for number in range(len(e.steps))]
    by_turn, following = {}, 0.0
    for number in range(len(e.steps) - 1, -1, -1):
        ahead = firsts[number + 1] if number + 1 < len(e.steps) else 0.0
        error = e.steps[number].reward + gamma * ahead - firsts[number]
        following = by_turn[number] = error + gamma * lam * following
    return [by_turn[number] for _, number, _ in tokens]


@given(made=episodes())
@settings(max_examples=25, deadline=None)
def test_token_and_turn_estimators_run_over_turns_and_segments(made: list[Episode]) -> None:
    groups = groups_of(made)
    kept = [e for e in made if e.scored]
    loops = {
        "gae": ({"gamma": 0.8, "lam": 0.5}, lambda e: token_loop(e, groups, 0.8, 0.5, critic=True)),
        "reinforce_returns": ({"gamma": 0.8}, lambda e: token_loop(e, groups, 0.8, 1.0, critic=False)),
        "turn_gae": ({"step_reward_gamma": 0.8, "lam": 0.5}, lambda e: turn_loop(e, groups, 0.8, 0.5)),
    }
    for name, (keys, loop) in loops.items():
        wanted = defaultdict(list)
        for e in kept:
            for (key, _, _), value in zip(sampled(e, groups), loop(e), strict=True):
                wanted[key].append(value)
        assert_close(finished(groups, advantage=name, **keys), dict(wanted))
