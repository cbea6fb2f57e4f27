"""The scheduler on one rank: what a step accepts, what it aborts, and what it must not depend on."""

import asyncio
import itertools
import json
import re
from array import array
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from spmd_rl.base.errors import RunFailed, UserError
from spmd_rl.config import RlvrConfig
from spmd_rl.distributed import World, solo
from spmd_rl.rollout import BudgetSpent, Context, Sampling, engine_loop
from spmd_rl.types import Completion, Request, Sample, Verdict
from tests.fakes import FakeEngine, FakePrompts, FakeScorer, make_rollouts, tickets_of


@pytest.fixture
def world() -> Iterator[World]:
    with solo() as world:
        yield world


def settings(**rollout) -> RlvrConfig:
    cfg = RlvrConfig()
    cfg.rollout.filter.zero_variance = True
    for key, value in {"prompts_per_step": 3, "answers_per_prompt": 4, "max_new_tokens": 12, **rollout}.items():
        setattr(cfg.rollout, key, value)
    return cfg


def even(prompt, answer: str) -> bool:
    return int(answer[0]) % 2 == 0


def tickets(collected) -> list[int]:
    return [o.ticket for o in tickets_of(collected.table)]


@pytest.mark.parametrize("claim", ["store", "static"])
def test_steps_use_every_ticket_once_and_in_order(world: World, claim: str) -> None:
    rollouts = make_rollouts(settings(claim=claim), FakeEngine(), FakePrompts(5), FakeScorer(even), world)
    used = []
    for step in (1, 2, 3):
        collected = rollouts.collect(step)
        assert len(collected.groups) == 3
        assert all(len({s.verdict.score for s in g.samples}) == 2 for g in collected.groups), "zero variance"
        used += tickets(collected)
    assert used == list(range(len(used)))
    assert rollouts.state() == {"next_ticket": len(used), "skipped": [], "prompts": "fake"}


def test_what_is_accepted_depends_on_outcomes_alone(world: World) -> None:
    def collect(claim: str, slow: set[int], extra: int):
        engine = FakeEngine(lambda r: 20 if r.order[0] in slow else 2)
        scorer = FakeScorer(even, lambda p: 0.02 if int(p.ground_truth) in slow else 0.0)
        cfg = settings(claim=claim, over_sample=extra)
        rollouts = make_rollouts(cfg, engine, FakePrompts(9), scorer, world)
        collected = rollouts.collect(100 * extra + len(slow) + 10 * (claim == "store"))
        return [(g.ticket, [s.verdict.score for s in g.samples]) for g in collected.groups], tickets(collected)

    expected = collect("static", set(), 0)
    assert collect("store", {0, 2}, 0) == expected
    assert collect("store", {1}, 3) == expected
    assert collect("static", {0, 1, 2}, 2) == expected


def test_surplus_is_aborted_and_starts_again_in_the_next_step(world: World) -> None:
    engine = FakeEngine(lambda r: 50 if r.order[0] >= 3 else 2)
    cfg = settings(over_sample=3, filter=type(settings().rollout.filter)(zero_variance=False))
    rollouts = make_rollouts(cfg, engine, FakePrompts(20), FakeScorer(even), world)
    first = rollouts.collect(1)
    assert tickets(first) == [0, 1, 2]
    assert first.num_aborted == 12 and len(engine.aborted) == 12
    assert engine.num_unfinished == 0
    engine.aborted.clear()
    assert tickets(rollouts.collect(2)) == [3, 4, 5]


def test_a_group_beyond_the_end_is_surplus_even_if_it_would_not_train(world: World) -> None:
    engine = FakeEngine(lambda r: 2 if r.order[0] == 3 else 9)
    cfg = settings(over_sample=1)
    cfg.rollout.filter.zero_variance, cfg.rollout.filter.min_mean_score = False, 0.5
    scorer = FakeScorer(lambda p, a: p.ground_truth != "3")
    rollouts = make_rollouts(cfg, engine, FakePrompts(20), scorer, world)
    collected = rollouts.collect(1)
    assert tickets(collected) == [0, 1, 2]
    assert [(g.ticket, reason) for g, reason in collected.dropped] == [(3, "surplus")]
    assert 3 in tickets(rollouts.collect(2))


