"""The scheduler on one rank: what a step accepts, what it aborts, and what it must not depend on."""

from collections.abc import Iterator

import pytest

from spmd_rl.config import RlvrConfig
from spmd_rl.dist import World, solo
from spmd_rl.errors import RunFailed, UserError
from spmd_rl.rollout import Context, Rollouts, Sampling
from spmd_rl.types import Sample, Verdict
from tests.fakes import FakeEngine, FakePrompts, FakeScorer, FakeTokenizer


@pytest.fixture
def world() -> Iterator[World]:
    with solo() as world:
        yield world


def settings(**rollout) -> RlvrConfig:
    cfg = RlvrConfig()
    for key, value in {"prompts_per_step": 3, "answers_per_prompt": 4, **rollout}.items():
        setattr(cfg.rollout, key, value)
    return cfg


def even(prompt, answer: str) -> bool:
    return int(answer[0]) % 2 == 0


def tickets(collected) -> list[int]:
    return [o.ticket for o in collected.outcomes]


@pytest.mark.parametrize("claim", ["store", "static"])
def test_steps_use_every_ticket_once_and_in_order(world: World, claim: str) -> None:
    rollouts = Rollouts(settings(claim=claim), FakeEngine(), FakePrompts(5), FakeScorer(even), FakeTokenizer(), world)
    used = []
    for step in (1, 2, 3):
        collected = rollouts.collect(step)
        assert len(collected.groups) == 3
        assert all(len({s.verdict.score for s in g.samples}) == 2 for g in collected.groups), "zero variance"
        used += tickets(collected)
    assert used == list(range(len(used)))
    assert rollouts.state() == {"next_ticket": len(used), "prompts": "fake"}


def test_what_is_accepted_depends_on_outcomes_alone(world: World) -> None:
    def collect(claim: str, slow: set[int], extra: int):
        engine = FakeEngine(lambda r: 20 if r.order[0] in slow else 2)
        scorer = FakeScorer(even, lambda p: 0.02 if int(p.ground_truth) in slow else 0.0)
        cfg = settings(claim=claim, extra_prompts=extra)
        rollouts = Rollouts(cfg, engine, FakePrompts(9), scorer, FakeTokenizer(), world)
        collected = rollouts.collect(100 * extra + len(slow) + 10 * (claim == "store"))
        return [(g.ticket, [s.verdict.score for s in g.samples]) for g in collected.groups], tickets(collected)

    expected = collect("static", set(), 0)
    assert collect("store", {0, 2}, 0) == expected
    assert collect("store", {1}, 3) == expected
    assert collect("static", {0, 1, 2}, 2) == expected


def test_surplus_is_aborted_and_starts_again_in_the_next_step(world: World) -> None:
    engine = FakeEngine(lambda r: 50 if r.order[0] >= 3 else 2)
    cfg = settings(extra_prompts=3, filter=type(settings().rollout.filter)(zero_variance=False))
    rollouts = Rollouts(cfg, engine, FakePrompts(20), FakeScorer(even), FakeTokenizer(), world)
    first = rollouts.collect(1)
    assert tickets(first) == [0, 1, 2]
    assert first.num_aborted == 12 and len(engine.aborted) == 12
    assert engine.num_unfinished == 0
    engine.aborted.clear()
    assert tickets(rollouts.collect(2)) == [3, 4, 5]


def test_a_group_beyond_the_end_is_surplus_even_if_it_would_not_train(world: World) -> None:
    engine = FakeEngine(lambda r: 2 if r.order[0] == 3 else 9)
    cfg = settings(extra_prompts=1)
    cfg.rollout.filter.zero_variance, cfg.rollout.filter.min_mean_score = False, 0.5
    scorer = FakeScorer(lambda p, a: p.ground_truth != "3")
    rollouts = Rollouts(cfg, engine, FakePrompts(20), scorer, FakeTokenizer(), world)
    collected = rollouts.collect(1)
    assert tickets(collected) == [0, 1, 2]
    assert [(g.ticket, reason) for g, reason in collected.dropped] == [(3, "surplus")]
    assert 3 in tickets(rollouts.collect(2))


