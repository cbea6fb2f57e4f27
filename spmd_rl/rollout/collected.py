"""What a step's rollout leaves behind: this rank's groups, and the metadata of everyone's.

Samples stay on the rank that made them. Only `AnswerOutcome`s are gathered; every rank holds all of them, in ticket
order, and finds alike which groups train.
"""

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean

import msgspec

from spmd_rl.types import SCORED, Group, Sample


class AnswerOutcome(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Metadata of one sample: all that ranks tell each other of it."""

    answer: int
    rank: int
    """that generated it, and holds it"""
    scored: bool
    """Whether `score` means anything."""
    wrong_format: bool
    score: float
    num_answer_tokens: int
    num_tokens: int
    truncated: bool
    stale: bool
    """Some token was sampled by an older policy version than the step's."""
    greedy: bool = False
    """A baseline, see `Sample.greedy`."""
    num_prompt_tokens: int = 0
    """tokens before the first sampled one, which the group's samples have in common"""


def answer_outcome(sample: Sample, rank: int, version: int) -> AnswerOutcome:
    """The metadata of a finished sample of `rank`, in a step whose policy is of `version`."""
    turns, status = sample.turns, sample.verdict.status
    num_answer_tokens = sample.num_answer_tokens
    return AnswerOutcome(
        answer=sample.answer,
        rank=rank,
        scored=status in SCORED,
        wrong_format=status == "wrong_format",
        score=sample.verdict.score,
        num_answer_tokens=num_answer_tokens,
        num_tokens=sample.num_tokens,
        truncated=turns[-1].finish_reason == "length",
        stale=sum([turn.versions.count(version) for turn in turns]) < num_answer_tokens,
        greedy=sample.greedy,
        num_prompt_tokens=len(turns[0].prompt_ids),
    )


class Finished(msgspec.Struct, array_like=True, frozen=True):
    """A part of a ticket whose verdicts are all in, as its replica tells the others."""

    ticket: int
    part: int
    domain: str
    answers: tuple[AnswerOutcome, ...]
    detail: str
    """The first failed verdict's detail, if any."""


def finished(group: Group, part: int, rank: int, version: int) -> Finished:
    """The metadata of a finished part."""
    answers = tuple(answer_outcome(sample, rank, version) for sample in group.samples)
    failed = [s.verdict for s in group.samples if not s.verdict.scored]
    detail = f"{failed[0].status}: {failed[0].detail}" if failed else ""
    return Finished(group.ticket, part, group.prompt.domain, answers, detail)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Metadata of one resolved ticket, all its parts together."""

    ticket: int
    domain: str
    why_not: str | None
    """Why the group does not train; None if it does."""
    answers: tuple[AnswerOutcome, ...]
    detail: str
    """The first failed verdict's detail, if any."""


@dataclass(frozen=True, slots=True)
class Collected:
    """One step's harvest."""

    step: int
    groups: tuple[Group, ...]
    """This rank's samples of the groups that train, in ticket order; may be empty. A ticket of several parts has some
    of its samples here and others elsewhere."""
    dropped: tuple[tuple[Group, str], ...]
    """This rank's finished groups that do not train, each with the reason."""
    outcomes: tuple[Outcome, ...]
    """Every rank's resolved tickets of the step, in ticket order; equal on all ranks."""
    bubble: float
    """Mean idle share of generation over the replicas."""
    num_aborted: int
    """Requests given up because the step had ended, over all ranks."""
    num_carried: int
    """Answers begun that go on in the next step, over all ranks."""

    @property
    def accepted(self) -> tuple[Outcome, ...]:
        """Outcomes of the groups that train."""
        return tuple([o for o in self.outcomes if o.why_not is None])

    @property
    def error_share(self) -> float:
        """Share of the resolved answers whose verdict is no score."""
        scored = [a.scored for o in self.outcomes for a in o.answers]
        return scored.count(False) / max(1, len(scored))

    def metrics(self) -> dict[str, float]:
        """Means over all scored answers of the resolved tickets, filtered ones included; equal on all ranks.

        Greedy baselines are left out.
        """
        answers = [a for o in self.outcomes for a in o.answers if not a.greedy]
        domains: dict[str, list[float]] = defaultdict(list)
        for o in self.outcomes:
            domains[o.domain] += [a.score for a in o.answers if a.scored and not a.greedy]
        scores = [score for domain in domains.values() for score in domain]
        num_accepted = len(self.accepted)
        metrics = {
            "rollout/accepted": num_accepted,
            "rollout/filtered": len(self.outcomes) - num_accepted,
            "rollout/aborted": self.num_aborted,
            "rollout/carried": self.num_carried,
            "rollout/bubble": self.bubble,
            "rollout/error_share": self.error_share,
            "tokens": sum([a.num_tokens for a in answers]),
        }
        if answers:
            metrics["rollout/response_length/mean"] = fmean([a.num_answer_tokens for a in answers])
            metrics["rollout/truncated"] = fmean([a.truncated for a in answers])
            metrics["rollout/stale"] = fmean([a.stale for a in answers])
        if scores:
            metrics["critic/score/mean"] = fmean(scores)
            metrics |= {f"score/{domain}/mean": fmean(values) for domain, values in domains.items() if values}
        return metrics