def test_a_step_ends_at_its_ticket_limit_with_fewer_groups(world: World) -> None:
    rollouts = make_rollouts(
        settings(max_prompts_per_step=5),
        FakeEngine(),
        FakePrompts(9),
        FakeScorer(lambda p, a: p.ground_truth == "1" and even(p, a)),
        world,
    )
    collected = rollouts.collect(1)
    assert tickets(collected) == [0, 1, 2, 3, 4]
    assert [g.ticket for g in collected.groups] == [1]
    assert {reason for _, reason in collected.dropped} == {"zero variance"}
    assert collected.metrics()["rollout/filtered"] == 4


def test_requests_are_admitted_in_ticket_answer_order(world: World) -> None:
    engine = FakeEngine()
    make_rollouts(settings(), engine, FakePrompts(9), FakeScorer(even), world).collect(1)
    assert engine.added[:12] == [(t, a, 0) for t in range(3) for a in range(4)]


@pytest.mark.parametrize("claim", ["store", "static"])
def test_a_prompt_of_a_higher_priority_begins_first_and_the_step_stays_the_same(world: World, claim: str) -> None:
    def steps(priorities: dict[int, float]):
        prompts, engine = FakePrompts(9), FakeEngine(max_running=8)
        prompts.train = tuple(replace(p, priority=priorities.get(i, 0.0)) for i, p in enumerate(prompts.train))
        cfg = settings(claim=claim, prompts_per_step=4, over_sample=1, accept="in_order")
        cfg.rollout.filter.zero_variance = False
        make = lambda: make_rollouts(cfg, engine, prompts, FakeScorer(even), world)  # noqa: E731
        rollouts, found = make(), []
        for step in (1, 2):
            number = 10 * next(numbers)
            found += [(g.ticket, [s.turns[0].text for s in g.samples]) for g in rollouts.collect(number).groups]
            state, rollouts = rollouts.state(), make()  # a resume
            rollouts.load_state(state)
        return found, [ticket for ticket, answer, _ in engine.added if answer == 0]

    numbers = itertools.count(1)
    plain, order = steps({})
    assert order[:4] == [0, 1, 2, 3] and [ticket for ticket, _ in plain] == list(range(8))
    ranked, order = steps({3: 2.0, 1: -1.0, 4: 9.0, 6: 0.5})
    assert ranked == plain
    if claim == "store":  # ticket 4 is one more than the step needs
        assert order[:5] == [3, 0, 2, 1, 4] and order[-5:-1] == [4, 6, 5, 7]
    else:
        assert order[:5] == [4, 3, 0, 2, 1]


def test_slots_bound_what_runs(world: World) -> None:
    engine = FakeEngine(max_running=8)
    cfg = settings(prompts_per_step=6)
    make_rollouts(cfg, engine, FakePrompts(9), FakeScorer(even), world).collect(1)
    assert engine.most_running <= 8


def test_a_verdict_that_is_no_score_leaves_the_baseline_and_spends_the_budget(world: World) -> None:
    class Failing(FakeScorer):
        async def score(self, prompt, answer, info) -> Verdict:
            if prompt.ground_truth == "0" and even(prompt, answer):
                return Verdict("timeout", detail="10 s")
            return await super().score(prompt, answer, info)

    cfg = settings()
    cfg.reward.error_budget = 0.9
    make = lambda: make_rollouts(cfg, FakeEngine(), FakePrompts(9), Failing(even), world)  # noqa: E731
    collected = make().collect(1)
    assert 0 < collected.table.error_share < 0.5
    assert 0 not in [g.ticket for g in collected.groups], "only failed scores are left: no variance"
    cfg.reward.error_budget = 0.01
    failure = make().collect(2).failure
    assert isinstance(failure, RunFailed)
    assert re.match(r"reward.error_budget=0.01: .* the first: timeout: 10 s", str(failure))
    assert "--- ground truth\n0\n" in failure.report and "timeout: 10 s" in failure.report


def test_a_rollout_of_several_turns_needs_no_change_here(world: World) -> None:
    async def three_turns(ctx: Context) -> Sample:
        turn = await ctx.generate(ctx.render(ctx.prompt.messages))
        for _ in range(2):
            turn = await ctx.generate(ctx.reply(ctx.prompt.messages))
        return ctx.sample(await ctx.score(turn.text))

    rollouts = make_rollouts(settings(), FakeEngine(), FakePrompts(9), FakeScorer(even), world, three_turns)
    sample = rollouts.collect(1).groups[0].samples[0]
    assert [len(turn.token_ids) for turn in sample.turns] == [3, 3, 3]
    assert [len(turn.prompt_ids) for turn in sample.turns] == 3 * [len("problem 0")]


