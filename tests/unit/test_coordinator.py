"""The end-of-step rules: functions of outcomes or of arrival, no matter which replica sees what first."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from spmd_rl.config.schema import RolloutConfig
from spmd_rl.rollout.claims import StaticClaim, StoreClaim, claims
from spmd_rl.rollout.coordinator import POLLS_PER_SECOND, coordinate
from spmd_rl.rollout.step_plan import Cursor, GroupSlice, StepPlan, plan_step


def expected_end(outcomes: list[bool], goal: int, limit: int) -> int:
    """The rule of `accept: in_order`, the slow way: past the goal-th qualifying position, or past the last allowed."""
    count = 0
    for i in range(limit):
        count += outcomes[i]
        if count == goal:
            return i + 1
    return limit


def play(plan: StepPlan, outcomes: list[bool], replicas: int, kind: str, seed: int, owners: dict | None = None) -> dict:
    """Replicas that claim, finish and resolve in a random order until all know the step's end."""
    store, order, now = HashStore(), random.Random(seed), [0.0]
    coordinators = [coordinate(store, "s", plan, replicas, clock=lambda: now[0]) for _ in range(replicas)]
    claimed = [claims(kind, coordinator, r, replicas) for r, coordinator in enumerate(coordinators)]
    running: list[tuple[int, GroupSlice]] = [(r, part) for part, r in (owners or {}).items()]
    started: list[GroupSlice] = []
    resolved: list[int] = []
    for _ in range(20_000):
        now[0] += 1.0  # time enough to look
        if all(coordinator.ended() for coordinator in coordinators):
            break
        r = order.randrange(replicas)
        mine = sum(1 for owner, _ in running if owner == r)
        for part in claimed[r].next(2 - mine):
            running.append((r, part))
            started.append(part)
        if running and order.random() < 0.7:
            r, part = running.pop(order.randrange(len(running)))
            position = plan.cursor.position(part.ticket)
            pooled = coordinators[r].merge_slices(position, part.number, bytes([part.number]))
            if pooled is not None:
                assert pooled == [bytes([n]) for n in range(plan.slices)]
                resolved.append(position)
                coordinators[r].resolve(position, outcomes[position])
    assert all(coordinator.ended() for coordinator in coordinators)
    assert len({frozenset(coordinator.used()) for coordinator in coordinators}) == 1
    return {"used": coordinators[0].used(), "started": started, "running": running, "resolved": resolved}


rounds = st.fixed_dictionaries(
    {"goal": st.integers(1, 5), "extra": st.integers(0, 3), "slices": st.integers(1, 3)},
)
games = {
    "demand": rounds,
    "outcomes": st.lists(st.booleans(), min_size=12, max_size=12),
    "replicas": st.integers(1, 4),
    "skipped": st.sets(st.integers(0, 6), max_size=3),
    "seed": st.integers(0, 10**6),
}


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(["store", "static"]), **games)
def test_in_order_the_end_is_the_goal_th_qualifying_position(kind, demand, outcomes, replicas, skipped, seed) -> None:
    plan = StepPlan(Cursor(7, tuple(sorted(skipped))), limit=12, **demand)
    game = play(plan, outcomes, replicas, kind, seed)
    end = expected_end(outcomes, plan.goal, 12)
    assert game["used"] == set(range(end))
    assert sorted(set(game["started"])) == sorted(game["started"]), "a slice started twice"
    used = {plan.cursor.ticket(position) for position in range(end)}
    assert used <= {part.ticket for part in game["started"]}
    assert not any(part.ticket in used for _, part in game["running"]), "ended with one of its tickets running"


@settings(max_examples=150, deadline=None)
@given(**games)
def test_of_the_first_to_finish_those_that_came_are_used(demand, outcomes, replicas, skipped, seed) -> None:
    plan = StepPlan(Cursor(7, tuple(sorted(skipped))), limit=12, accept="first_finished", **demand)
    game = play(plan, outcomes, replicas, "store", seed)
    came = game["resolved"]
    qualify = [position for position in came if outcomes[position]][: plan.goal]
    last = came.index(qualify[-1]) + 1 if len(qualify) == plan.goal else len(came)
    assert game["used"] == set(came[:last])
    assert len(qualify) == plan.goal or len(came) == 12


