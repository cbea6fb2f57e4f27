"""The end-of-step rule: a function of outcomes, no matter which replica sees what first."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from spmd_rl.rollout.tickets import StaticClaim, StepTickets, StoreClaim, claim


def expected_end(outcomes: list[bool], first: int, goal: int, limit: int) -> int:
    """The rule, said the slow way: one past the goal-th qualifying ticket, or past the last one allowed."""
    count = 0
    for i in range(limit):
        count += outcomes[i]
        if count == goal:
            return first + i + 1
    return first + limit


def play(outcomes: list[bool], replicas: int, kind: str, goal: int, extra: int, limit: int, seed: int) -> dict:
    """Replicas that claim, finish and resolve in a random order until all know the step's end."""
    store, order, first = HashStore(), random.Random(seed), 7
    books = [StepTickets(store, "s", first, goal, extra, limit) for _ in range(replicas)]
    claims = [claim(kind, book, r, replicas) for r, book in enumerate(books)]
    running: list[tuple[int, int]] = []
    started: list[int] = []
    for _ in range(10_000):
        if all(book.end() is not None for book in books):
            break
        r = order.randrange(replicas)
        mine = sum(1 for owner, _ in running if owner == r)
        if (ticket := claims[r].next(mine < 2)) is not None:
            running.append((r, ticket))
            started.append(ticket)
        if running and order.random() < 0.7:
            r, ticket = running.pop(order.randrange(len(running)))
            books[r].resolve(ticket, outcomes[ticket - first])
    return {"end": {book.end() for book in books}, "started": started, "running": running, "books": books}


@settings(max_examples=150, deadline=None)
@given(
    outcomes=st.lists(st.booleans(), min_size=12, max_size=12),
    replicas=st.integers(1, 4),
    kind=st.sampled_from(["store", "static"]),
    goal=st.integers(1, 5),
    extra=st.integers(0, 3),
    seed=st.integers(0, 10**6),
)
def test_end_is_the_goal_th_qualifying_ticket(outcomes, replicas, kind, goal, extra, seed) -> None:
    game = play(outcomes, replicas, kind, goal, extra, 12, seed)
    end = expected_end(outcomes, 7, goal, 12)
    assert game["end"] == {end}
    assert sorted(set(game["started"])) == sorted(game["started"]), "a ticket started twice"
    assert set(range(7, end)) <= set(game["started"])
    assert not any(ticket < end for _, ticket in game["running"]), "the step ended with one of its tickets running"


def test_static_waves_start_what_is_missing() -> None:
    book = StepTickets(HashStore(), "s", 0, goal=3, extra=1, limit=12)
    deal = StaticClaim(book, 0, 1)
    wave = [deal.next(True) for _ in range(5)]
    assert wave == [0, 1, 2, 3, None]
    for ticket, qualifies in ((3, True), (1, False), (0, True)):
        book.resolve(ticket, qualifies)
        assert deal.next(True) is None, "a wave is not whole before all its tickets are resolved"
    book.resolve(2, False)
    assert book.frontier() == (4, 2)
    assert [deal.next(True), deal.next(True)] == [4, None]


def test_store_claim_keeps_its_reservation() -> None:
    book = StepTickets(HashStore(), "s", 0, goal=1, extra=0, limit=3)
    mine, other = StoreClaim(book), StoreClaim(book)
    assert mine.next(True) == 0
    assert other.next(True) is None, "beyond the goal nothing starts"
    book.resolve(0, False)
    assert mine.next(True) is None, "the second ticket is the other's"
    assert other.next(True) == 1
    assert StoreClaim(book).next(False) is None, "no room, no claim"


def test_forget_leaves_no_key() -> None:
    store = HashStore()
    book = StepTickets(store, "s", 0, goal=1, extra=0, limit=3)
    StoreClaim(book).next(True)
    book.resolve(0, True)
    before = store.num_keys()
    book.forget(shared=True)
    assert before >= 4
    assert store.num_keys() <= before - 4


@pytest.mark.parametrize("replicas", [1, 4])
def test_store_operations_per_ticket_do_not_grow_with_replicas(replicas: int) -> None:
    class Counting(HashStore):
        calls = 0

        def get(self, key):
            Counting.calls += 1
            return super().get(key)

    Counting.calls = 0
    store = Counting()
    books = [StepTickets(store, "s", 0, 64, 0, 64) for _ in range(replicas)]
    for ticket in range(64):
        books[ticket % replicas].resolve(ticket, True)
    assert Counting.calls <= 4 * 64
