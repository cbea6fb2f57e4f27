"""GiGPO, StarPO and step returns against loops written from the papers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.algo.advantages import ADVANTAGES
from spmd_rl.algo.inputs import Scored

EPS = 1e-6
Step = tuple[float, int, int]  # reward, state, place
Run = tuple[int, list[Step]]  # group, steps


def scored(runs: list[Run], order: list[int] | None = None) -> Scored:
    """One row per step; states are told apart per group, as `Scored` wants them."""
    rows = [(r, g, t, p, g * 1000 + s) for t, (g, steps) in enumerate(runs) for r, s, p in steps]
    rows = rows if order is None else [rows[i] for i in order]
    scores, groups, trajectories, places, states = map(list, zip(*rows, strict=True))
    return Scored(
        torch.tensor(scores, dtype=torch.float64),
        torch.tensor(groups),
        torch.ones(len(rows), dtype=torch.int64),
        trajectories=torch.tensor(trajectories) * 7 + 3,
        steps=torch.tensor(places),
        states=torch.tensor(states),
    )


def relative(value: float, peers: list[float], norm_std: bool) -> float:
    centred = value - np.mean(peers)
    return centred / ((np.std(peers, ddof=1) if len(peers) > 1 else 0.0) + EPS) if norm_std else centred


def returns(steps: list[Step], gamma: float) -> list[float]:
    return [sum(gamma ** (later[2] - step[2]) * later[0] for later in steps[t:]) for t, step in enumerate(steps)]


def starpo(runs: list[Run], norm_std: bool, over_steps: bool) -> list[float]:
    totals = [sum(s[0] for s in steps) for _, steps in runs]
    out = []
    for total, (group, steps) in zip(totals, runs, strict=True):
        others = [(t, len(s)) for t, (g, s) in zip(totals, runs, strict=True) if g == group]
        peers = [t for t, count in others for _ in range(count if over_steps else 1)]
        out += [relative(total, peers, norm_std)] * len(steps)
    return out


def by_state(runs: list[Run], gamma: float, norm_std: bool) -> list[float]:
    met = [
        (group, step[1], value)
        for group, steps in runs
        for step, value in zip(steps, returns(steps, gamma), strict=True)
    ]
    return [relative(v, [w for h, t, w in met if (h, t) == (g, s)], norm_std) for g, s, v in met]


@st.composite
def trajectories(draw: st.DrawFn) -> list[Run]:
    """Up to five trajectories in two groups; places may be missing, as when a step's verdict was no score."""
    reward = st.integers(-4, 4).map(lambda n: n / 2)
    runs = []
    for _ in range(draw(st.integers(1, 5))):
        places = sorted(draw(st.sets(st.integers(0, 7), min_size=1, max_size=5)))
        runs.append((draw(st.integers(0, 1)), [(draw(reward), draw(st.integers(0, 2)), p) for p in places]))
    return runs


@given(
    runs=trajectories(),
    norm_std=st.booleans(),
    over_steps=st.booleans(),
    gamma=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    seed=st.integers(0, 9),
)
@settings(max_examples=80, deadline=None)
def test_equal_the_papers_in_any_order(
    runs: list[Run], norm_std: bool, over_steps: bool, gamma: float, seed: int
) -> None:
    n = sum(len(steps) for _, steps in runs)
    order = np.random.default_rng(seed).permutation(n).tolist()
    rows = scored(runs, order)
    star, step = starpo(runs, norm_std, over_steps), by_state(runs, gamma, norm_std)
    expected = {
        "starpo": (star, {"norm_std": norm_std, "norm_over_steps": over_steps}),
        "step_reinforce": ([v for _, steps in runs for v in returns(steps, gamma)], {"step_reward_gamma": gamma}),
        "gigpo": (
            [2.0 * a + 0.5 * b for a, b in zip(star, step, strict=True)],
            {
                "norm_std": norm_std,
                "norm_over_steps": over_steps,
                "step_reward_gamma": gamma,
                "episode_reward_weight": 2.0,
                "step_reward_weight": 0.5,
            },
        ),
    }
    for name, (values, keys) in expected.items():
        assert ADVANTAGES[name](rows, **keys).tolist() == pytest.approx([values[i] for i in order], abs=1e-8), name


def test_a_long_trajectory_counts_once_in_its_group() -> None:
    rows = scored([(0, [(1.0, 0, 0)]), (0, [(0.0, 0, p) for p in range(9)])])
    star = ADVANTAGES["starpo"]
    assert star(rows, norm_std=False, norm_over_steps=False).tolist() == pytest.approx([0.5] + [-0.5] * 9)
    assert star(rows, norm_std=False, norm_over_steps=True).tolist() == pytest.approx([0.9] + [-0.1] * 9)


def test_samples_without_trajectories_are_trajectories_of_one_step() -> None:
    rows = replace(scored([(0, [(1.0, 0, 0)]), (0, [(0.0, 0, 0)])]), trajectories=None, steps=None)
    for over_steps in (False, True):
        star = ADVANTAGES["starpo"](rows, norm_std=True, norm_over_steps=over_steps)
        assert star.tolist() == ADVANTAGES["grpo"](rows, norm_std=True).tolist()
    assert ADVANTAGES["step_reinforce"](rows, step_reward_gamma=0.5).tolist() == [1.0, 0.0]


def test_nothing_gives_nothing() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    rows = Scored(empty.double(), empty, empty, None, empty, empty, empty)
    keys = {"norm_std": True, "norm_over_steps": False, "step_reward_gamma": 0.9}
    keys |= {"episode_reward_weight": 1.0, "step_reward_weight": 1.0}
    assert ADVANTAGES["gigpo"](rows, **keys).numel() == 0
