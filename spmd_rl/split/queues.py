"""What generating ranks share out among themselves: a step's slices, an evaluation's prompts, a probe. Pure rules.

A piece of it is claimed, free again where whoever had it is gone, and accepted once; see `work_queue.py`.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import msgspec
import torch.distributed as dist

from spmd_rl.config.schema import RolloutConfig
from spmd_rl.rollout.claims import StaticClaim
from spmd_rl.rollout.collected import RankReport
from spmd_rl.rollout.coordinator import Coordinator, coordinate
from spmd_rl.rollout.shared_step import settle
from spmd_rl.rollout.step_plan import Cursor, GroupSlice, plan_step
from spmd_rl.rollout.table import ANSWER, SliceReport
from spmd_rl.split.messages import Stats

Place = tuple[int, ...]
"""Which piece of a work: (ticket, slice), (prompt,), or () of a probe."""

_LAG = ANSWER.names.index("lag")
_report = msgspec.msgpack.Decoder(SliceReport).decode


class Claimant(NamedTuple):
    """Who asks for pieces."""

    member: int
    version: int = 0
    """Of the policy that it has loaded."""
    room: int = 1
    """How many it can take, and may."""
    takes_lapsed: bool = True
    """Whether it may have what others have had and not done."""
    replica: int = 0
    num_replicas: int = 1


class Accepted(msgspec.Struct, array_like=True):
    """A piece that counts, who made it, and the work for which it was claimed."""

    member: int
    place: Place
    number: int
    since: float = 0.0
    """When it was claimed."""
    claim: int = 0
    """The number of the claim; later ones are larger."""


class _Pieces:
    """What all queues have in common: which pieces are claimed, free again, and accepted.

    Each has `next(who)`, which lets a member have as many as there is room for, `done(piece, content, stats)`, which
    counts one of which a training rank has found `content`, and `ended`: whether nothing more is wanted.
    """

    def __init__(self, number: int, num_initial: int = 0) -> None:
        self.number, self.num_initial = number, num_initial
        """The step, or the version; and the number of pieces that may start at once."""
        self.held: dict[Place, Accepted] = {}
        """What is claimed: what it will be if it counts."""
        self.accepted: list[Accepted] = []
        self.free: list[Place] = []
        """Pieces that somebody has claimed and given back, or that nobody has claimed, in order."""
        self.lapsed: set[Place] = set()
        """Pieces that somebody has had and not done."""

    def give_back(self, member: int, place: Place | None = None) -> int:
        """Free what a member holds, or one piece of it; return the number of these pieces."""
        given = [one.place for one in self.held.values() if one.member == member and place in (None, one.place)]
        self.lapsed.update(given)
        for one in given:
            del self.held[one]
            insort(self.free, one)
        return len(given)

    def hold(self, member: int, places: Iterable[Place]) -> list[Accepted]:
        """Let a member have these pieces."""
        pieces = [Accepted(member, place, self.number) for place in places]
        self.held |= {piece.place: piece for piece in pieces}
        return pieces

    def take(self, who: Claimant, fresh: Iterable[Place]) -> list[Accepted]:
        """Let a member have free pieces, then fresh ones."""
        free = [place for place in self.free if who.takes_lapsed or place not in self.lapsed]
        places = list(islice(chain(free, fresh), who.room))
        self.free = [place for place in self.free if place not in places]
        return self.hold(who.member, places)

    def accept(self, piece: Accepted) -> None:
        """Count a piece, which is held no more."""
        del self.held[piece.place]
        self.accepted.append(piece)


class StepQueue(_Pieces):
    """The slices of one step."""

    def __init__(
        self,
        step: int,
        cursor: Cursor,
        settings: RolloutConfig,
        oldest_at: Callable[[int], int],
        priority_of: Callable[[int], float],
        before: "StepQueue | None" = None,
    ) -> None:
        """oldest_at: the oldest version that may begin the ticket at a position, where answers are carried on.

        priority_of: a ticket's, see `plan_step`.

        before: the step whose answers go on in this one, where `rollout.partial_rollout` says so.
        """
        super().__init__(step)
        self._settings, self._oldest_at = settings, oldest_at
        carried = before.carried() if before and settings.partial_rollout else []
        going_on = before.held if before and settings.partial_rollout else {}
        waiting = before.free if before and settings.partial_rollout else []
        places = [*(piece.place for piece, _, _ in carried), *going_on, *waiting]
        plan = plan_step(cursor, settings, [GroupSlice(*place) for place in places], priority_of)
        self.coordinator: Coordinator = coordinate(dist.HashStore(), f"step{step}", plan)
        self.num_initial = plan.initial_limit * plan.slices
        self._reserved: int | None = None
        """The number of a slice that is claimed from the coordinator and may not start yet."""
        self._static: dict[int, StaticClaim] = {}
        """By replica, where `rollout.claim` is static."""
        self._reports: dict[int, list[SliceReport]] = {}
        """By member."""
        self._stats: dict[int, Stats] = {}
        self.held, self.free = dict(going_on), list(waiting)
        for piece, report, stats in carried:
            self.held[piece.place] = piece
            self._count(piece, report, stats)

    @property
    def ended(self) -> bool:
        """See `_Pieces`."""
        return self.coordinator.ended()

    def next(self, who: Claimant) -> list[Accepted]:
        """See `_Pieces`."""
        if self._settings.claim == "store":
            position, kept = self.coordinator.plan.cursor.position, self.free
            self.free = [place for place in kept if self._is_young(who.version, position(place[0]))]
            old = [place for place in kept if place not in self.free]
            pieces = self.take(who, self._fresh(who.version))
            self.free = sorted(self.free + old)
            return pieces
        if who.replica not in self._static:
            self._static[who.replica] = StaticClaim(self.coordinator, who.replica, who.num_replicas)
        return self.hold(who.member, [tuple(one) for one in self._static[who.replica].next(who.room)])

    def _fresh(self, version: int) -> Iterator[Place]:
        plan = self.coordinator.plan
        while True:
            if self._reserved is None:
                self._reserved = self.coordinator.claim(1)[0]
            position, group_slice = plan.slice(self._reserved)
            if not self.coordinator.may_start(position) or not self._is_young(version, position):
                return
            self._reserved = None
            if group_slice not in plan.carried:
                yield tuple(group_slice)

    def _is_young(self, version: int, position: int) -> bool:
        return not self._settings.partial_rollout or version >= self._oldest_at(position)

    def done(self, piece: Accepted, content: bytes, stats: Stats) -> None:
        """See `_Pieces`."""
        report = _report(content)
        later = self.number - piece.number
        report.answers = [(*row[:_LAG], row[_LAG] + later, *row[_LAG + 1 :]) for row in report.answers]
        self._count(piece, report, stats)

    def _count(self, piece: Accepted, report: SliceReport, stats: Stats) -> None:
        self.accept(piece)
        self._reports.setdefault(piece.member, []).append(report)
        self._stats[piece.member] = stats
        settle(self.coordinator, report, self._settings)

    def carried(self) -> list[tuple[Accepted, SliceReport, Stats]]:
        """Return the pieces that are done and not used, as the next step shall count them."""
        used = self.used()
        reports = {(one.ticket, one.number): one for theirs in self._reports.values() for one in theirs}
        kept = []
        for piece in sorted(self.accepted, key=lambda piece: piece.place):
            if piece.place[0] not in used:
                report = reports[piece.place]
                rows = [(*row[:_LAG], row[_LAG] + 1, *row[_LAG + 1 :]) for row in report.answers]
                report = msgspec.structs.replace(report, answers=rows, reject_reason=None)
                kept.append((piece, report, Stats()))
        return kept

    def reports(self) -> list[RankReport]:
        """Return what the step's members would have told each other at its end."""
        counted, end, open = (
            sorted(self.coordinator.used_here),
            self.coordinator.end_mark(),
            sorted([*self.held, *self.free]),
        )
        carries, found = self._settings.partial_rollout, []
        for member, finished in sorted(self._reports.items()):
            stats, first = self._stats[member], not found
            found.append(
                RankReport(
                    finished=finished,
                    running=[GroupSlice(*place) for place in open] if first and carries else [],
                    used_here=counted,
                    end=end,
                    idle_seconds=min(stats.idle_seconds, stats.seconds),
                    seconds=max(stats.seconds, 1e-9),
                    num_aborted=len(self.held) * self._settings.slice_size if first and not carries else 0,
                    token_counts=stats.token_counts,
                )
            )
        return found

    @property
    def stats(self) -> list[Stats]:
        """How each member's engine fared that has done something."""
        return [stats for _, stats in sorted(self._stats.items())]

    def used(self) -> set[int]:
        """Return the tickets that the step uses up."""
        positions = self.coordinator.used([self.coordinator.end_mark()], set(self.coordinator.used_here))
        return set(map(self.coordinator.plan.cursor.ticket, positions))


