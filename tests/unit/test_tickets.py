"""The end-of-step rules: functions of outcomes or of arrival, no matter which replica sees what first."""

import itertools
import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from spmd_rl.config.schema import RolloutConfig
from spmd_rl.rollout.accept import tickets
from spmd_rl.rollout.claims import StaticClaim, StoreClaim, claim
from spmd_rl.rollout.rounds import Cursor, Part, Round, plan_round
from spmd_rl.rollout.tickets import LOOKS_PER_SECOND


def expected_end(outcomes: list[bool], goal: int, limit: int) -> int:
    """The rule of `accept: ticket`, said the slow way: past the goal-th qualifying place, or past the last allowed."""
    count = 0
    for i in range(limit):
        count += outcomes[i]
        if count == goal:
            return i + 1
    return limit


def play(round: Round, outcomes: list[bool], replicas: int, kind: str, seed: int, owners: dict | None = None) -> dict:
    """Replicas that claim, finish and resolve in a random order until all know the step's end."""
    store, order, now = HashStore(), random.Random(seed), [0.0]
    books = [tickets(store, "s", round, replicas, clock=lambda: now[0]) for _ in range(replicas)]
    claims = [claim(kind, book, r, replicas) for r, book in enumerate(books)]
    running: list[tuple[int, Part]] = [(r, part) for part, r in (owners or {}).items()]
    started: list[Part] = []
    resolved: list[int] = []
    for _ in range(20_000):
        now[0] += 1.0  # time enough to look
        if all(book.ended() for book in books):
            break
        r = order.randrange(replicas)
        mine = sum(1 for owner, _ in running if owner == r)
        for part in claims[r].next(2 - mine):
            running.append((r, part))
            started.append(part)
        if running and order.random() < 0.7:
            r, part = running.pop(order.randrange(len(running)))
            place = round.order.place(part.ticket)
            pooled = books[r].pool(place, part.number, bytes([part.number]))
            if pooled is not None:
                assert pooled == [bytes([n]) for n in range(round.parts)]
                resolved.append(place)
                books[r].resolve({place: outcomes[place]})
    assert all(book.ended() for book in books)
    used = books[0].used([b.end_mark() for b in books], {place for b in books for place in b.counted})
    return {"used": used, "started": started, "running": running, "books": books, "resolved": resolved}


rounds = st.fixed_dictionaries(
    {"goal": st.integers(1, 5), "extra": st.integers(0, 3), "parts": st.integers(1, 3)},
)
games = {
    "demand": rounds,
    "outcomes": st.lists(st.booleans(), min_size=12, max_size=12),
    "replicas": st.integers(1, 4),
    "holes": st.sets(st.integers(0, 6), max_size=3),
    "seed": st.integers(0, 10**6),
}


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(["store", "static"]), **games)
def test_in_order_the_end_is_the_goal_th_qualifying_place(kind, demand, outcomes, replicas, holes, seed) -> None:
    round = Round(Cursor(7, tuple(sorted(holes))), limit=12, **demand)
    game = play(round, outcomes, replicas, kind, seed)
    end = expected_end(outcomes, round.goal, 12)
    assert game["used"] == set(range(end))
    assert sorted(set(game["started"])) == sorted(game["started"]), "a part started twice"
    used = {round.order.ticket(place) for place in range(end)}
    assert used <= {part.ticket for part in game["started"]}
    assert not any(part.ticket in used for _, part in game["running"]), "ended with one of its tickets running"


@settings(max_examples=150, deadline=None)
@given(**games)
def test_by_arrival_the_first_to_come_are_used(demand, outcomes, replicas, holes, seed) -> None:
    round = Round(Cursor(7, tuple(sorted(holes))), limit=12, accept="arrival", **demand)
    game = play(round, outcomes, replicas, "store", seed)
    came = game["resolved"]
    qualify = [place for place in came if outcomes[place]][: round.goal]
    assert {place for place in game["used"] if outcomes[place]} == set(qualify)
    assert {place for place in game["used"] if not outcomes[place]} == {p for p in came if not outcomes[p]}
    assert len(qualify) == round.goal or len(came) == 12


@settings(max_examples=80, deadline=None)
@given(accept=st.sampled_from(["ticket", "arrival"]), **games)
def test_carried_parts_are_nobody_elses(accept, demand, outcomes, replicas, holes, seed) -> None:
    order = Cursor(7, tuple(sorted(holes)))
    chosen = random.Random(seed).sample(range(6), 2)
    owners = {Part(order.ticket(place), 0): place % replicas for place in chosen}
    round = Round(order, limit=12, accept=accept, carried=frozenset(owners), **demand)
    game = play(round, outcomes, replicas, "store", seed, owners)
    assert not set(game["started"]) & set(owners)
    if accept == "ticket":
        assert game["used"] == set(range(expected_end(outcomes, round.goal, 12)))


