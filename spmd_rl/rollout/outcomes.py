"""What became of a step's tickets, as metadata: one row for each answer, which its rank reports to all others.

Samples stay on the rank that made them. Every rank holds the rows of all, in ticket order, and so finds alike what
trains and how (`learn/`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from spmd_rl.types import MISSING_PACKAGE, SCORED, SUSPECT, Group, Sample

ANSWER = np.dtype(
    [
        ("ticket", "<i8"),
        ("answer", "<i4"),
        ("unit", "<i4"),  # see `Sample.unit`
        ("rank", "<i4"),  # the world rank that generated it, and holds it
        ("score", "<f8"),
        ("scored", "?"),  # whether `score` means anything
        ("wrong_format", "?"),
        ("truncated", "?"),  # ended by a token limit
        ("lag", "<i4"),  # policy versions between the one that sampled its oldest token and the step's
        ("greedy", "?"),  # a baseline, see `Sample.greedy`
        ("num_answer_tokens", "<i4"),
        ("num_prompt_tokens", "<i4"),  # before the first sampled one, which the group's samples have in common
        ("num_tokens", "<i4"),
    ]
)
"""The metadata of one sample: all that ranks report to each other of it."""

AnswerRow = tuple[int, int, int, int, float, bool, bool, bool, int, bool, int, int, int]
"""A row of `ANSWER`, as it travels."""


def answer_row(sample: Sample, rank: int, version: int) -> AnswerRow:
    """Return the metadata of a finished sample of `rank`, in a step whose policy is of `version`."""
    turns, verdict = sample.turns, sample.verdict
    num_sampled = sum(len(turn.token_ids) for turn in turns)
    num_given = sum(len(turn.prompt_ids) for turn in turns)
    lag = max((version - min(turn.versions, default=version) for turn in turns), default=0)
    return (
        sample.ticket,
        sample.answer,
        sample.unit_number,
        rank,
        verdict.score,
        verdict.status in SCORED,
        verdict.status == "wrong_format",
        turns[-1].finish_reason == "length",
        lag,
        sample.greedy,
        num_sampled,
        len(turns[0].prompt_ids),
        num_given + num_sampled,
    )


def answer_rows(rows: Iterable[AnswerRow]) -> np.ndarray:
    """Return `ANSWER` [n]."""
    return np.array([tuple(row) for row in rows], ANSWER)


class SliceReport(msgspec.Struct, array_like=True):
    """A slice of a group whose verdicts are all in, as its replica reports it."""

    ticket: int
    number: int
    domain: str
    answers: list[AnswerRow]
    detail: str = ""
    """The detail of the first verdict that is no score, if any."""
    reject_reason: str | None = None
    """Why the ticket does not train; of the slice that came last."""
    missing: list[str] = []
    """The packages that answers failed for want of, one for each such answer."""
    num_suspect: int = 0
    """Paid answers that look like cheats."""
    parts: dict[str, tuple[float, int]] = {}
    """Of episodes of an environment: the sum of each of the verdicts' parts, and how many have it."""

    @classmethod
    def of(cls, group: Group, number: int, rank: int, version: int) -> "SliceReport":
        """Report slice `number` of a group, whose samples are `group`; see `answer_row` for the others."""
        failed = next((s.verdict for s in group.samples if s.verdict.status not in SCORED), None)
        detail = f"{failed.status}: {failed.detail}" if failed else ""
        rows = [answer_row(sample, rank, version) for sample in group.samples]
        missing = [s.verdict.detail for s in group.samples if s.verdict.parts.get(MISSING_PACKAGE)]
        suspect = sum(SUSPECT in s.verdict.parts for s in group.samples)
        return cls(
            group.ticket,
            number,
            group.prompt.domain,
            rows,
            detail,
            missing=missing,
            num_suspect=suspect,
            parts=sum_parts(group.samples),
        )


def sum_parts(samples: Iterable[Sample]) -> dict[str, tuple[float, int]]:
    """Return the sum of each part of the verdicts of an environment's episodes, and how many have it."""
    sums: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.last and not sample.greedy and sample.verdict.scored and sample.turns[-1].step is not None:
            for name, value in sample.verdict.parts.items():
                sums[name].append(value)
    return {name: (sum(values), len(values)) for name, values in sorted(sums.items())}


def mean_parts(parts: Iterable[Mapping[str, tuple[float, int]]]) -> dict[str, float]:
    """Return the mean of each part, by name."""
    pairs: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for some in parts:
        for name, pair in some.items():
            pairs[name].append(pair)
    return {name: sum(v for v, _ in found) / sum(n for _, n in found) for name, found in sorted(pairs.items())}


