"""The end of a step: from what each rank tells of it to what all ranks hold alike.

Every rank gathers the same records and finds the same used tickets, outcomes and carried parts; samples stay where
they are.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

import msgspec

from spmd_rl.config.schema import RlvrConfig, RolloutConfig
from spmd_rl.errors import RunFailed
from spmd_rl.rollout.collected import Collected
from spmd_rl.rollout.outcomes import Outcomes, Report, gathered
from spmd_rl.rollout.rounds import Part
from spmd_rl.rollout.tickets import StepTickets
from spmd_rl.types import Group


class Told(msgspec.Struct, array_like=True):
    """One rank's record of the step."""

    finished: Report
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
    outcomes: Outcomes
    """of the used tickets"""
    carried: frozenset[Part]
    """what its replica goes on with in the next step"""
    num_carried: int
    """answers of these"""
    bubble: float
    num_aborted: int

    def collected(self, step: int, mine: Mapping[Part, Group]) -> Collected:
        """The step as this rank sees it, which has the groups of `mine`."""
        parts: dict[int, list[Group]] = defaultdict(list)
        for part in sorted(set(mine) - self.carried):
            parts[part.ticket].append(mine[part])
        reasons = self.outcomes.reasons
        groups = [
            (_whole(some), reasons.get(ticket) if ticket in self.used else "surplus") for ticket, some in parts.items()
        ]
        return Collected(
            step=step,
            groups=tuple([group for group, why_not in groups if why_not is None]),
            dropped=tuple([(group, why_not) for group, why_not in groups if why_not is not None]),
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
    used = frozenset(map(book.round.order.ticket, places))
    outcomes, others = gathered([r.finished for r in records], used, book.round.parts)
    running = {part for r in records for part in r.running}
    kept = others if settings.carry else others[:0]
    assert not any(part.ticket in used for part in running), "a used ticket is still under way"
    seconds = max(r.seconds for r in records)  # then the last has come: the others have been idle since they came
    idle = [r.idle_seconds + seconds - r.seconds for r in records if r.idle_seconds is not None]
    return Harvest(
        used=used,
        outcomes=outcomes,
        carried=frozenset(running.union(map(Part, kept["ticket"].tolist(), kept["part"].tolist()))),
        num_carried=settings.answers_per_part * len(running) + int(kept["num_answers"].sum()),
        bubble=fmean(idle) / seconds,
        num_aborted=sum(r.num_aborted for r in records),
    )


def review(collected: Collected, cfg: RlvrConfig, rank: int) -> None:
    """Say so, once, where a step has fewer groups than it wanted. RunFailed, on all ranks alike, over error budget."""
    step, budget, wanted = collected.step, cfg.reward.error_budget, cfg.rollout.prompts_per_step
    outcomes = collected.outcomes
    if outcomes.error_share > budget:
        raise RunFailed(
            f"reward.error_budget={budget}: {outcomes.error_share:.0%} of the answers of step {step} "
            f"got no score; the first: {next(iter(outcomes.details.values()))}"
        )
    if rank == 0 and outcomes.num_accepted < wanted:
        reasons = Counter(outcomes.reasons.values())
        told = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        print(
            f"step {step}: {outcomes.num_accepted} of {wanted} groups qualified among {len(outcomes)} "
            f"tickets ({told}): {'it trains on fewer' if outcomes.num_accepted else 'no update'}",
            file=sys.stderr,
            flush=True,
        )