def test_prompts_that_are_too_long_are_named(world: World) -> None:
    cfg = settings(max_prompt_tokens=5)
    cfg.data.overlong = "error"
    with pytest.raises(UserError, match=r"rollout.max_prompt_tokens=5: prompt 0000\w+ has 9 tokens, and 3 other"):
        make_rollouts(cfg, FakeEngine(), FakePrompts(2), FakeScorer(even), world)


def test_answers_to_held_out_prompts(world: World) -> None:
    rollouts = make_rollouts(settings(), FakeEngine(), FakePrompts(3), FakeScorer(even), world)
    groups = rollouts.answer(rollouts.prompts.eval, [Sampling(0, "eval", 1.0, 8)] * 2 + [Sampling(0, "eval", 0.0, 8)])
    assert [len(g.samples) for g in groups] == [3, 3]


def scores(collected) -> dict:
    return {g.ticket: [s.verdict.score for s in g.samples] for g in collected.groups}


@pytest.mark.parametrize("per_ticket", [1, 3])
def test_slices_of_a_group_give_the_same_samples(world: World, per_ticket: int) -> None:
    def steps(per_ticket: int | None, name: int) -> list:
        cfg = settings(answers_per_claim=per_ticket)
        rollouts = make_rollouts(cfg, FakeEngine(), FakePrompts(9), FakeScorer(even), world)
        harvests = [rollouts.collect(name + step) for step in (1, 2)]
        return [(scores(c), [(o.ticket, o.reject_reason) for o in tickets_of(c.table)]) for c in harvests]

    assert steps(per_ticket, 10 * per_ticket) == steps(None, 0)


def test_of_the_first_to_finish_the_slow_are_left_behind_and_come_first_in_the_next_step(world: World) -> None:
    engine = FakeEngine(lambda r: 50 if r.order[0] in (0, 2) else 2)
    cfg = settings(accept="first_finished", over_sample=2)
    cfg.rollout.filter.zero_variance = False
    rollouts = make_rollouts(cfg, engine, FakePrompts(20), FakeScorer(even), world)
    assert tickets(rollouts.collect(1)) == [1, 3, 4]
    assert rollouts.state()["skipped"] == [0, 2] and rollouts.state()["next_ticket"] == 5
    engine.length = lambda r: 2
    assert tickets(rollouts.collect(2)) == [0, 2, 5]
    assert rollouts.state()["skipped"] == []


def test_deferred_tickets_are_trained_on_once_by_the_policy_of_a_long_round(world: World) -> None:
    engine = FakeEngine(lambda r: 40 if r.order[0] % 4 == 0 else 2)
    cfg = settings(tail="defer", over_sample=1)
    cfg.rollout.filter.zero_variance = False
    rollouts = make_rollouts(cfg, engine, FakePrompts(100), FakeScorer(even), world)
    steps = []
    for step in range(1, 9):
        engine.version = step - 1
        collected = rollouts.collect(step)
        steps.append(tickets(collected))
        versions = {v for g in collected.groups for s in g.samples for t in s.turns for v in t.versions}
        assert versions == {step - 1}, "an answer of an older policy"
    assert steps[:4] == [[1, 2, 3], [5, 6, 7], [9, 10, 11], [0, 4, 8]]
    used = [ticket for step in steps for ticket in step]
    assert sorted(used) == list(range(24))


@pytest.mark.parametrize("accept", ["in_order", "first_finished"])
def test_what_is_carried_goes_on_with_the_new_policy_and_keeps_its_tokens(world: World, accept: str) -> None:
    engine = FakeEngine(lambda r: 6 - (len(r.prompt_ids) - len("problem 00")) if r.order[0] >= 3 else 2)
    cfg = settings(accept=accept, over_sample=2, partial_rollout=True)
    cfg.rollout.filter.zero_variance = False
    prompts = FakePrompts(90)
    prompts.train = prompts.train[10:]  # all texts have one length
    rollouts = make_rollouts(cfg, engine, prompts, FakeScorer(even), world)
    engine.version = 0
    first = rollouts.collect(1)
    assert tickets(first) == [0, 1, 2] and first.num_carried == 8 and first.num_aborted == 0
    engine.version = 1
    second = rollouts.collect(2)
    assert tickets(second)[:2] == [3, 4]
    turn = second.groups[0].samples[0].turns[0]
    assert len(turn.token_ids) == 6, "cut short and gone on, the answer has its whole length"
    assert sorted(set(turn.versions)) == [0, 1] and list(turn.versions) == sorted(turn.versions)
    assert second.metrics()["rollout/stale"] > 0
    assert len(set(engine.added)) < len(engine.added), "nothing was added again"


