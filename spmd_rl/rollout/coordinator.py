"""The coordinator: which tickets of a step may start and when the step ends, with no process in charge.

Every replica has a `Coordinator` over the store that all share; the rules are functions of what stands there:

    claimed             counter: slices handed out so far
    rejected            counter: resolved tickets that do not qualify (each lets one more start)
    slices/<position>   counter: slices of a ticket whose verdicts are all in, where a ticket has several;
                        slices/<position>/<n>: what was answered
    end                 written when the step has ended: which tickets it uses
    left/<number>       slices under way on a replica that knows of the end, where replicas do not meet at it
    joined              counter: replicas that take part until the end alone, and leave what they have to others

`rollout.accept` names the rule that ends a step, each a subclass. The number of store operations per ticket does not
grow with the number of replicas, and all replicas together look `POLLS_PER_SECOND` times a second for news.

It knows no engines, prompts, scores or turns. `bench.virtual.simulate` drives this code on a virtual clock.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from spmd_rl.rollout.step_plan import StepPlan

POLLS_PER_SECOND = 5_000
"""Polls of all replicas together, of two operations each. A TCPStore answers some 35,000 operations a second."""
REJECTED, QUALIFIES, PASSED = 1, 2, 4
"""What a ticket's counter is the sum of, see `FirstKInOrder`. The lowest two bits: its outcome, 0 while it is open. The
bits above: 0 while an earlier ticket is open, then 1 + the number of qualifying tickets before it. In one counter,
because one atomic addition must both say the one and learn the other."""
QUALIFIED = 1 << 32
"""See `FirstKFinished`; more than the tickets of any step."""


class Store(Protocol):
    """The part of a `torch.distributed.Store` that a coordinator needs."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which begins at 0, and return its new value."""
        ...

    def set(self, key: str, value: str | bytes, /) -> None:
        """Write a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return a value that is known to be there."""
        ...

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return the values of all keys, once they are there."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys are there."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Delete a key; return whether it was there."""
        ...


class Coordinator:
    """One step as one replica sees it; `coordinate` makes the one that `rollout.accept` names."""

    shared_keys: tuple[str, ...] = ("claimed", "rejected", "end", "joined")

    def __init__(
        self, store: Store, prefix: str, plan: StepPlan, replicas: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`prefix`: of this step's keys. `replicas`: how many share the store. `clock`: paces the looks, in seconds."""
        self.plan = plan
        self.pause = replicas / POLLS_PER_SECOND
        """Seconds between two looks of this replica, at least."""
        self._store, self._prefix, self._clock = store, prefix, clock
        self._own_keys: set[str] = set()
        self._num_rejected, self._has_ended, self._looked_at = 0, False, -math.inf

    def claim(self, count: int) -> range:
        """Claim the next `count` slices, as numbers for `StepPlan.slice`.

        They may lie beyond what may start: then the caller keeps them, and starts them later or never.
        """
        end = self._store.add(self._key("claimed"), count)
        return range(end - count, end)

    def may_start(self, position: int) -> bool:
        """Return whether this ticket may start: the goal, the extra ones, and one for each that did not qualify."""
        if position < self.plan.initial_limit:
            return True
        self._look()
        return position < min(self.plan.limit, self.plan.initial_limit + self._num_rejected)

    def merge_slices(self, position: int, number: int, answers: bytes) -> list[bytes] | None:
        """Store the answers of a slice; return those of all its ticket's slices if it is the last of them, or None."""
        if self.plan.slices == 1:
            return [answers]
        key = f"slices/{position}"
        self._store.set(self._key(f"{key}/{number}"), answers)
        self._own_keys.add(f"{key}/{number}")
        if self._add_owned(key, 1) < self.plan.slices:
            return None
        return [self._store.get(self._key(f"{key}/{n}")) for n in range(self.plan.slices)]

    def resolve(self, position: int, qualifies: bool) -> None:
        """Say that all verdicts of this ticket are in, and whether it qualifies."""
        raise NotImplementedError

    def used(self) -> set[int]:
        """Return the positions that the step uses up, which must have ended; equal on all replicas."""
        raise NotImplementedError

    def used_tickets(self) -> list[int]:
        """Return the tickets that the step uses up, ascending; see `used`."""
        return sorted(map(self.plan.cursor.ticket, self.used()))

    def ended(self) -> bool:
        """Return whether the step has ended, as far as this replica knows."""
        self._look()
        return self._has_ended

    @property
    def num_rejected(self) -> int:
        """The number of resolved tickets that do not qualify, as far as this replica knows."""
        return self._num_rejected

    def join(self) -> int:
        """Take part until the end alone; return which of these replicas this one is, from 0.

        One that joins after the end finds it before it claims, and leaves nothing. So replicas that know of the end may
        count differently.
        """
        return self._store.add(self._key("joined"), 1) - 1

    @property
    def num_joined(self) -> int:
        """The number of replicas that have joined."""
        return self._store.add(self._key("joined"), 0)

    def leave(self, number: int, slices: bytes) -> None:
        """Write down the slices that a replica has under way at the end."""
        self._store.set(self._key(f"left/{number}"), slices)
        self._own_keys.add(f"left/{number}")

    def left(self, numbers: Sequence[int]) -> list[bytes] | None:
        """Return what was written with `leave` under these numbers; None until all of it is there."""
        keys = [self._key(f"left/{number}") for number in numbers]
        return [self._store.get(key) for key in keys] if not keys or self._store.check(keys) else None

    def forget(self, shared: bool) -> None:
        """Delete this replica's keys, and the common ones if `shared`; only when no replica can still read them."""
        for name in sorted({*self._own_keys, *(self.shared_keys if shared else ())}):
            self._store.delete_key(self._key(name))
        self._own_keys.clear()

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _add_owned(self, name: str, amount: int) -> int:
        """Add to a counter and return its value; the replica that makes the counter deletes it in `forget`."""
        value = self._store.add(self._key(name), amount)
        if value == amount:
            self._own_keys.add(name)
        return value

    def _look(self) -> None:
        """Learn what other replicas have written, unless the last look was a moment ago."""
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
    """`rollout.accept=in_order`: the step ends at the K-th qualifying ticket of the contiguous resolved prefix.

    So what a step uses is a function of outcomes alone, and has no length bias. A count of qualifying tickets is passed
    from position to position. Each ticket has two writers: its resolver, and whoever completes the prefix before it.
    The second of them sees both parts of the counter, and passes the count on by one ticket.

        ticket/<position>   counter: REJECTED or QUALIFIES once the ticket is resolved, and PASSED times 1 + the number
                            of qualifying tickets before it once all of these are resolved
    """

    def resolve(self, position: int, qualifies: bool) -> None:
        """See `Coordinator`."""
        if not qualifies:
            self._reject()
        before, outcome = _parts(self._add_owned(f"ticket/{position}", QUALIFIES if qualifies else REJECTED))
        if position == 0:
            before = 0
        while before is not None and outcome:
            count = before + (outcome == QUALIFIES)
            position += 1
            if count == self.plan.goal or position == self.plan.limit:
                self._end(str(position))
                return
            before, outcome = _parts(self._add_owned(f"ticket/{position}", PASSED * (1 + count)))

    def qualifying(self, below: int) -> int | None:
        """Return how many tickets at positions under `below` qualify; None until all of them are resolved."""
        return _parts(self._add_owned(f"ticket/{below}", 0))[0]

    def used(self) -> set[int]:
        """Return all positions before the end, which is what is written there."""
        return set(range(int(self._end_mark())))


