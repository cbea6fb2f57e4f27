"""What ranks report of agents' turns, and how they count trajectories that have several segments."""

from array import array
from random import Random

import msgspec
import pytest
from msgspec.structs import replace

from spmd_rl.config.schema import FilterConfig
from spmd_rl.rollout.collected import Collected
from spmd_rl.rollout.filters import reject_reason
from spmd_rl.rollout.table import SliceReport, answer_row, answer_rows, build_table, step_rows
from spmd_rl.types import Group, Sample
from tests.agents import SEGMENTS, Step, group, trajectory


def rewards(samples: list[Sample]) -> list[tuple[int, int, float, int]]:
    """(answer, number of the turn, reward, tokens) of each row."""
    return [(answer, number, reward, tokens) for _, answer, _, number, reward, _, tokens in step_rows(samples)]


def test_a_row_for_each_turn_of_a_trajectory_counted_over_its_segments() -> None:
    steps = [Step(0.5, 7, 3), Step(-1.0, -1, 2), Step(0.0, 2**64 - 1, 4)]
    rows = step_rows(trajectory(11, 3, steps, cuts=(1,)))
    assert rows == [
        (11, 3, 3, 0, 0.5, 7, 3),
        (11, 3 + SEGMENTS, 3, 1, -1.0, 2**64 - 1, 2),
        (11, 3 + SEGMENTS, 3, 2, 0.0, 2**64 - 1, 4),
    ], "a state is 64 bits, whether they are read with a sign or without"


def test_without_an_agent_nothing_is_reported_of_turns() -> None:
    samples = trajectory(1, 0, [Step(has_step=False), Step(has_step=False)])
    assert step_rows(samples) == []
    assert SliceReport.of(group(1, [samples]), 0, 0, 0).steps == []


def test_a_turn_to_which_no_environment_replied_has_no_reward_and_a_state_of_its_own() -> None:
    several = [trajectory(1, a, [Step(1.0, 7), Step(has_step=False)])[0] for a in range(3)]
    rows = step_rows(several)
    assert [row[4] for row in rows] == [1.0, 0.0] * 3
    states = [row[5] for row in rows if row[3] == 1]
    assert len(set(states)) == 3 and 7 not in states and states == [row[5] for row in step_rows(several) if row[3]]


def test_the_reward_of_an_empty_turn_is_the_previous_ones_or_else_the_next_ones() -> None:
    """It has no token on which it could stand."""
    empty = Step(10.0, num_tokens=0)
    assert rewards(trajectory(1, 0, [Step(1.0), empty, Step(2.0)])) == [(0, 0, 11.0, 2), (0, 2, 2.0, 2)]
    assert rewards(trajectory(1, 0, [empty, Step(1.0)])) == [(0, 1, 11.0, 2)]
    assert rewards(trajectory(1, 0, [Step(1.0), empty], cuts=(1,))) == [(0, 0, 11.0, 2)]
    assert rewards(trajectory(1, 0, [empty])) == []


def random_groups(seed: int, cut: bool) -> list[Group]:
    """The same trajectories, whole or cut; of all kinds of verdicts, baselines and token limits."""
    draw, groups = Random(seed), []
    for ticket in range(4):
        some = []
        for answer in range(5):
            steps = [Step(draw.choice([-1.0, 0.0, 0.5]), draw.randrange(3), draw.randrange(1, 4)) for _ in range(4)]
            cuts = sorted(draw.sample((1, 2, 3), draw.randrange(4)))
            status = draw.choice(["ok", "ok", "ok", "wrong_format", "error"])
            samples = trajectory(ticket, answer, steps, cuts if cut else (), status)
            if draw.random() < 0.3:
                turns = samples[-1].turns
                samples[-1] = replace(samples[-1], turns=(*turns[:-1], replace(turns[-1], finish_reason="length")))
            if draw.random() < 0.3:
                first = samples[0].turns[0]
                old = replace(first, versions=array("i", [-1] * len(first.versions)))
                samples[0] = replace(samples[0], turns=(old, *samples[0].turns[1:]))
            some.append([replace(sample, greedy=answer == 4) for sample in samples])
        draw.shuffle(some)
        groups.append(group(ticket, some, "ab"[ticket % 2]))
    return groups


def gathered(groups: list[Group]) -> Collected:
    sent = msgspec.msgpack.encode([SliceReport.of(g, 0, 5, 0) for g in groups])
    reports = msgspec.msgpack.decode(sent, type=list[SliceReport])
    return Collected(1, (), (), build_table(reports, [g.ticket for g in groups], 1), 0.0, 0, 0)


@pytest.mark.parametrize("seed", range(6))
def test_every_statistic_counts_trajectories_and_never_segments(seed: int) -> None:
    whole, cut = random_groups(seed, False), random_groups(seed, True)
    assert any(not s.last for g in cut for s in g.samples)
    metrics = [gathered(groups).metrics() for groups in (whole, cut)]
    tokens = [m.pop("tokens") for m in metrics]
    assert metrics[0] == metrics[1] and tokens[0] < tokens[1], "segments repeat their history"
    tables = [gathered(groups).table for groups in (whole, cut)]
    for name in ("num_answers", "num_unscored", "error_share", "zero_variance_share", "details"):
        assert getattr(tables[0], name) == getattr(tables[1], name), name
    assert [len(rows) for rows in tables[0].by_domain().values()] == [10, 10]
    assert [len(rows) for rows in tables[1].by_domain().values()] == [10, 10]
    for a, b in zip(whole, cut, strict=True):
        assert SliceReport.of(b, 0, 0, 0).num_answers == 5
        rows = [answer_rows(answer_row(s, 0, 0) for s in g.samples) for g in (a, b)]
        for filters in (
            {"zero_variance": True},
            {"min_mean_score": 0.1},
            {"max_mean_score": -0.1},
            {"max_truncated": 0.3},
            {"max_mean_tokens": 8.0},
        ):
            found = [reject_reason(some, 3, FilterConfig(**({"zero_variance": False} | filters))) for some in rows]
            assert found[0] == found[1], filters


def test_steps_survive_the_way() -> None:
    groups = random_groups(0, True)
    steps = gathered(groups).table.steps
    wanted = [row for g in groups for row in step_rows(g.samples)]
    assert steps.tolist() == wanted and len(steps) == 4 * 5 * 4


def test_groups_without_variance_are_counted() -> None:
    flat = group(1, [trajectory(1, a, [Step(0.5), Step(0.5)]) for a in range(3)])
    split = group(2, [trajectory(2, a, [Step(0.5), Step(a)]) for a in range(3)])
    alone = group(3, [trajectory(3, 0, [Step(1.0)]), trajectory(3, 1, [Step(2.0)], status="error")])
    assert gathered([flat, split, alone]).metrics()["rollout/zero_variance"] == 0.5
    assert gathered([alone]).metrics()["rollout/zero_variance"] == 0.0
