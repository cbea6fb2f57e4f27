"""What a step's rollout leaves behind: this rank's groups, and the metadata of everyone's.

Samples stay on the rank that made them. Only `Outcome`s are gathered; every rank holds all of them, in ticket order.
"""

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean

from spmd_rl.types import SCORED, Group


@dataclass(frozen=True, slots=True)
class AnswerOutcome:
    """Metadata of one sample."""

    answer: int
    status: str
    score: float
    num_answer_tokens: int
    num_tokens: int
    truncated: bool
    stale: bool
    """Some token was sampled by an older policy version than the step's."""

    @property
    def scored(self) -> bool:
        """Whether `score` means anything."""
        return self.status in SCORED


@dataclass(frozen=True, slots=True)
class Outcome:
    """Metadata of one resolved ticket."""

    ticket: int
    rank: int
    domain: str
    why_not: str | None
    """Why the group does not train; None if it does."""
    answers: tuple[AnswerOutcome, ...]
    detail: str
    """The first failed verdict's detail, if any."""


def outcome(group: Group, rank: int, why_not: str | None, version: int) -> Outcome:
    """The metadata of a finished group."""
    answers = tuple(
        AnswerOutcome(
            answer=sample.answer,
            status=sample.verdict.status,
            score=sample.verdict.score,
            num_answer_tokens=sample.num_answer_tokens,
            num_tokens=sample.num_tokens,
            truncated=sample.turns[-1].finish_reason == "length",
            stale=any(v != version for turn in sample.turns for v in turn.versions),
        )
        for sample in group.samples
    )
    failed = [s.verdict for s in group.samples if not s.verdict.scored]
    detail = f"{failed[0].status}: {failed[0].detail}" if failed else ""
    return Outcome(group.ticket, rank, group.prompt.domain, why_not, answers, detail)


@dataclass(frozen=True, slots=True)
class Collected:
    """One step's harvest."""

    step: int
    groups: tuple[Group, ...]
    """This rank's groups that train, in ticket order; may be empty."""
    dropped: tuple[tuple[Group, str], ...]
    """This rank's finished groups that do not train, each with the reason."""
    outcomes: tuple[Outcome, ...]
    """Every rank's resolved tickets of the step, in ticket order; equal on all ranks."""
    bubble: float
    """Mean idle share of generation over the ranks."""
    num_aborted: int
    """Requests aborted because the step had ended, over all ranks."""

    @property
    def accepted(self) -> tuple[Outcome, ...]:
        """Outcomes of the groups that train."""
        return tuple(o for o in self.outcomes if o.why_not is None)

    @property
    def error_share(self) -> float:
        """Share of the resolved answers whose verdict is no score."""
        answers = [a for o in self.outcomes for a in o.answers]
        return sum(not a.scored for a in answers) / max(1, len(answers))

    def metrics(self) -> dict[str, float]:
        """Means over all scored answers of the resolved tickets, filtered ones included; equal on all ranks."""
        answers = [a for o in self.outcomes for a in o.answers]
        domains: dict[str, list[float]] = defaultdict(list)
        for o in self.outcomes:
            domains[o.domain] += [a.score for a in o.answers if a.scored]
        scores = [score for domain in domains.values() for score in domain]
        metrics = {
            "rollout/accepted": len(self.accepted),
            "rollout/filtered": len(self.outcomes) - len(self.accepted),
            "rollout/aborted": self.num_aborted,
            "rollout/carried": 0,
            "rollout/bubble": self.bubble,
            "rollout/error_share": self.error_share,
            "tokens": sum(a.num_tokens for a in answers),
        }
        if answers:
            metrics["rollout/response_length/mean"] = fmean(a.num_answer_tokens for a in answers)
            metrics["rollout/truncated"] = fmean(a.truncated for a in answers)
        if scores:
            metrics["critic/score/mean"] = fmean(scores)
            metrics |= {f"score/{domain}/mean": fmean(values) for domain, values in domains.items() if values}
        return metrics
