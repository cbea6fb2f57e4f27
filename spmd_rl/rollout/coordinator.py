"""The coordinator: which tickets of a step may start, and when the step ends, without a central process.

Every replica has a `Coordinator` over the shared store. The rules are functions of these keys:

    claimed                counter: slices handed out
    rejected               counter: resolved tickets that do not qualify (each lets one more start)
    slices/<position>      counter: scored slices of the ticket at this position of the step, if it has several
    slices/<position>/<n>  their answers
    end                    written at the step's end: which positions it consumes
    left/<number>          slices of a replica that go on after the step
    joined                 counter: lent replicas in this step

Store operations per ticket do not grow with the number of replicas. `bench.virtual.simulate` drives this code on a
virtual clock.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from spmd_rl.rollout.step_plan import StepPlan

POLLS_PER_SECOND = 5_000
"""Polls of all replicas together, of two operations each. A TCPStore answers about 35,000 operations a second."""
REJECTED, QUALIFIES, PASSED = 1, 2, 4
"""Addends of a ticket's counter. Lowest two bits: its outcome, 0 while open. Bits above: 0 while an earlier ticket is
open, then 1 + the number of qualifying tickets before it. In one counter, so that one atomic addition writes one part
and reads the other.
"""
QUALIFIED = 1 << 32
"""Unit of qualifying tickets in `FirstKFinished`'s counter; exceeds the tickets of any step."""


class Store(Protocol):
    """Methods of `torch.distributed.Store` that a coordinator needs."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, initially 0, and return its value."""
        ...

    def set(self, key: str, value: str | bytes, /) -> None:
        """Write the value of a key."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return an existing key's value."""
        ...

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Wait for all keys and return their values."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Return True if all keys exist."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Delete a key; return True if it existed."""
        ...


class Coordinator:
    """One step as one replica sees it."""

    shared_keys: tuple[str, ...] = ("claimed", "rejected", "end", "joined")

    def __init__(
        self, store: Store, prefix: str, plan: StepPlan, replicas: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """prefix: of this step's keys. replicas: those that share the store. clock: in seconds, limits polls."""
        self.plan = plan
        self.pause = replicas / POLLS_PER_SECOND
        """Least seconds between polls."""
        self._store, self._prefix, self._clock = store, prefix, clock
        self._own_keys: set[str] = set()
        self._num_rejected, self._has_ended, self._looked_at = 0, False, -math.inf

    def claim(self, count: int) -> range:
        """Claim `count` slices, as numbers for `StepPlan.slice`. The caller keeps those that may not start yet."""
        end = self._store.add(self._key("claimed"), count)
        return range(end - count, end)

    def may_start(self, position: int) -> bool:
        """Return True for the first goal + extra positions, and one more for each rejected ticket."""
        if position < self.plan.initial_limit:
            return True
        self._look()
        return position < min(self.plan.limit, self.plan.initial_limit + self._num_rejected)

    def merge_slices(self, position: int, number: int, answers: bytes) -> list[bytes] | None:
        """Store a slice's answers. Return those of all slices if it is the ticket's last, else None."""
        if self.plan.slices == 1:
            return [answers]
        key = f"slices/{position}"
        self._store.set(self._key(f"{key}/{number}"), answers)
        self._own_keys.add(f"{key}/{number}")
        if self._add_owned(key, 1) < self.plan.slices:
            return None
        return [self._store.get(self._key(f"{key}/{n}")) for n in range(self.plan.slices)]

    def resolve(self, position: int, qualifies: bool) -> None:
        """Record that all verdicts of the ticket at `position` are in."""
        raise NotImplementedError

    def used(self) -> set[int]:
        """Return the positions that an ended step consumes, with rejected ones."""
        raise NotImplementedError

    def used_tickets(self) -> list[int]:
        """Return the used tickets, ascending."""
        return sorted(map(self.plan.cursor.ticket, self.used()))

    def ended(self) -> bool:
        """Return True if this replica knows of the step's end."""
        self._look()
        return self._has_ended

    @property
    def num_rejected(self) -> int:
        """Resolved tickets that do not qualify, as of the last poll."""
        return self._num_rejected

    def join(self) -> int:
        """Take part until the end; return this replica's number among those that joined, from 0."""
        # One that joins after the end hands nothing over, so it does not matter if others count it.
        return self._store.add(self._key("joined"), 1) - 1

    @property
    def num_joined(self) -> int:
        """Number of replicas that have joined."""
        return self._store.add(self._key("joined"), 0)

    def leave(self, number: int, slices: bytes) -> None:
        """Publish the slices that a replica has under way at the end."""
        self._store.set(self._key(f"left/{number}"), slices)
        self._own_keys.add(f"left/{number}")

    def left(self, numbers: Sequence[int]) -> list[bytes] | None:
        """Return the lists written with `leave` under these numbers; None until all are there."""
        keys = [self._key(f"left/{number}") for number in numbers]
        return [self._store.get(key) for key in keys] if not keys or self._store.check(keys) else None

    def forget(self, shared: bool) -> None:
        """Delete this replica's keys, and with `shared` the common ones, once no replica can read them."""
        for name in sorted({*self._own_keys, *(self.shared_keys if shared else ())}):
            self._store.delete_key(self._key(name))
        self._own_keys.clear()

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _add_owned(self, name: str, amount: int) -> int:
        value = self._store.add(self._key(name), amount)
        if value == amount:
            self._own_keys.add(name)
        return value

    def _look(self) -> None:
        if not self._has_ended and self._clock() - self._looked_at >= self.pause:
            self._looked_at = self._clock()
            self._num_rejected = self._store.add(self._key("rejected"), 0)
            self._has_ended = self._store.check([self._key("end")])

    def _reject(self) -> None:
        self._num_rejected = self._store.add(self._key("rejected"), 1)

    def _end(self, mark: str) -> None:
        self._store.set(self._key("end"), mark)
        self._has_ended = True

    def _end_mark(self) -> str:
        return self._store.get(self._key("end")).decode()