@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 30)))
def test_a_cursor_forgets_what_is_used_and_nothing_else(holes, used) -> None:
    cursor = Cursor(10, tuple(sorted(holes)))
    waiting = {cursor.ticket(place) for place in range(60)}
    after = cursor.after(used & waiting)
    assert {after.ticket(place) for place in range(60 - len(used & waiting))} == waiting - used
    assert list(after.holes) == sorted(after.holes) and all(hole < after.next for hole in after.holes)


def test_deferred_tickets_come_together_in_a_long_round() -> None:
    s = RolloutConfig(prompts_per_step=3, extra_prompts=2, tail="defer")
    short = plan_round(Cursor(20, (1, 5)), s)
    assert (short.accept, short.extra, short.order.ticket(0)) == ("arrival", 2, 20)
    long = plan_round(Cursor(20, (1, 5, 9)), s)
    assert (long.accept, long.extra) == ("ticket", 0)
    assert [long.order.ticket(place) for place in range(4)] == [1, 5, 9, 20]


def test_static_waves_start_what_is_missing() -> None:
    book = tickets(HashStore(), "s", Round(Cursor(), goal=3, extra=1, limit=12))
    deal = StaticClaim(book, 0, 1)
    assert [part.ticket for part in deal.next(1)] == [0, 1, 2, 3]
    for place, qualifies in ((3, True), (1, False), (0, True)):
        book.resolve({place: qualifies})
        assert deal.next(9) == [], "a wave is not whole before all its tickets are resolved"
    book.resolve({2: False})
    assert book.resolved() == 4
    assert [part.ticket for part in deal.next(9)] == [4]
    assert deal.next(9) == []


def test_store_claim_keeps_its_reservation() -> None:
    book = tickets(HashStore(), "s", Round(Cursor(), goal=1, extra=0, limit=3))
    mine, other = StoreClaim(book), StoreClaim(book)
    assert mine.next(5) == [Part(0, 0)]
    assert other.next(5) == [], "beyond the goal nothing starts"
    book.resolve({0: False})
    assert other.next(5) == [], "the second ticket is reserved by the first, the third by the other"
    assert mine.next(5) == [Part(1, 0)]
    assert StoreClaim(book).next(0) == [], "no room, no claim"


def test_a_replica_with_room_takes_a_whole_prompt() -> None:
    """Prompt affinity: the answers of a prompt meet in one prefix cache wherever they fit."""
    book = tickets(HashStore(), "s", Round(Cursor(), goal=3, extra=0, limit=6, parts=4))
    first, second = StoreClaim(book), StoreClaim(book)
    assert first.next(4) == [Part(0, n) for n in range(4)]
    assert second.next(2) == [Part(1, 0), Part(1, 1)]
    assert first.next(9)[:2] == [Part(1, 2), Part(1, 3)], "what is left of a prompt is shared"


@pytest.mark.parametrize("accept", ["ticket", "arrival"])
def test_forget_leaves_no_key(accept: str) -> None:
    store = HashStore()
    before = store.num_keys()
    book = tickets(store, "s", Round(Cursor(), goal=1, extra=0, limit=3, parts=2, accept=accept))
    StoreClaim(book).next(2)
    for part in range(2):
        book.pool(0, part, b"x")
    book.resolve({0: True})
    assert book.ended() and store.num_keys() > before
    book.forget(shared=True)
    assert store.num_keys() == before


@pytest.mark.parametrize("accept", ["ticket", "arrival"])
@pytest.mark.parametrize("replicas", [1, 4])
def test_store_operations_per_ticket_do_not_grow_with_replicas(replicas: int, accept: str) -> None:
    store = Counting()
    round = Round(Cursor(), goal=64, extra=0, limit=64, accept=accept)
    books = [tickets(store, "s", round, replicas) for _ in range(replicas)]
    for place in range(64):
        books[place % replicas].resolve({place: True})
    assert 64 < store.calls <= 8 * 64


def test_a_crowd_behind_a_long_answer_does_not_walk_the_whole_way_each() -> None:
    """The first ticket is resolved last, and others just then: each starts to move the frontier before the next."""
    goal, crowd, store = 512, 32, Counting()
    round = Round(Cursor(), goal, extra=0, limit=goal)
    books = [tickets(store, "s", round, crowd) for _ in range(crowd)]
    late = [(books[i], place) for i, place in enumerate([0, *range(goal - crowd + 1, goal)])]
    for place in range(1, goal - crowd + 1):
        books[0].resolve({place: True})
    begin = store.calls

    def interrupting(name: str):
        def ask(*args):
            if late:
                book, place = late.pop()
                book.resolve({place: True})
            return store.__getattr__(name)(*args)

        return ask

    store.get, store.compare_set = interrupting("get"), interrupting("compare_set")
    book, place = late.pop(0)
    book.resolve({place: True})
    while late:
        book, place = late.pop()
        book.resolve({place: True})
    assert all(book.ended() for book in books)
    assert books[0].end_mark() == str(goal)
    assert store.calls - begin < goal / 2, "replicas walked over places that were not theirs to walk"