def test_carried_groups_that_had_finished_are_used_and_not_generated_again(world: World) -> None:
    engine = FakeEngine(lambda r: 9 if r.order[0] == 1 else 2)
    cfg = settings(over_sample=2, partial_rollout=True)
    cfg.rollout.filter.zero_variance = False
    rollouts = make_rollouts(cfg, engine, FakePrompts(20), FakeScorer(even), world)
    assert tickets(rollouts.collect(1)) == [0, 1, 2]
    engine.added.clear()
    assert tickets(rollouts.collect(2)) == [3, 4, 5]
    assert {order[0] for order in engine.added} == {5, 6, 7}


def test_a_held_out_evaluation_leaves_carried_requests_alone(world: World) -> None:
    engine = FakeEngine(lambda r: 50 if r.order[0] >= 3 else 2)
    cfg = settings(over_sample=2, partial_rollout=True)
    cfg.rollout.filter.zero_variance = False
    rollouts = make_rollouts(cfg, engine, FakePrompts(20), FakeScorer(even), world)
    rollouts.collect(1)
    engine.added.clear()
    rollouts.answer(rollouts.prompts.eval, [Sampling(0, "eval", 1.0, 8)])
    assert [order[0] for order in engine.added] == [0, 1] and engine.num_unfinished == 0
    engine.length = lambda r: 2
    assert tickets(rollouts.collect(2)) == [3, 4, 5]
    rollouts.close()


def test_a_resume_starts_carried_tickets_again(world: World) -> None:
    engine = FakeEngine(lambda r: 50 if r.order[0] >= 3 else 2)
    cfg = settings(over_sample=2, partial_rollout=True)
    cfg.rollout.filter.zero_variance = False
    make = lambda: make_rollouts(cfg, engine, FakePrompts(20), FakeScorer(even), world)  # noqa: E731
    one = make()
    one.collect(1)
    other = make()
    other.load_state(one.state())
    engine.length = lambda r: 2
    assert tickets(other.collect(2)) == [3, 4, 5]


def test_a_step_in_which_nothing_qualifies_says_so_and_ends(world: World, capsys) -> None:
    rollouts = make_rollouts(
        settings(max_prompts_per_step=5),
        FakeEngine(),
        FakePrompts(9),
        FakeScorer(lambda p, a: True),
        world,
    )
    assert rollouts.collect(1).groups == ()
    told = capsys.readouterr().err
    asked = "no update: it would train on the answers to 0 prompts, not to 3; 5 were asked, mean score 1.00, and 5"
    assert f"step 1: {asked} are unusable (5 zero variance): all answers to such a prompt scored alike" in told
    assert "rollout.filter.zero_variance=false" in told


@pytest.mark.parametrize(
    ("filter", "reason"), [({"max_truncated": 0.4}, "too many truncated"), ({"max_mean_tokens": 4}, "too long")]
)
def test_length_filters(world: World, filter: dict, reason: str) -> None:
    engine = FakeEngine(lambda r: 99 if r.order[0] == 1 else 3)
    cfg = settings(max_new_tokens=5)
    for key, value in ({"zero_variance": False} | filter).items():
        setattr(cfg.rollout.filter, key, value)
    rollouts = make_rollouts(cfg, engine, FakePrompts(9), FakeScorer(even), world)
    collected = rollouts.collect(1)
    assert collected.table.reasons == {1: reason}


def test_length_bias(world: World) -> None:
    """Scores that fall with length: `in_order` finds the true mean, `first_finished` finds a better one."""

    def mean(accept: str) -> float:
        engine = FakeEngine(lambda r: 2 + 3 * (r.order[0] % 7))
        cfg = settings(accept=accept, over_sample=7, prompts_per_step=7)
        cfg.rollout.filter.zero_variance = False
        scorer = FakeScorer(lambda p, a: int(p.ground_truth) % 7 < 3)
        rollouts = make_rollouts(cfg, engine, FakePrompts(70), scorer, world)
        offset = 100 * (accept == "first_finished")
        harvests = [rollouts.collect(offset + step) for step in (1, 2, 3)]
        assert [len(c.groups) for c in harvests] == [7, 7, 7]
        found = [value for c in harvests for values in scores(c).values() for value in values]
        return sum(found) / len(found)

    assert mean("in_order") == pytest.approx(3 / 7)
    assert mean("first_finished") > 3 / 7 + 0.1