class FirstKInOrder(Coordinator):
    """`rollout.accept=in_order`: end at the K-th (`StepPlan.goal`) qualifying ticket of the contiguous resolved prefix.

    Outcomes alone decide, so there is no length bias. Each counter has two writers: the ticket's
    resolver, and the replica that completes the prefix before it and passes it on.

        ticket/<position>   counter: REJECTED or QUALIFIES once the ticket is resolved, and PASSED * (1 + number of
                            qualifying tickets before it) once all before it are resolved
    """

    def resolve(self, position: int, qualifies: bool) -> None:
        """See `Coordinator`."""
        if not qualifies:
            self._reject()
        before, outcome = _parts(self._add_owned(f"ticket/{position}", QUALIFIES if qualifies else REJECTED))
        if position == 0:
            before = 0
        # Only the second writer of a counter goes on. If each replica walked the backlog behind a late ticket, 1,024
        # tickets of 32 replicas would take 63,616 store operations instead of 3,196.
        while before is not None and outcome:
            count = before + (outcome == QUALIFIES)
            position += 1
            if count == self.plan.goal or position == self.plan.limit:
                self._end(str(position))
                return
            before, outcome = _parts(self._add_owned(f"ticket/{position}", PASSED * (1 + count)))

    def qualifying(self, below: int) -> int | None:
        """Return the number of qualifying tickets at positions under `below`; None until all are resolved."""
        return _parts(self._add_owned(f"ticket/{below}", 0))[0]

    def used(self) -> set[int]:
        """Return all positions before the end."""
        return set(range(int(self._end_mark())))


def _parts(counter: int) -> tuple[int | None, int]:
    """Return the number of qualifying tickets before this one (None if one is open), and its outcome."""
    passed, outcome = divmod(counter, PASSED)
    return passed - 1 if passed else None, outcome


class FirstKFinished(Coordinator):
    """`rollout.accept=first_finished`: end with the K-th qualifying ticket in order of arrival.

    It also ends when all tickets that may start are resolved. Faster than in order, and biased to short answers. One
    counter defines the order of arrival, so replicas agree.

        resolved       counter: resolved tickets, and `QUALIFIED` times those that qualify
        resolved/<n>   position of the n-th
    """

    shared_keys = (*Coordinator.shared_keys, "resolved")

    def resolve(self, position: int, qualifies: bool) -> None:
        """See `Coordinator`. A ticket resolved after the end waits for a later step."""
        if not qualifies:
            self._reject()
        qualified, number = divmod(self._store.add(self._key("resolved"), 1 + qualifies * QUALIFIED), QUALIFIED)
        self._store.set(self._key(f"resolved/{number}"), str(position))
        self._own_keys.add(f"resolved/{number}")
        goal, limit = self.plan.goal, self.plan.limit
        if (qualifies and qualified == goal) or (number == limit and qualified < goal):
            # Other replicas count a ticket before they write its position: `multi_get` waits for those writes.
            came = [self._key(f"resolved/{n}") for n in range(1, number + 1)]
            self._end(" ".join(found.decode() for found in self._store.multi_get(came)))

    def used(self) -> set[int]:
        """Return the positions written at the end."""
        return set(map(int, self._end_mark().split()))


ACCEPT: dict[str, type[Coordinator]] = {"in_order": FirstKInOrder, "first_finished": FirstKFinished}


def coordinate(
    store: Store, prefix: str, plan: StepPlan, replicas: int = 1, clock: Callable[[], float] = time.monotonic
) -> Coordinator:
    """Return this replica's coordinator of a step; see `Coordinator` for the parameters."""
    return ACCEPT[plan.accept](store, prefix, plan, replicas, clock)
