"""`WorkQueue`: which generating rank does what, where ranks may die, stop and come back: rules, no sockets or threads.

The first training rank has it. A generating rank is a *member*: it joins, beats, claims what there is to do (slices of
a step's tickets, prompts of an evaluation, a probe), and reports each piece when the training rank that shall hold it
has it. What a member claimed and has not reported is free again once it leaves, or is silent for longer than its lease;
whatever it says from then on is refused. So each piece is accepted once, whoever does it in the end.

The rules of a step, `rollout.accept` and `rollout.claim` among them, are those of `rollout.coordinator` and `claims`,
over a store of this process.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import NamedTuple

from spmd_rl.config.schema import RolloutConfig
from spmd_rl.rollout.step_plan import Cursor
from spmd_rl.split.messages import Stats
from spmd_rl.split.pace import oldest_version, oldest_version_at
from spmd_rl.split.queues import Accepted, Claimant, EvalQueue, Place, ProbeQueue, StepEnd, StepQueue

MAX_MEMBERS, MAX_SILENT = 4096, 1024
"""Members, and those among them that have joined and have never said anything since, one for each connection: the
oldest of these goes first."""
WAIT_SECONDS = 1.0
"""A member that has asked for something to do and does not ask again in this time waits no more."""


class Limits(NamedTuple):
    """What members that may be gone tomorrow are given, in seconds."""

    lease_seconds: float = inf
    """For so long one may be silent."""
    claim_seconds: float = inf
    """For so long it may have a piece in hand, whatever it says meanwhile."""


NO_LIMITS = Limits()
"""For ranks of the same job: where one of them dies the job ends."""


class Given(NamedTuple):
    """What a claim comes to."""

    known: bool
    """Whether the queue still counts on this member."""
    ended: bool
    pieces: list[Accepted]
    begun_by: list[int | None]
    """Of each piece, the member that has begun it and left it."""


@dataclass(slots=True)
class Member:
    """One generating rank."""

    name: str
    leads: bool
    """Whether it is the first rank of its replica, which claims for all of them."""
    heard: float
    """When it last said anything."""
    fetches: bool = True
    """Whether it has no policy but those that it fetches."""
    progress: int = 0
    has_beaten: bool = False
    ready: bool = False
    """Whether its engine is built."""
    peer: bytes = b""
    """The connection by which it joined."""
    proven: bool | None = None
    """Whether the last piece that it had was done; None: it has had none. Only who is proven has more than one at a
    time, where somebody is; who has failed has no part in the others' shares."""
    asked: float = -inf
    """When it last asked for something to do that it had room for."""
    waits_since: float = inf
    """Since when it has asked in vain."""


@dataclass(slots=True)
class Horizon:
    """How far the steps go."""

    step: int = 0
    """The one that is open; 0 before the run has begun."""
    start: int = 0
    last: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    """Of the tickets that no step before the open one has used."""