class EvalQueue(_Pieces):
    """The prompts of one evaluation."""

    def __init__(self, version: int, num_prompts: int, static: bool) -> None:
        """static: they are dealt to all replicas, and not taken by whoever has time."""
        super().__init__(version, num_prompts)
        self.free = [(index,) for index in range(num_prompts)]
        self._static, self._num_left = static, num_prompts

    @property
    def ended(self) -> bool:
        """See `_Pieces`."""
        return not self._num_left

    def next(self, who: Claimant) -> list[Accepted]:
        """See `_Pieces`. A prompt at a time, or a few: whoever is slow gets fewer."""
        if not self._static:
            return self.take(who, iter(()))
        mine = [place for place in self.free if place[0] % who.num_replicas == who.replica]
        self.free = [place for place in self.free if place not in mine]
        return self.hold(who.member, mine)

    def done(self, piece: Accepted, content: bytes, stats: Stats) -> None:
        """See `_Pieces`."""
        self.accept(piece)
        self._num_left -= 1


class ProbeQueue(_Pieces):
    """What each member that was there answers to a probe, one of them at least."""

    def __init__(self, version: int, members: Iterable[int], now: float) -> None:
        """members: each is asked now for an answer of its own, which nobody claims."""
        super().__init__(version)
        self.held = {(member,): Accepted(member, (), version, now) for member in members}

    @property
    def ended(self) -> bool:
        """See `_Pieces`."""
        return bool(self.accepted) and not self.held

    def next(self, who: Claimant) -> list[Accepted]:
        """See `_Pieces`."""
        return []

    def done(self, piece: Accepted, content: bytes, stats: Stats) -> None:
        """See `_Pieces`."""
        self.held.pop((piece.member,), None)
        if all(one.member != piece.member for one in self.accepted):
            self.accepted.append(piece)

    def give_back(self, member: int, place: Place | None = None) -> int:
        """See `_Pieces`."""
        self.held.pop((member,), None)
        return 0


@dataclass(slots=True)
class StepEnd:
    """What came of a queue."""

    accepted: list[Accepted]
    """Without those that a later step will count."""
    reports: list[RankReport]
    stats: list[Stats]
