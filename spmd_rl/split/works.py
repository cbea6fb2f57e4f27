"""What attached ranks share out among themselves: a step's slices, an evaluation's prompts, a probe. Pure rules.

A piece of it is claimed, free again where whoever had it is gone, and accepted once; see `desk.py`.
"""

from bisect import insort
from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec
import torch.distributed as dist

from spmd_rl.config.schema import RolloutConfig
from spmd_rl.rollout.collected import RankReport
from spmd_rl.rollout.coordinator import Coordinator, coordinate
from spmd_rl.rollout.rounds import Cursor, plan_round
from spmd_rl.rollout.shared_step import settle
from spmd_rl.rollout.table import SliceReport

Place = tuple[int, ...]
"""Which piece of a work: (ticket, slice), (prompt,), or () of a probe."""


class Stats(msgspec.Struct, array_like=True):
    """How a member's engine fared since it began a step."""

    idle_seconds: float = 0.0
    seconds: float = 1e-9
    prompt_tokens: tuple[int, int] = (0, 0)
    """See `RankReport`."""


class SliceDone(msgspec.Struct, array_like=True):
    """What a member reports of a slice."""

    report: SliceReport
    stats: Stats


class Accepted(msgspec.Struct, array_like=True):
    """A piece that counts, and who made it."""

    member: int
    place: Place


class Work(Protocol):
    """Something that members share out among themselves."""

    held: dict[Place, int]
    """What is claimed, and by whom."""

    def next(self, member: int, room: int, share: int) -> list[Place]:
        """Let a member have as many pieces as there is room for; no more than its share where others are there."""
        ...

    def done(self, member: int, place: Place, content: bytes) -> None:
        """Take a piece. MsgspecError if it is none."""
        ...

    def give_back(self, member: int) -> int:
        """Free what a member holds; return the number of these pieces."""
        ...

    @property
    def ended(self) -> bool:
        """Whether nothing more of it is wanted."""
        ...


class _Pieces:
    """What all works have in common: which pieces are claimed, free again, and accepted."""

    def __init__(self) -> None:
        self.held: dict[Place, int] = {}
        self.accepted: list[Accepted] = []
        self._free: list[Place] = []

    def give_back(self, member: int) -> int:
        """See `Work`."""
        places = [place for place, holder in self.held.items() if holder == member]
        for place in places:
            del self.held[place]
            insort(self._free, place)
        return len(places)

    def _take(self, member: int, room: int, share: int, fresh: Iterator[Place]) -> list[Place]:
        room = min(room, share - sum(holder == member for holder in self.held.values()))
        places: list[Place] = []
        while len(places) < room:
            place = self._free.pop(0) if self._free else next(fresh, None)
            if place is None:
                break
            self.held[place] = member
            places.append(place)
        return places

    def _accept(self, member: int, place: Place) -> None:
        del self.held[place]
        self.accepted.append(Accepted(member, place))


class StepWork(_Pieces):
    """The slices of one step."""

    def __init__(self, step: int, cursor: Cursor, settings: RolloutConfig) -> None:
        super().__init__()
        self._settings = settings
        self.coordinator: Coordinator = coordinate(dist.HashStore(), f"step{step}", plan_round(cursor, settings))
        self._reserved: int | None = None
        """The number of a slice that is claimed from the coordinator and may not start yet."""
        self._reports: dict[int, list[SliceReport]] = {}
        """By member."""
        self._stats: dict[int, Stats] = {}

    @property
    def num_initial(self) -> int:
        """The number of slices that may start at once."""
        return self.coordinator.round.initial_limit * self.coordinator.round.slices

    @property
    def ended(self) -> bool:
        """See `Work`."""
        return self.coordinator.ended()

    def next(self, member: int, room: int, share: int) -> list[Place]:
        """See `Work`."""
        return self._take(member, room, share, self._fresh())

    def _fresh(self) -> Iterator[Place]:
        while True:
            if self._reserved is None:
                self._reserved = self.coordinator.claim(1)[0]
            position, group_slice = self.coordinator.round.slice(self._reserved)
            if not self.coordinator.may_start(position):
                return
            self._reserved = None
            yield tuple(group_slice)

    def done(self, member: int, place: Place, content: bytes) -> None:
        """See `Work`."""
        done = msgspec.msgpack.decode(content, type=SliceDone)
        report = done.report
        report.ticket, report.number = place
        self._accept(member, place)
        self._reports.setdefault(member, []).append(report)
        self._stats[member] = done.stats
        settle(self.coordinator, report, self._settings)

    def reports(self) -> list[RankReport]:
        """Return what the step's members would have told each other at its end."""
        counted, end, aborted = sorted(self.coordinator.counted), self.coordinator.end_mark(), len(self.held)
        found = []
        for member, finished in sorted(self._reports.items()):
            stats = self._stats[member]
            found.append(
                RankReport(
                    finished=finished,
                    running=[],
                    counted=counted,
                    end=end,
                    idle_seconds=min(stats.idle_seconds, stats.seconds),
                    seconds=stats.seconds,
                    num_aborted=0 if found else aborted * self._settings.slice_size,
                    prompt_tokens=stats.prompt_tokens,
                )
            )
        return found

    def used(self) -> set[int]:
        """Return the tickets that the step uses up."""
        positions = self.coordinator.used([self.coordinator.end_mark()], set(self.coordinator.counted))
        return set(map(self.coordinator.round.order.ticket, positions))


class EvalWork(_Pieces):
    """The prompts of one evaluation."""

    def __init__(self, num_prompts: int) -> None:
        super().__init__()
        self._free = [(index,) for index in range(num_prompts)]
        self._num_left = num_prompts

    @property
    def ended(self) -> bool:
        """See `Work`."""
        return not self._num_left

    @property
    def is_offered(self) -> bool:
        """Whether a prompt waits for somebody to answer it."""
        return bool(self._free)

    def next(self, member: int, room: int, share: int) -> list[Place]:
        """See `Work`. A prompt at a time, or a few: whoever is slow gets fewer."""
        return self._take(member, room, share, iter(()))

    def done(self, member: int, place: Place, content: bytes) -> None:
        """See `Work`."""
        self._accept(member, place)
        self._num_left -= 1


class ProbeWork(_Pieces):
    """What each member that was there answers to a probe, one of them at least."""

    def __init__(self, members: Iterable[int]) -> None:
        super().__init__()
        self._expected = set(members)

    @property
    def ended(self) -> bool:
        """See `Work`."""
        return bool(self.accepted) and not self._expected

    def next(self, member: int, room: int, share: int) -> list[Place]:
        """See `Work`: a probe is asked of all alike, and nobody claims it."""
        return []

    def done(self, member: int, place: Place, content: bytes) -> None:
        """See `Work`."""
        if all(one.member != member for one in self.accepted):
            self.accepted.append(Accepted(member, place))
        self._expected.discard(member)

    def give_back(self, member: int) -> int:
        """See `Work`."""
        self._expected.discard(member)
        return 0