class Outcome(NamedTuple):
    """The metadata of one resolved ticket, all its slices together."""

    ticket: int
    domain: str
    reject_reason: str | None
    """Why the group does not train; None if it does."""
    answers: np.ndarray
    """`ANSWER` [n]"""
    detail: str
    """The detail of the first verdict that is no score, if any."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """The resolved tickets of a step in order, m of them, and the n answers of them all. Iterates over `Outcome`s."""

    tickets: np.ndarray
    """int64 [m]"""
    bounds: np.ndarray
    """int64 [m + 1]: the answers of ticket i are rows bounds[i] : bounds[i + 1]"""
    answers: np.ndarray
    """`ANSWER` [n]"""
    domains: np.ndarray
    """int32 [m]: indices into `names`"""
    names: tuple[str, ...]
    """Domains, in the order in which they come."""
    reasons: dict[int, str]
    """Ticket -> why it does not train, in order; the others do."""
    details: dict[int, str]
    """Ticket -> the detail of its first verdict that is no score, in order, where there is one."""
    missing: dict[tuple[str, str], int] = field(default_factory=dict)
    """(domain, package) -> the number of answers that failed for want of the package."""
    suspects: dict[str, int] = field(default_factory=dict)
    """Domain -> the number of its paid answers that look like cheats, where there are some."""
    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    """Tag of an environment -> the mean of each part of its episodes' verdicts."""

    def __len__(self) -> int:
        return len(self.tickets)

    def __iter__(self) -> Iterator[Outcome]:
        columns = zip(self.tickets.tolist(), self.domains.tolist(), pairwise(self.bounds.tolist()), strict=True)
        for ticket, domain, (begin, end) in columns:
            answers, detail = self.answers[begin:end], self.details.get(ticket, "")
            yield Outcome(ticket, self.names[domain], self.reasons.get(ticket), answers, detail)

    @property
    def num_accepted(self) -> int:
        """The number of tickets that train."""
        return len(self) - len(self.reasons)

    @property
    def accepted(self) -> np.ndarray:
        """The `ANSWER` rows of the tickets that train."""
        if not self.reasons:
            return self.answers
        trains = np.isin(self.tickets, list(self.reasons), invert=True)
        return self.answers[trains.repeat(np.diff(self.bounds))]

    @property
    def error_share(self) -> float:
        """The share of the answers whose verdict is no score."""
        return int(np.count_nonzero(~self.answers["scored"])) / max(1, len(self.answers))

    def by_domain(self) -> dict[str, np.ndarray]:
        """Return the `ANSWER` rows of each domain; domains in the order in which they come."""
        domains = self.domains.repeat(np.diff(self.bounds))
        return {name: self.answers[domains == index] for index, name in enumerate(self.names)}


def gather_outcomes(reports: Iterable[SliceReport], used: Iterable[int], num_slices: int) -> Outcomes:
    """Return what the reports of all replicas say of the `used` tickets, each of `num_slices` slices.

    AssertionError unless these are whole; reports of other tickets are passed over.
    """
    tickets = sorted(used)
    wanted = set(tickets)
    mine = sorted((r for r in reports if r.ticket in wanted), key=lambda r: (r.ticket, r.number))
    expected = [(ticket, number) for ticket in tickets for number in range(num_slices)]
    assert [(r.ticket, r.number) for r in mine] == expected, "a ticket is lost, used twice or not whole"
    groups = [list(slices) for _, slices in groupby(mine, key=lambda r: r.ticket)]
    names = tuple(dict.fromkeys(r.domain for r in mine))
    index = {name: i for i, name in enumerate(names)}
    sizes = [sum(len(r.answers) for r in slices) for slices in groups]
    details = {slices[0].ticket: next((r.detail for r in slices if r.detail), "") for slices in groups}
    return Outcomes(
        tickets=np.array(tickets, np.int64),
        bounds=np.array([0, *accumulate(sizes)], np.int64),
        answers=answer_rows(row for r in mine for row in r.answers),
        domains=np.array([index[slices[0].domain] for slices in groups], np.int32),
        names=names,
        reasons={r.ticket: r.reject_reason for r in mine if r.reject_reason},
        details={ticket: detail for ticket, detail in details.items() if detail},
        missing=Counter((r.domain, package) for r in mine for package in r.missing),
        suspects={name: n for name in names if (n := sum(r.num_suspect for r in mine if r.domain == name))},
        parts={name: mean_parts(r.parts for r in mine if r.domain == name) for name in names},
    )