def _parts(counter: int) -> tuple[int | None, int]:
    """How many tickets before this one qualify (None: not all of them are resolved), and its outcome (0: not yet)."""
    passed, outcome = divmod(counter, PASSED)
    return passed - 1 if passed else None, outcome


class FirstKFinished(Coordinator):
    """`rollout.accept=first_finished`: the step ends with the K-th ticket that qualifies, in order of arrival.

    Or when all it may start are resolved. Faster than in order, and biased to short answers. The order of arrival is
    that of one counter, so that all replicas know alike which tickets the step uses: those up to the K-th that
    qualifies. Whoever ends the step writes them down.

        resolved       counter: tickets that are resolved, and `QUALIFIED` times those of them that qualify
        resolved/<n>   the position of the n-th of them
    """

    shared_keys = (*Coordinator.shared_keys, "resolved")

    def resolve(self, position: int, qualifies: bool) -> None:
        """See `Coordinator`; a ticket that comes after the end stays unused, and waits for a later step."""
        if not qualifies:
            self._reject()
        qualified, number = divmod(self._store.add(self._key("resolved"), 1 + qualifies * QUALIFIED), QUALIFIED)
        self._store.set(self._key(f"resolved/{number}"), str(position))
        self._own_keys.add(f"resolved/{number}")
        goal, limit = self.plan.goal, self.plan.limit
        if (qualifies and qualified == goal) or (number == limit and qualified < goal):
            came = [self._key(f"resolved/{n}") for n in range(1, number + 1)]  # waits for who is about to write
            self._end(" ".join(found.decode() for found in self._store.multi_get(came)))

    def used(self) -> set[int]:
        """Return all positions that are written at the end."""
        return set(map(int, self._end_mark().split()))


ACCEPT: dict[str, type[Coordinator]] = {"in_order": FirstKInOrder, "first_finished": FirstKFinished}


def coordinate(
    store: Store, prefix: str, plan: StepPlan, replicas: int = 1, clock: Callable[[], float] = time.monotonic
) -> Coordinator:
    """Return this replica's coordinator of a step; see `Coordinator` for the parameters."""
    return ACCEPT[plan.accept](store, prefix, plan, replicas, clock)
