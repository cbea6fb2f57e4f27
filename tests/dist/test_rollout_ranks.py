"""The scheduler over real ranks and a real store: every ticket once, whoever is fast, and ranks that get nothing."""

import pytest

from spmd_rl.algo.moments import Moments
from spmd_rl.config.schema import RlvrConfig
from spmd_rl.distributed import Layout, World
from tests import plans
from tests.dist.harness import run_ranks
from tests.fakes import FakeEngine, FakePrompts, FakeScorer, make_rollouts, tickets_of


def steps(world: World, claim: str, prompts_per_step: int, slow_rank: int) -> list:
    """Three steps; the slow rank's engine needs 40 steps an answer. What each step used, and what is this rank's."""
    cfg = RlvrConfig()
    cfg.rollout.filter.zero_variance, cfg.rollout.max_new_tokens = True, 12
    cfg.rollout.claim, cfg.rollout.prompts_per_step, cfg.rollout.answers_per_prompt = claim, prompts_per_step, 4
    engine = FakeEngine(lambda request: 40 if world.rank == slow_rank else 3)
    scorer = FakeScorer(lambda prompt, answer: int(answer[0]) % 2 == 0)
    rollouts = make_rollouts(cfg, engine, FakePrompts(50), scorer, world)
    seen = []
    for step in (1, 2, 3):
        collected = rollouts.collect(step)
        plan, _ = plans.plan(
            collected, cfg.algorithm, Moments(), num_updates=1, num_shards=world.size, hidden_size=64, max_tokens=12
        )
        (batch,) = plans.redistribute(collected, plan, 1, Layout(world).data, world)
        weight = world.reduce("weights", {"sum": float(batch.weights.double().sum())})["sum"]
        used = [[o.ticket, o.reject_reason, o.answers["score"].tolist()] for o in tickets_of(collected.table)]
        seen.append([used, [g.ticket for g in collected.groups], weight])
    return seen


@pytest.mark.parametrize("claim", ["store", "static"])
@pytest.mark.parametrize(("size", "prompts_per_step"), [(2, 4), (4, 2)])
def test_ranks_share_a_step(claim: str, size: int, prompts_per_step: int) -> None:
    results = run_ranks(size, steps, claim, prompts_per_step, size - 1)
    alone = run_ranks(1, steps, "static", prompts_per_step, -1)[0]
    for step in range(3):
        assert [r[step][0] for r in results] == [alone[step][0]] * size, "outcomes depend on who ran what"
        mine = [t for r in results for t in r[step][1]]
        assert sorted(mine) == alone[step][1], "a group is lost or kept twice"
        assert [r[step][2] for r in results] == pytest.approx([1.0] * size)
    if size > prompts_per_step:
        assert any(not r[0][1] for r in results), "more ranks than groups: some rank holds nothing"