@given(st.permutations(range(80)), st.sets(st.integers(0, 79)), st.integers(1, 80), st.data())
@settings(max_examples=200, deadline=None)
def test_in_order_whoever_comes_between_the_end_is_found(order, bad, goal, data) -> None:
    """At every question that a replica asks the store, another may resolve its tickets first."""
    store, left = HashStore(), list(order)
    round = Round(Cursor(), goal, extra=0, limit=80)
    books = [tickets(store, "s", round, 3) for _ in range(3)]

    def one() -> None:
        place = left.pop()
        books[place % 3].resolve({place: place not in bad})

    def between(name: str):
        asked = getattr(store, name)

        def ask(*args):
            answer = asked(*args)  # what it learns is old already when it learns it
            if left and data.draw(st.booleans()):
                one()
            return answer

        return ask

    for book in books:
        book._store = SimpleNamespace(**{name: between(name) for name in ("get", "add", "compare_set", "check", "set")})
    while left:
        one()
    qualifying = [place for place in range(80) if place not in bad]
    expected = qualifying[goal - 1] + 1 if len(qualifying) >= goal else 80
    assert store.get("s/end").decode() == str(expected)


def test_a_replica_takes_what_it_has_room_for_at_once_and_reserves_one_ticket() -> None:
    store = Counting()
    round = Round(Cursor(), goal=5, extra=1, limit=20, parts=2)
    deal = StoreClaim(tickets(store, "s", round, replicas=2))
    assert deal.next(7)[:6] == [Part(place, n) for place in range(3) for n in range(2)]
    assert store.calls == 3, "a ticket, to learn how many there are; two more; and half of the one that does not fit"
    deal = StoreClaim(tickets(store, "t", round, replicas=2))
    assert deal.next(6) == [Part(place, n) for place in range(3) for n in range(2)]
    assert deal.next(9) == [Part(place, n) for place in range(3, 6) for n in range(2)]
    assert deal.waits_for == 6, "beyond the tickets that surely start it holds one"
    other = StoreClaim(tickets(store, "t", round, replicas=2))
    assert (other.next(9), other.waits_for) == ([], 7)


def test_nobody_looks_for_what_cannot_be_there() -> None:
    """Alone a replica knows all there is; and no step ends while one of its first K places is under way."""
    alone, many = Counting(), Counting()
    round = Round(Cursor(), goal=3, extra=0, limit=9)
    for store, replicas in ((alone, 1), (many, 2)):
        book = tickets(store, "s", round, replicas, clock=itertools.count().__next__)
        assert not any(book.ended(under_way=2) for _ in range(50))
        assert store.calls == 0
        assert not any(book.ended(under_way=3) or book.ended() for _ in range(50))
        book.resolve({0: True, 2: True, 1: True})
        assert book.ended() and book.end_mark() == "3"
    assert alone.calls == 3, "one counter, and the end twice: what it is, and that it is there"
    assert many.calls == 103


@given(st.sets(st.integers(0, 19)), st.sets(st.integers(0, 40), max_size=9), st.integers(1, 3))
def test_open_parts_are_all_but_those_carried_in_the_order_of_places(holes, carried, parts) -> None:
    order = Cursor(20, tuple(sorted(holes)))
    every = [(place, Part(order.ticket(place), n)) for place in range(15) for n in range(parts)]
    mine = {part for number, (_, part) in enumerate(every) if number in carried}
    round = Round(order, goal=4, extra=2, limit=15, parts=parts, carried=frozenset(mine))
    expected = [(place, part) for place, part in every if part not in mine]
    assert [round.open(number) for number in range(round.num_open(15))] == expected
    for below in range(16):
        assert round.num_open(below) == sum(place < below for place, _ in expected)
    assert all(order.place(part.ticket) == place for place, part in every)


def test_a_look_at_the_store_is_not_taken_more_often_than_a_share_of_all() -> None:
    store, now, replicas = Counting(), [0.0], 1 + LOOKS_PER_SECOND
    book = tickets(store, "s", Round(Cursor(), goal=1, extra=0, limit=1), replicas, clock=lambda: now[0])
    begin = store.calls
    for _ in range(100):
        now[0] += 0.05
        assert not book.ended()
    assert store.calls - begin == 5, "once a second"


class Counting:
    """A store that counts what it is asked."""

    def __init__(self) -> None:
        self.calls, self._store = 0, HashStore()

    def __getattr__(self, name: str):
        self.calls += 1
        return getattr(self._store, name)