class WorkQueue:
    """Not for several threads at once."""

    def __init__(
        self,
        settings: RolloutConfig,
        max_staleness: int,
        clock: Callable[[], float],
        limits: Limits = NO_LIMITS,
        tell: Callable[[str], None] = lambda line: None,
        first: int = 0,
    ) -> None:
        """clock: in seconds. tell: gets a line about whoever comes and goes. first: the number of the first member."""
        self._settings, self._max_staleness = settings, max_staleness
        self._lease, self._claim_seconds = limits
        self._clock, self._tell, self._next_number = clock, tell, first
        self.members: dict[int, Member] = {}
        self._num_claims = 0
        self.progress = 0
        """Of all members together; it only rises."""
        self.horizon = Horizon()
        self._priority_of: Callable[[int], float] = lambda ticket: 0.0
        self._queues: dict[tuple[str, int], StepQueue | EvalQueue | ProbeQueue] = {}
        self._begun: dict[Place, int] = {}
        """Slices that a member has begun and left to others."""

    # -- who is there ----------------------------------------------------------------------------------------------

    def join(self, name: str, leads: bool, peer: bytes = b"") -> int | None:
        """Return the number of a new member, which nobody has had before; None if there are too many.

        peer: the connection by which it joins; who joins again by the same one before it has begun has left.
        """
        self.expire()
        silent = [number for number, one in self.members.items() if not one.has_beaten]
        again = [number for number in silent if peer and self.members[number].peer == peer]
        if again or len(silent) >= MAX_SILENT:
            self._drop((again or silent)[0], "has not begun")
        if len(self.members) >= MAX_MEMBERS:
            return None
        number, self._next_number = self._next_number, self._next_number + 1
        self.members[number] = Member(name, leads, self._clock(), peer=peer)
        return number

    def enroll(self, number: int, name: str, leads: bool, fetches: bool = True) -> None:
        """Take a rank of the same job for a member from the beginning, under its own number."""
        self.members[number] = Member(name, leads, self._clock(), fetches, has_beaten=True, ready=True, proven=True)
        self._next_number = max(self._next_number, number + 1)

    def beat(self, member: int, progress: int, ready: bool) -> bool:
        """Hear of a member; return whether it is one."""
        self.expire()
        if (known := self.members.get(member)) is None:
            return False
        known.heard, known.has_beaten = self._clock(), True
        self.progress += max(0, progress - known.progress)
        known.progress = max(progress, known.progress)
        if ready and not known.ready:
            known.ready = True
            self.progress += 1
            self._tell(f"attached: {known.name} generates; {self.num_ready} in all")
        return True

    def leave(self, member: int) -> None:
        """Let a member go."""
        if member in self.members:
            self._drop(member, "has left")

    def expire(self) -> None:
        """Give up members that have been silent for longer than the lease, and pieces that nobody gets done."""
        now = self._clock()
        for queue in self._queues.values():
            for piece in [one for one in queue.held.values() if now - one.since > self._claim_seconds]:
                queue.give_back(piece.member, piece.place)
                if piece.member in self.members:
                    self.members[piece.member].proven = False
        for member in [number for number, one in self.members.items() if now - one.heard > self._lease]:
            self._drop(member, f"is given up: silent for more than {self._lease:g} s")

    def _drop(self, member: int, why: str) -> None:
        gone = self.members.pop(member)
        free = sum(queue.give_back(member) for queue in self._queues.values() if not queue.ended)
        left = f"; what it had begun ({free}) is free for others" if free else ""
        if self._lease < inf:
            self._tell(f"attached: {gone.name} {why}{left}; {self.num_ready} left")

    @property
    def num_ready(self) -> int:
        """The number of generating ranks whose engine is built."""
        return sum(member.ready for member in self.members.values())

    # -- what there is to do ---------------------------------------------------------------------------------------

    def begin(
        self, start: int, first: int, last: int, cursor: Cursor, priority_of: Callable[[int], float] | None = None
    ) -> None:
        """Open step `first`, and after it all to the `last`, of a run that starts from version `start`.

        priority_of: a ticket's, see `plan_step`.
        """
        self._priority_of = priority_of or self._priority_of
        self.horizon = Horizon(first, start, last, cursor)
        if first <= last:
            self._queues["step", first] = self._step_queue(None)

    def _step_queue(self, before: StepQueue | None) -> StepQueue:
        horizon, settings = self.horizon, self._settings
        order = {"step": horizon.step, "per_step": settings.prompts_per_step}
        oldest_at = partial(oldest_version_at, **order, max_staleness=self._max_staleness, start=horizon.start)
        return StepQueue(horizon.step, horizon.cursor, settings, oldest_at, self._priority_of, before)

    def ask_eval(self, version: int, num_prompts: int) -> None:
        """Have held-out prompts answered by this version."""
        self._queues["eval", version] = EvalQueue(version, num_prompts, self._settings.claim == "static")

    def ask_probe(self, version: int) -> None:
        """Have a probe answered by all members that are there and fetch."""
        asked = [number for number, one in self.members.items() if one.ready and one.fetches]
        self._queues["probe", version] = ProbeQueue(version, asked, self._clock())

    @property
    def oldest(self) -> int:
        """The oldest version that may generate for the open step."""
        return oldest_version(self.horizon.step, self._max_staleness, self.horizon.start)

    def offers_eval(self, version: int) -> bool:
        """Return whether a prompt waits for an answer by this version."""
        queue = self._queues.get(("eval", version))
        return isinstance(queue, EvalQueue) and bool(queue.free)

    def claim(self, member: int, kind: str, number: int, version: int, room: int) -> Given:
        """Let a member that has loaded `version` have some of a work's pieces, as many as it has room for."""
        self.expire()
        if (known := self.members.get(member)) is None:
            return Given(False, True, [], [])
        known.heard = self._clock()
        queue = self._queues.get((kind, number))
        if queue is None or queue.ended:
            return Given(True, True, [], [])
        leaders = [number for number, one in sorted(self.members.items()) if one.leads and one.ready]
        if member not in leaders or (version < self.oldest if kind == "step" else version != number):
            return Given(True, False, [], [])
        standing, now = [self.members[one].proven for one in leaders], self._clock()
        of = sum(one is not False for one in standing) or len(leaders)
        share = 1 if any(standing) and not known.proven else -(-queue.num_initial // of)
        if self._settings.claim == "store":  # else each gets what it is dealt
            room = max(0, min(room, share - sum(piece.member == member for piece in queue.held.values())))
        place = leaders.index(member), len(leaders)
        pieces = queue.next(Claimant(member, version, room, self._is_first(member, leaders, now), *place))
        for piece in pieces:
            self._num_claims += 1
            piece.since, piece.claim = now, self._num_claims
        known.asked = now if room > 0 else -inf
        known.waits_since = min(known.waits_since, now) if room > 0 and not pieces else inf
        begun = [self._begun.pop(piece.place, None) if kind == "step" else None for piece in pieces]
        return Given(True, False, pieces, begun)

    def _is_first(self, member: int, leaders: list[int], now: float) -> bool:
        """Return whether it is this member's turn to have what others have had and not done.

        Of those that wait: first who has proven to do what it claims, then who has waited longest. So nobody gets a
        piece again and again that it never does, under whatever number, while others ask for it.
        """
        waiting = [one for one in leaders if one == member or now - self.members[one].asked < WAIT_SECONDS]
        return member == min(
            waiting, key=lambda one: (not self.members[one].proven, self.members[one].waits_since, one)
        )

    def _held(
        self, member: int, kind: str, number: int, place: Place
    ) -> tuple[StepQueue | EvalQueue | ProbeQueue, Accepted] | None:
        open = self.horizon.step if kind == "step" and self._settings.partial_rollout else number
        queue = self._queues.get((kind, open))
        if member not in self.members or queue is None or queue.ended:
            return None
        piece = queue.held.get((member,) if kind == "probe" else place)
        if kind == "probe" and piece is None and place == ():  # who came later answers too, for those who may leave
            piece = Accepted(member, (), number, self._clock())
        is_it = piece is not None and (piece.member, piece.number, piece.place) == (member, number, place)
        return (queue, piece) if is_it else None

    def report(self, member: int, kind: str, number: int, place: Place, content: bytes, stats: Stats) -> bool:
        """Accept a piece, or refuse it (False): of whoever does not hold it, or of a work that has ended."""
        self.expire()
        if (held := self._held(member, kind, number, place)) is None:
            return False
        queue, piece = held
        self.members[member].heard, self.members[member].proven = self._clock(), True
        queue.done(piece, content, stats)
        self.progress += 1
        while kind == "step" and queue.ended and queue.number == self.horizon.step:
            queue = self._open_next(queue)
        return True

    def give_back(self, member: int, kind: str, number: int, place: Place, begun: bool) -> bool:
        """Free a piece that a member does no more. begun: others can go on with it."""
        if (held := self._held(member, kind, number, place)) is None:
            return False
        held[0].give_back(member, place)
        self.members[member].proven = self._lease == inf
        if begun:
            self._begun[place] = member
        return True

    def _open_next(self, before: StepQueue) -> StepQueue:
        horizon = self.horizon
        self.horizon = Horizon(before.number + 1, horizon.start, horizon.last, horizon.cursor.after(before.used()))
        if before.number == horizon.last:
            return before
        self._queues["step", before.number + 1] = queue = self._step_queue(before)
        return queue

    def ended(self, kind: str, number: int) -> bool:
        """Return whether a work has come to its end."""
        self.expire()
        queue = self._queues.get((kind, number))
        return queue.ended if queue else kind == "step" and 0 < number < self.horizon.step

    def take(self, kind: str, number: int) -> StepEnd:
        """Return what was accepted of a work that has ended, and forget it; of a step also the reports."""
        queue = self._queues.pop((kind, number))
        assert queue.ended, "a work is taken at its end"
        if not isinstance(queue, StepQueue):
            return StepEnd(queue.accepted, [], [])
        later = [piece for piece, _, _ in queue.carried()] if self._settings.partial_rollout else []
        return StepEnd([one for one in queue.accepted if one not in later], queue.reports(), queue.stats)
