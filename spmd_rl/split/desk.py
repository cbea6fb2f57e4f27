"""`Desk`: which attached rank does what, where ranks may die, stop and come back: rules without sockets or threads.

The first training rank has it. A rank of an attached job is a *member*: it joins, beats, claims what there is to do
(slices of a step's tickets, prompts of an evaluation, a probe), and reports each piece when the training rank that
shall hold it has it. What a member claimed and has not reported is free again once it leaves, or is silent for longer
than its lease; whatever it says from then on is refused. So each piece is accepted once, whoever does it in the end.

The rules of a step, `rollout.accept` among them, are those of `rollout.coordinator`, over a store of this process.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from spmd_rl.config.schema import RolloutConfig
from spmd_rl.rollout.collected import RankReport
from spmd_rl.rollout.rounds import Cursor
from spmd_rl.split.pace import oldest_version
from spmd_rl.split.works import Accepted, EvalWork, Place, ProbeWork, StepWork


class Told(NamedTuple):
    """The answer to a claim."""

    known: bool
    """Whether the desk still counts on this member."""
    ended: bool
    places: list[Place]


@dataclass(slots=True)
class Member:
    """One attached rank."""

    name: str
    leads: bool
    """Whether it is the first rank of its replica, which claims for all of them."""
    heard: float
    """When it last said anything."""
    progress: int = 0
    ready: bool = False
    """Whether its engine is built."""


@dataclass(slots=True)
class Horizon:
    """How far the steps go."""

    step: int = 0
    """The one that is open; 0 before the run has begun."""
    start: int = 0
    last: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    """Of the tickets that no step before the open one has used."""


class Desk:
    """Not for several threads at once."""

    def __init__(
        self,
        settings: RolloutConfig,
        max_staleness: int,
        lease_seconds: float,
        clock: Callable[[], float],
        tell: Callable[[str], None] = lambda line: None,
        first: int = 0,
    ) -> None:
        """clock: in seconds. tell: gets a line about whoever comes and goes. first: the number of the first member."""
        self._settings, self._max_staleness, self._lease = settings, max_staleness, lease_seconds
        self._clock, self._tell, self._numbers = clock, tell, count(first)
        self.members: dict[int, Member] = {}
        self.progress = 0
        """Of all members together; it only rises."""
        self.horizon = Horizon()
        self._works: dict[tuple[str, int], StepWork | EvalWork | ProbeWork] = {}

    # -- who is there ----------------------------------------------------------------------------------------------

    def join(self, name: str, leads: bool) -> int:
        """Return the number of a new member, which nobody has had before."""
        self.expire()
        member = next(self._numbers)
        self.members[member] = Member(name, leads, self._clock())
        return member

    def beat(self, member: int, progress: int, ready: bool) -> bool:
        """Hear of a member; return whether it is one."""
        self.expire()
        if (known := self.members.get(member)) is None:
            return False
        known.heard = self._clock()
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
        """Give up those that have been silent for longer than the lease."""
        now = self._clock()
        for member in [number for number, one in self.members.items() if now - one.heard > self._lease]:
            self._drop(member, f"is given up: silent for more than {self._lease:g} s")

    def _drop(self, member: int, why: str) -> None:
        gone = self.members.pop(member)
        free = sum(work.give_back(member) for work in self._works.values() if not work.ended)
        left = f"; what it had begun ({free}) is free for others" if free else ""
        self._tell(f"attached: {gone.name} {why}{left}; {self.num_ready} left")

    @property
    def num_ready(self) -> int:
        """The number of attached ranks whose engine is built."""
        return sum(member.ready for member in self.members.values())

    # -- what there is to do ---------------------------------------------------------------------------------------

    def begin(self, start: int, first: int, last: int, cursor: Cursor) -> None:
        """Open step `first`, and after it all to the `last`, of a run that starts from version `start`."""
        self.horizon = Horizon(first, start, last, cursor)
        if first <= last:
            self._works["step", first] = StepWork(first, cursor, self._settings)

    def ask_eval(self, version: int, num_prompts: int) -> None:
        """Have held-out prompts answered by this version."""
        self._works["eval", version] = EvalWork(num_prompts)

    def ask_probe(self, version: int) -> None:
        """Have a probe answered by all members that are there."""
        self._works["probe", version] = ProbeWork(number for number, one in self.members.items() if one.ready)

    @property
    def oldest(self) -> int:
        """The oldest version that may generate for the open step."""
        return oldest_version(self.horizon.step, self._max_staleness, self.horizon.start)

    def offers_eval(self, version: int) -> bool:
        """Return whether a prompt waits for an answer by this version."""
        work = self._works.get(("eval", version))
        return isinstance(work, EvalWork) and work.is_offered

    def claim(self, member: int, kind: str, number: int, version: int, room: int) -> Told:
        """Let a member that has loaded `version` have some of a work's pieces, as many as it has room for."""
        self.expire()
        if (known := self.members.get(member)) is None:
            return Told(False, True, [])
        known.heard = self._clock()
        work = self._works.get((kind, number))
        if work is None or work.ended:
            return Told(True, True, [])
        if version < self.oldest if kind == "step" else version != number:
            return Told(True, False, [])
        leaders = max(1, sum(one.leads and one.ready for one in self.members.values()))
        share = -(-work.num_initial // leaders) if isinstance(work, StepWork) else room
        return Told(True, False, work.next(member, room, share))

    def report(self, member: int, kind: str, number: int, place: Place, content: bytes) -> bool:
        """Accept a piece, or refuse it (False): of whoever does not hold it, or of a work that has ended."""
        self.expire()
        work = self._works.get((kind, number))
        if member not in self.members or work is None or work.ended:
            return False
        if kind != "probe" and work.held.get(place) != member:
            return False
        self.members[member].heard = self._clock()
        work.done(member, place, content)
        self.progress += 1
        if isinstance(work, StepWork) and work.ended:
            self._open_next(number, work)
        return True

    def _open_next(self, step: int, work: StepWork) -> None:
        horizon = self.horizon
        self.horizon = Horizon(step + 1, horizon.start, horizon.last, horizon.cursor.after(work.used()))
        if step < horizon.last:
            self._works["step", step + 1] = StepWork(step + 1, self.horizon.cursor, self._settings)

    def ended(self, kind: str, number: int) -> bool:
        """Return whether a work has come to its end."""
        self.expire()
        return self._works[kind, number].ended

    def take(self, kind: str, number: int) -> tuple[list[Accepted], list[RankReport]]:
        """Return what was accepted of a work that has ended, and forget it; of a step also the reports."""
        work = self._works.pop((kind, number))
        assert work.ended, "a work is taken at its end"
        return work.accepted, work.reports() if isinstance(work, StepWork) else []