def test_remax_draws_one_greedy_answer_that_is_no_member_of_the_group(world: World) -> None:
    asked = []
    engine = FakeEngine(lambda r: asked.append((r.order[:2], r.temperature)) or 3)
    cfg = settings(answers_per_claim=2)
    cfg.algorithm.advantage = "remax"
    collected = make_rollouts(cfg, engine, FakePrompts(9), FakeScorer(even), world).collect(1)
    assert {temperature for (_, answer), temperature in asked if answer == 4} == {0.0}
    assert {temperature for (_, answer), temperature in asked if answer < 4} == {1.0}
    for o in tickets_of(collected.table):
        assert o.answers[["answer", "greedy"]].tolist() == [(n, n == 4) for n in range(5)]
    sampled = [score for o in tickets_of(collected.table) for score in o.answers["score"][~o.answers["greedy"]]]
    assert collected.metrics()["critic/score/mean"] == pytest.approx(sum(sampled) / len(sampled))
    for group in collected.groups:
        assert len({s.verdict.score for s in group.samples if not s.greedy}) == 2, "the baseline is no variance"


def test_a_mistake_in_an_episode_is_a_verdict_of_that_sample_alone(world: World) -> None:
    async def failing(ctx: Context) -> Sample:
        if ctx.ticket == 1:
            raise KeyError("a mistake of mine")
        turn = await ctx.generate(ctx.render(ctx.prompt.messages))
        if ctx.answer_index == 2:
            return turn
        if ctx.answer_index == 3:
            await ctx.generate(None)
        return ctx.sample(await ctx.score(turn.text))

    cfg = settings(min_answers=1)
    cfg.rollout.filter.zero_variance = False
    cfg.reward.error_budget = 1.0
    collected = collect_with(failing, cfg, world)
    assert [(o.ticket, o.reject_reason) for o in tickets_of(collected.table) if o.reject_reason] == [
        (1, "too few scored")
    ]
    verdicts = {s.key: s.verdict for g in [*collected.groups, *(g for g, _ in collected.dropped)] for s in g.samples}
    assert {key for key, verdict in verdicts.items() if verdict.status == "ok"} == {
        (t, a) for t in (0, 2, 3) for a in (0, 1)
    }
    assert all(verdict.status in ("ok", "error") for verdict in verdicts.values())
    here = r"test_rollouts.py:\d+: KeyError: 'a mistake of mine'"
    assert re.fullmatch(here, verdicts[1, 0].detail)
    assert verdicts[0, 2].detail.startswith("TypeError: the episode returned Turn(")
    assert re.match(r"test_rollouts.py:\d+: TypeError: ", verdicts[0, 3].detail)
    cfg.reward.error_budget = 0.3
    failure = collect_with(failing, cfg, world, step=2).failure
    assert isinstance(failure, RunFailed) and "got no score; the first: error: " in str(failure)
    assert "TypeError: the episode returned Turn(" in failure.report


def collect_with(episode, cfg: RlvrConfig, world: World, step: int = 1, **engine):
    engine = FakeEngine(lambda r: 3, **engine)
    rollouts = make_rollouts(cfg, engine, FakePrompts(9), FakeScorer(even), world, episode)
    return rollouts.collect(step)


async def endless(ctx: Context) -> Sample:
    await ctx.generate(ctx.render(ctx.prompt.messages))
    while True:
        await ctx.generate(ctx.reply(ctx.prompt.messages))


@pytest.mark.parametrize(
    ("budget", "tokens"),
    [({"max_turns": 2}, [3, 3]), ({"max_context_tokens": 26}, [3, 3]), ({"max_context_tokens": 23}, [3, 2])],
    ids=str,
)
def test_an_episode_that_spends_its_budget_ends_as_truncated_and_is_scored(world: World, budget, tokens) -> None:
    """Each turn appends 9 tokens and answers with 3, or what is left."""
    collected = collect_with(endless, settings(**budget), world)
    assert len(collected.groups) == 3
    for sample in collected.groups[0].samples:
        assert [len(turn.token_ids) for turn in sample.turns] == tokens
        assert [turn.finish_reason for turn in sample.turns] == ["stop", "length"] and sample.verdict.status == "ok"
    assert collected.metrics()["rollout/truncated"] == 1.0


