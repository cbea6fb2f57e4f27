"""The end of a step: from what each rank tells of it to what all ranks hold alike.

Every rank gathers the same records and finds the same used tickets, outcomes and carried parts; samples stay where
they are.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter
from statistics import fmean

import msgspec

from spmd_rl.config.schema import RlvrConfig, RolloutConfig
from spmd_rl.errors import RunFailed
from spmd_rl.rollout.collected import Collected, Finished, Outcome, joined
from spmd_rl.rollout.rounds import Part
from spmd_rl.rollout.tickets import StepTickets
from spmd_rl.types import Group


class Told(msgspec.Struct, array_like=True):
    """One rank's record of the step."""

    finished: list[Finished]
    running: list[Part]
    """begun and not finished; empty unless they are carried"""
    counted: list[int]
    """places, see `StepTickets.counted`"""
    end: str
    """see `StepTickets.end_mark`"""
    idle_seconds: float | None
    """in which its engine had nothing to do before the step's end; None on a rank that leads no replica"""
    seconds: float
    """from the step's beginning until it knew of its end"""
    num_aborted: int


@dataclass(frozen=True, slots=True)
class Harvest:
    """The step's end, equal on all ranks."""

    used: frozenset[int]
    """tickets that no later step will see"""
    outcomes: tuple[Outcome, ...]
    """of the used tickets, in order"""
    carried: frozenset[Part]
    """what its replica goes on with in the next step"""
    num_carried: int
    """answers of these"""
    bubble: float
    num_aborted: int

    def collected(self, step: int, mine: Mapping[Part, Group]) -> Collected:
        """The step as this rank sees it, which has the groups of `mine`."""
        reasons = {o.ticket: o.why_not for o in self.outcomes}
        parts: dict[int, list[Group]] = defaultdict(list)
        for part in sorted(set(mine) - self.carried):
            parts[part.ticket].append(mine[part])
        groups = {ticket: _whole(some) for ticket, some in parts.items()}
        return Collected(
            step=step,
            groups=tuple(group for ticket, group in groups.items() if ticket in reasons and reasons[ticket] is None),
            dropped=tuple(
                (group, reason) for ticket, group in groups.items() if (reason := reasons.get(ticket, "surplus"))
            ),
            outcomes=self.outcomes,
            bubble=self.bubble,
            num_aborted=self.num_aborted,
            num_carried=self.num_carried,
        )


def _whole(parts: list[Group]) -> Group:
    """Parts of one ticket, in order, as one group."""
    return Group(parts[0].prompt, parts[0].ticket, tuple(sample for part in parts for sample in part.samples))


def harvest(settings: RolloutConfig, book: StepTickets, records: list[Told]) -> Harvest:
    """What all ranks' records amount to. Checks that the tickets are whole."""
    places = book.used([r.end for r in records], {place for r in records for place in r.counted})
    used = frozenset(book.round.order.ticket(place) for place in places)
    finished = sorted([f for r in records for f in r.finished], key=attrgetter("ticket", "part"))
    running = {part for r in records for part in r.running}
    kept = [f for f in finished if f.ticket not in used and settings.carry]
    assert not any(part.ticket in used for part in running), "a used ticket is still under way"
    seconds = max(r.seconds for r in records)  # then the last has come: the others have been idle since they came
    idle = [r.idle_seconds + seconds - r.seconds for r in records if r.idle_seconds is not None]
    return Harvest(
        used=used,
        outcomes=_outcomes([f for f in finished if f.ticket in used], book.round.parts, used),
        carried=frozenset(running | {Part(f.ticket, f.part) for f in kept}),
        num_carried=settings.answers_per_part * len(running) + sum(f.num_answers for f in kept),
        bubble=fmean(idle) / seconds,
        num_aborted=sum(r.num_aborted for r in records),
    )


def _outcomes(finished: list[Finished], parts: int, used: frozenset[int]) -> tuple[Outcome, ...]:
    """One outcome per used ticket, in order; their answers lie in one piece of memory."""
    whole = [(ticket, part) for ticket in sorted(used) for part in range(parts)]
    assert [(f.ticket, f.part) for f in finished] == whole, "a ticket is lost, used twice or not whole"
    reasons = {f.ticket: f.why_not for f in finished if f.why_not}
    details = {f.ticket: f.detail for f in reversed(finished) if f.detail}
    answers = joined([f.answers for f in finished])
    bounds = list(accumulate([f.num_answers for f in finished], initial=0))[::parts]
    return tuple(
        [
            Outcome(f.ticket, f.domain, reasons.get(f.ticket), answers[begin:end], details.get(f.ticket, ""))
            for f, (begin, end) in zip(finished[::parts], pairwise(bounds), strict=True)
        ]
    )


def review(collected: Collected, cfg: RlvrConfig, rank: int) -> None:
    """Say so, once, where a step has fewer groups than it wanted. RunFailed, on all ranks alike, over error budget."""
    step, budget, wanted = collected.step, cfg.reward.error_budget, cfg.rollout.prompts_per_step
    if collected.error_share > budget:
        example = next(o.detail for o in collected.outcomes if o.detail)
        raise RunFailed(
            f"reward.error_budget={budget}: {collected.error_share:.0%} of the answers of step {step} "
            f"got no score; the first: {example}"
        )
    if rank == 0 and len(collected.accepted) < wanted:
        reasons = Counter(o.why_not for o in collected.outcomes if o.why_not)
        told = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        print(
            f"step {step}: {len(collected.accepted)} of {wanted} groups qualified among {len(collected.outcomes)} "
            f"tickets ({told}): {'it trains on fewer' if collected.accepted else 'no update'}",
            file=sys.stderr,
            flush=True,
        )