@settings(max_examples=80, deadline=None)
@given(accept=st.sampled_from(["in_order", "first_finished"]), **games)
def test_carried_slices_are_nobody_elses(accept, demand, outcomes, replicas, skipped, seed) -> None:
    order = Cursor(7, tuple(sorted(skipped)))
    chosen = random.Random(seed).sample(range(6), 2)
    owners = {GroupSlice(order.ticket(p), 0): p % replicas for p in chosen}
    plan = StepPlan(order, limit=12, accept=accept, carried=frozenset(owners), **demand)
    game = play(plan, outcomes, replicas, "store", seed, owners)
    assert not set(game["started"]) & set(owners)
    if accept == "in_order":
        assert game["used"] == set(range(expected_end(outcomes, plan.goal, 12)))


@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 30)))
def test_a_cursor_forgets_what_is_used_and_nothing_else(skipped, used) -> None:
    cursor = Cursor(10, tuple(sorted(skipped)))
    waiting = {cursor.ticket(position) for position in range(60)}
    after = cursor.after(used & waiting)
    assert {after.ticket(position) for position in range(60 - len(used & waiting))} == waiting - used
    assert list(after.skipped) == sorted(after.skipped) and all(ticket < after.next for ticket in after.skipped)


def test_deferred_tickets_come_together_in_a_long_round() -> None:
    s = RolloutConfig(prompts_per_step=3, over_sample=2, tail="defer")
    short = plan_step(Cursor(20, (1, 5)), s)
    assert (short.accept, short.extra, short.cursor.ticket(0)) == ("first_finished", 2, 20)
    long = plan_step(Cursor(20, (1, 5, 9)), s)
    assert (long.accept, long.extra) == ("in_order", 0)
    assert [long.cursor.ticket(position) for position in range(4)] == [1, 5, 9, 20]


def test_static_waves_start_what_is_missing() -> None:
    coordinator = coordinate(HashStore(), "s", StepPlan(Cursor(), goal=3, extra=1, limit=12))
    deal = StaticClaim(coordinator, 0, 1)
    assert [part.ticket for part in deal.next(1)] == [0, 1, 2, 3]
    for position, qualifies in ((3, True), (1, False), (0, True)):
        coordinator.resolve(position, qualifies)
        assert deal.next(9) == [], "a wave is not whole before all its tickets are resolved"
    coordinator.resolve(2, False)
    assert coordinator.qualifying(4) == 2
    assert [part.ticket for part in deal.next(9)] == [4]
    assert deal.next(9) == []


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(["store", "static"]),
    priorities=st.lists(st.integers(0, 2), min_size=30, max_size=30),
    **games,
)
def test_priorities_order_the_claims_and_nothing_else(
    kind, priorities, demand, outcomes, replicas, skipped, seed
) -> None:
    cursor, s = Cursor(7, tuple(sorted(skipped))), RolloutConfig(answers_per_prompt=demand["slices"], min_answers=1)
    s.prompts_per_step, s.over_sample, s.answers_per_claim = demand["goal"], demand["extra"], 1
    s.max_prompts_per_step = len(outcomes)
    plain, plan = plan_step(cursor, s), plan_step(cursor, s, (), priorities.__getitem__)
    assert play(plan, outcomes, replicas, kind, seed)["used"] == play(plain, outcomes, replicas, kind, seed)["used"]
    claimed = [plan.slice(number) for number in range(plan.initial_limit * plan.slices)]
    assert sorted(claimed) == [plain.slice(number) for number in range(len(claimed))]
    positions = [position for position, part in claimed if part.number == 0]
    wanted = [priorities[cursor.ticket(position)] for position in positions]
    assert wanted[: plan.goal] == sorted(wanted[: plan.goal], reverse=True), "of what the step needs"
    assert sorted(positions[: plan.goal]) == list(range(plan.goal)), "what may be left comes after what is needed"
    assert plan_step(cursor, s, (), lambda ticket: 4.0) == plain


def test_store_claim_keeps_its_reservation() -> None:
    coordinator = coordinate(HashStore(), "s", StepPlan(Cursor(), goal=1, extra=0, limit=3))
    mine, other = StoreClaim(coordinator), StoreClaim(coordinator)
    assert mine.next(5) == [GroupSlice(0, 0)]
    assert other.next(5) == [], "beyond the goal nothing starts"
    assert (mine.waits_for, other.waits_for) == (1, 2)
    coordinator.resolve(0, False)
    assert other.next(5) == [], "the second ticket is reserved by the first, the third by the other"
    assert mine.next(5) == [GroupSlice(1, 0)]
    assert StoreClaim(coordinator).next(0) == [], "no room, no claim"