def test_an_episode_may_look_after_its_budget_itself(world: World) -> None:
    async def careful(ctx: Context) -> Sample:
        try:
            await endless(ctx)
        except BudgetSpent:
            return ctx.sample(Verdict("ok", float(ctx.answer_index % 2)))

    collected = collect_with(careful, settings(max_turns=2), world)
    assert {turn.finish_reason for s in collected.groups[0].samples for turn in s.turns} == {"stop"}
    assert [s.verdict.score for s in collected.groups[0].samples] == [0.0, 1.0, 0.0, 1.0]


def test_an_episode_that_has_no_room_at_all_is_an_error_of_its_sample(world: World) -> None:
    cfg = settings(max_context_tokens=9, max_prompts_per_step=3)
    cfg.reward.error_budget = 1.0
    collected = collect_with(None, cfg, world)
    assert collected.groups == () and len(collected.table) == 3
    assert collected.table.details[0].endswith(": BudgetSpent: 9 tokens leave no room to answer")


@pytest.mark.parametrize(
    ("rollout", "line"),
    [
        ({"max_context_tokens": 9}, "rollout.max_context_tokens=9: it leaves no room to answer prompt 0000"),
        ({"max_context_tokens": 5000}, "rollout.max_context_tokens=5000: it exceeds the 4096 that fit"),
        ({"max_new_tokens": 5000}, "rollout.max_new_tokens=5000: with a prompt of 9 tokens it exceeds the 4096"),
    ],
)
def test_a_context_that_cannot_be_is_told_at_the_start(world: World, rollout: dict, line: str) -> None:
    cfg = settings(**rollout)
    rollouts = make_rollouts(cfg, FakeEngine(), FakePrompts(2), FakeScorer(even), world)
    with pytest.raises(UserError, match=line):
        rollouts.check()


def test_a_carried_turn_keeps_the_limit_it_began_with(world: World) -> None:
    """Cut short at the end of a step, an answer that the budget clamps goes on to the same length."""
    engine = FakeEngine(lambda r: 50 if r.order[0] >= 3 else 2)
    cfg = settings(over_sample=2, partial_rollout=True, max_context_tokens=16)
    cfg.rollout.filter.zero_variance = False
    rollouts = make_rollouts(cfg, engine, FakePrompts(9), FakeScorer(even), world)
    assert rollouts.collect(1).num_carried == 8
    turns = [s.turns[0] for g in rollouts.collect(2).groups for s in g.samples if g.ticket in (3, 4)]
    assert {(len(turn.token_ids), turn.finish_reason) for turn in turns} == {(7, "length")}


def test_time_without_anything_to_compute_is_told_as_waiting(world: World) -> None:
    scorer = FakeScorer(even, lambda p: 0.05)
    make_rollouts(settings(), FakeEngine(), FakePrompts(5), scorer, world).collect(1)
    events = [json.loads(line) for line in world.journal.path.read_text().splitlines()]
    since = {"kind": [], "kind_done": []}
    for event in events:
        if event["event"] in since:
            since[event["event"]].append(event["t"])
    waited = sum(since["kind_done"]) - sum(since["kind"])
    assert len(since["kind"]) == len(since["kind_done"]) and 0.03 < waited < 0.5


def test_who_asks_for_an_answer_wakes_an_idle_engine_loop(world: World, monkeypatch) -> None:
    """A turn that follows an environment's step does not wait for the end of a sleep, however long that is."""
    monkeypatch.setattr(engine_loop, "IDLE_SECONDS", 60.0)
    request = Request("train/0/0/1", array("i", [1]), 3, 1.0, 7, (0, 0, 1), ())

    async def ask() -> Completion:
        await asyncio.sleep(0.02)
        return await idle.generate(request)

    async def polled() -> Completion:
        task = asyncio.create_task(ask())
        async with asyncio.timeout(30):
            while not task.done():
                await idle.poll()
        return task.result()

    idle = engine_loop.EngineLoop(FakeEngine(), world)
    assert len(asyncio.run(polled()).token_ids) == 3
    assert 0.01 < idle.idle_seconds < 30