def test_a_step_ends_at_its_ticket_limit_with_fewer_groups(world: World) -> None:
    rollouts = Rollouts(
        settings(max_tickets_per_step=5),
        FakeEngine(),
        FakePrompts(9),
        FakeScorer(lambda p, a: p.ground_truth == "1" and even(p, a)),
        FakeTokenizer(),
        world,
    )
    collected = rollouts.collect(1)
    assert tickets(collected) == [0, 1, 2, 3, 4]
    assert [g.ticket for g in collected.groups] == [1]
    assert {reason for _, reason in collected.dropped} == {"zero variance"}
    assert collected.metrics()["rollout/filtered"] == 4


def test_requests_are_admitted_in_ticket_answer_order(world: World) -> None:
    engine = FakeEngine()
    Rollouts(settings(), engine, FakePrompts(9), FakeScorer(even), FakeTokenizer(), world).collect(1)
    assert engine.added[:12] == [(t, a, 0) for t in range(3) for a in range(4)]


def test_slots_bound_what_runs(world: World) -> None:
    engine = FakeEngine(max_running=8)
    cfg = settings(prompts_per_step=6)
    Rollouts(cfg, engine, FakePrompts(9), FakeScorer(even), FakeTokenizer(), world).collect(1)
    assert engine.most_running <= 8


def test_a_verdict_that_is_no_score_leaves_the_baseline_and_spends_the_budget(world: World) -> None:
    class Failing(FakeScorer):
        async def score(self, prompt, answer, info) -> Verdict:
            if prompt.ground_truth == "0" and even(prompt, answer):
                return Verdict("timeout", detail="10 s")
            return await super().score(prompt, answer, info)

    cfg = settings()
    cfg.reward.error_budget = 0.9
    make = lambda: Rollouts(cfg, FakeEngine(), FakePrompts(9), Failing(even), FakeTokenizer(), world)  # noqa: E731
    collected = make().collect(1)
    assert 0 < collected.error_share < 0.5
    assert 0 not in [g.ticket for g in collected.groups], "only failed scores are left: no variance"
    cfg.reward.error_budget = 0.01
    with pytest.raises(RunFailed, match=r"reward.error_budget=0.01: .* the first: timeout: 10 s"):
        make().collect(2)


def test_a_rollout_of_several_turns_needs_no_change_here(world: World) -> None:
    async def three_turns(ctx: Context) -> Sample:
        for _ in range(3):
            turn = await ctx.generate(ctx.render(ctx.prompt.messages))
        return ctx.sample(await ctx.score(ctx.text(turn)))

    rollouts = Rollouts(settings(), FakeEngine(), FakePrompts(9), FakeScorer(even), FakeTokenizer(), world, three_turns)
    sample = rollouts.collect(1).groups[0].samples[0]
    assert len(sample.turns) == 3 and sample.num_answer_tokens == 9
    assert sample.num_tokens == 9 + 3 * len("problem 0")


def test_prompts_that_are_too_long_are_named(world: World) -> None:
    rollouts = Rollouts(
        settings(max_prompt_tokens=5), FakeEngine(), FakePrompts(2), FakeScorer(even), FakeTokenizer(), world
    )
    with pytest.raises(UserError, match=r"rollout.max_prompt_tokens=5: prompt 0000\w+ has 9 tokens"):
        rollouts.check()


def test_answers_to_held_out_prompts(world: World) -> None:
    rollouts = Rollouts(settings(), FakeEngine(), FakePrompts(3), FakeScorer(even), FakeTokenizer(), world)
    groups = rollouts.answer(rollouts.prompts.eval, [Sampling(0, "eval", 1.0, 8)] * 2 + [Sampling(0, "eval", 0.0, 8)])
    assert [len(g.samples) for g in groups] == [3, 3]