def test_a_replica_with_room_takes_a_whole_prompt() -> None:
    """Prompt affinity: the answers of a prompt meet in one prefix cache wherever they fit."""
    coordinator = coordinate(HashStore(), "s", StepPlan(Cursor(), goal=3, extra=0, limit=6, slices=4))
    first, second = StoreClaim(coordinator), StoreClaim(coordinator)
    assert first.next(4) == [GroupSlice(0, n) for n in range(4)]
    assert second.next(2) == [GroupSlice(1, 0), GroupSlice(1, 1)]
    assert first.next(9)[:2] == [GroupSlice(1, 2), GroupSlice(1, 3)], "what is left of a prompt is shared"


@pytest.mark.parametrize("accept", ["in_order", "first_finished"])
def test_forget_leaves_no_key(accept: str) -> None:
    store = HashStore()
    before = store.num_keys()
    coordinator = coordinate(store, "s", StepPlan(Cursor(), goal=1, extra=0, limit=3, slices=2, accept=accept))
    StoreClaim(coordinator).next(2)
    for number in range(2):
        coordinator.merge_slices(0, number, b"x")
    coordinator.resolve(0, True)
    assert coordinator.ended() and store.num_keys() > before
    coordinator.forget(shared=True)
    assert store.num_keys() == before


@pytest.mark.parametrize("accept", ["in_order", "first_finished"])
@pytest.mark.parametrize("backwards", [False, True])
def test_store_operations_per_ticket_do_not_grow_with_replicas(accept: str, backwards: bool) -> None:
    """Whoever resolves which ticket when: two operations each, and two for the end."""
    for replicas in (1, 4, 64):
        store = Counting()
        plan = StepPlan(Cursor(), goal=64, extra=0, limit=64, accept=accept)
        coordinators = [coordinate(store, "s", plan, replicas) for _ in range(replicas)]
        for position in sorted(range(64), reverse=backwards):
            coordinators[position % replicas].resolve(position, True)
        assert store.calls <= 2 * 64 + 2


@given(st.permutations(range(80)), st.sets(st.integers(0, 79)), st.integers(1, 80), st.data())
@settings(max_examples=200, deadline=None)
def test_in_order_whoever_comes_between_the_end_is_found(order, bad, goal, data) -> None:
    """After every answer that a replica gets from the store, another may resolve its tickets first."""
    left = list(order)
    ends: list[bytes] = []

    class Interrupting(Counting):
        def add(self, key: str, amount: int) -> int:
            value = self.store.add(key, amount)  # what it learns is old already when it learns it
            if left and data.draw(st.booleans()):
                resolve()
            return value

        def set(self, key: str, value: str) -> None:
            ends.append(value)
            self.store.set(key, value)

    store = Interrupting()
    coordinators = [coordinate(store, "s", StepPlan(Cursor(), goal, extra=0, limit=80), 3) for _ in range(3)]

    def resolve() -> None:
        position = left.pop()
        coordinators[position % 3].resolve(position, position not in bad)

    while left:
        resolve()
    qualifying = [position for position in range(80) if position not in bad]
    assert ends == [str(qualifying[goal - 1] + 1 if len(qualifying) >= goal else 80)], "the end, written once"


def test_a_look_at_the_store_is_not_taken_more_often_than_a_share_of_all() -> None:
    store, now, replicas = Counting(), [0.0], 1 + POLLS_PER_SECOND
    coordinator = coordinate(store, "s", StepPlan(Cursor(), goal=1, extra=0, limit=1), replicas, clock=lambda: now[0])
    for _ in range(100):
        now[0] += 0.05
        assert not coordinator.ended()
        assert coordinator.may_start(0) and not coordinator.may_start(1)
    assert store.calls == 2 * 5, "two questions once a second"


class Counting:
    """A store that counts what it is asked."""

    def __init__(self) -> None:
        self.calls, self.store = 0, HashStore()

    def __getattr__(self, name: str):
        self.calls += 1
        return getattr(self.store, name)
