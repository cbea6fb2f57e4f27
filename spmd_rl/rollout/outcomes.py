"""What became of a step's tickets, as metadata: a row for each answer, which its rank tells all others.

Every rank holds the rows of all, in ticket order, and finds alike what trains and how. With many ranks nearly all rows
are of others: nothing here is done row by row or ticket by ticket, except where a rank writes its own.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from spmd_rl.batch import concat_slices
from spmd_rl.types import SCORED, Group, Sample

ANSWER = np.dtype(
    [
        ("ticket", "<i8"),
        ("answer", "<i4"),
        ("unit", "<i4"),  # see `Sample.unit`
        ("rank", "<i4"),  # that generated it, and holds it
        ("score", "<f8"),
        ("scored", "?"),  # whether `score` means anything
        ("wrong_format", "?"),
        ("truncated", "?"),
        ("lag", "<i4"),  # by how many versions the policy that sampled its oldest token is older than the step's
        ("greedy", "?"),  # a baseline, see `Sample.greedy`
        ("num_answer_tokens", "<i4"),
        ("num_prompt_tokens", "<i4"),  # before the first sampled one, which the group's samples have in common
        ("num_tokens", "<i4"),
    ]
)
"""Metadata of one sample: all that ranks tell each other of it, 48 bytes."""


def answer_row(sample: Sample, rank: int, version: int) -> tuple[Any, ...]:
    """The metadata of a finished sample of `rank`, in a step whose policy is of `version`."""
    turns, verdict = sample.turns, sample.verdict
    num_sampled = num_given = lag = 0
    for turn in turns:
        num_sampled += len(turn.token_ids)
        num_given += len(turn.prompt_ids)
        lag = max(lag, version - min(turn.versions, default=version))
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


def joined(answers: Iterable[bytes]) -> np.ndarray:
    """Rows of `ANSWER` laid end to end, to be read."""
    return np.frombuffer(b"".join(answers), ANSWER)


PART = np.dtype([("ticket", "<i8"), ("part", "<i4"), ("domain", "<i4"), ("num_answers", "<i4")])
"""A part of a ticket whose verdicts are all in; `domain` is a place in `Report.domains`."""


@dataclass(slots=True)
class Finished:
    """A part of a ticket whose verdicts are all in, on the replica that has it."""

    ticket: int
    part: int
    domain: str
    answers: bytes
    """rows of `ANSWER`"""
    detail: str
    """The first failed verdict's detail, if any."""
    why_not: str | None = None
    """Of the last part to come: why the ticket does not train."""


def finished(group: Group, part: int, rank: int, version: int) -> Finished:
    """The metadata of a finished part."""
    rows = np.array([answer_row(sample, rank, version) for sample in group.samples], ANSWER)
    failed = next((s.verdict for s in group.samples if s.verdict.status not in SCORED), None)
    detail = f"{failed.status}: {failed.detail}" if failed else ""
    return Finished(group.ticket, part, group.prompt.domain, rows.tobytes(), detail)


class Report(msgspec.Struct, array_like=True, frozen=True):
    """All that a replica has finished in a step, as it tells the others: what is rare is told by ticket."""

    parts: bytes
    """rows of `PART`, in any order"""
    answers: bytes
    """rows of `ANSWER`, part by part"""
    domains: tuple[str, ...]
    details: tuple[tuple[int, int, str], ...]
    """(ticket, part, the first failed verdict's detail)"""
    reasons: tuple[tuple[int, str], ...]
    """(ticket, why it does not train)"""

    @classmethod
    def of(cls, finished: Collection[Finished]) -> "Report":
        """These parts."""
        domains = {domain: place for place, domain in enumerate(dict.fromkeys([f.domain for f in finished]))}
        rows = [(f.ticket, f.part, domains[f.domain], len(f.answers) // ANSWER.itemsize) for f in finished]
        return cls(
            parts=np.array(rows, PART).tobytes(),
            answers=b"".join([f.answers for f in finished]),
            domains=tuple(domains),
            details=tuple([(f.ticket, f.part, f.detail) for f in finished if f.detail]),
            reasons=tuple([(f.ticket, f.why_not) for f in finished if f.why_not]),
        )


class Outcome(NamedTuple):
    """Metadata of one resolved ticket, all its parts together."""

    ticket: int
    domain: str
    why_not: str | None
    """Why the group does not train; None if it does."""
    answers: np.ndarray
    """`ANSWER` [n]"""
    detail: str
    """The first failed verdict's detail, if any."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """Resolved tickets in order, m of them, and the n answers of them all. Iterates over `Outcome`s."""

    tickets: np.ndarray
    """int64 [m]"""
    bounds: np.ndarray
    """int64 [m + 1]: the answers of ticket i are rows bounds[i] : bounds[i + 1]"""
    answers: np.ndarray
    """`ANSWER` [n]"""
    domains: np.ndarray
    """int32 [m]: places in `names`"""
    names: tuple[str, ...]
    reasons: dict[int, str]
    """by ticket, in order: why it does not train; the others do"""
    details: dict[int, str]
    """by ticket, in order: the first failed verdict's detail, where there is one"""

    def __len__(self) -> int:
        return len(self.tickets)

    def __iter__(self) -> Iterator[Outcome]:
        columns = zip(self.tickets.tolist(), self.domains.tolist(), pairwise(self.bounds.tolist()), strict=True)
        for ticket, domain, (begin, end) in columns:
            answers, detail = self.answers[begin:end], self.details.get(ticket, "")
            yield Outcome(ticket, self.names[domain], self.reasons.get(ticket), answers, detail)

    @property
    def num_accepted(self) -> int:
        """Tickets that train."""
        return len(self) - len(self.reasons)

    @property
    def accepted(self) -> np.ndarray:
        """`ANSWER` rows of the tickets that train."""
        if not self.reasons:
            return self.answers
        trains = np.isin(self.tickets, list(self.reasons), invert=True)
        return self.answers[trains.repeat(np.diff(self.bounds))]

    @property
    def error_share(self) -> float:
        """Share of the answers whose verdict is no score."""
        return int(np.count_nonzero(~self.answers["scored"])) / max(1, len(self.answers))

    def by_domain(self) -> dict[str, np.ndarray]:
        """`ANSWER` rows, by domain; domains in the order in which they come."""
        if len(self.names) == 1:
            return {self.names[0]: self.answers}
        codes, first = np.unique(self.domains, return_index=True)
        of_answers = self.domains.repeat(np.diff(self.bounds))
        return {self.names[code]: self.answers[of_answers == code] for code in codes[first.argsort()].tolist()}


def gathered(reports: Sequence[Report], used: frozenset[int], num_parts: int) -> tuple[Outcomes, np.ndarray]:
    """What all replicas' reports say of the `used` tickets, each of so many parts; and the `PART` rows of the others.

    The tickets must be whole.
    """
    parts, names = _with_common_domains(reports)
    order = np.lexsort((parts["part"], parts["ticket"]))
    tickets = np.sort(np.fromiter(used, np.int64, len(used)))
    others = parts[:0]
    if len(parts) > num_parts * len(used):
        is_used = np.isin(parts["ticket"][order], tickets)
        order, others = order[is_used], parts[order[~is_used]]
    mine, lengths = parts[order], parts["num_answers"].astype(np.int64)
    whole = np.array_equal(mine["ticket"], tickets.repeat(num_parts))
    assert whole and (mine["part"] == np.arange(len(mine)) % num_parts).all(), (
        "a ticket is lost, used twice or not whole"
    )
    begins, lengths = (lengths.cumsum() - lengths)[order], lengths[order]
    reasons = sorted(chain.from_iterable(report.reasons for report in reports))
    details = sorted(chain.from_iterable(report.details for report in reports), reverse=True)
    first_details = {ticket: detail for ticket, _, detail in details if ticket in used}
    outcomes = Outcomes(
        tickets=tickets,
        bounds=np.concatenate(([0], lengths.cumsum()[num_parts - 1 :: num_parts])),
        answers=concat_slices(joined([report.answers for report in reports]), begins, lengths),
        domains=mine["domain"][::num_parts],
        names=names,
        reasons={ticket: reason for ticket, reason in reasons if ticket in used},
        details=dict(reversed(first_details.items())),
    )
    return outcomes, others


def _with_common_domains(reports: Sequence[Report]) -> tuple[np.ndarray, tuple[str, ...]]:
    """`PART` rows of all reports, end to end, whose domains are places in one list; and that."""
    names = tuple(dict.fromkeys(chain.from_iterable(report.domains for report in reports)))
    parts = np.frombuffer(b"".join([report.parts for report in reports]), PART)
    if any(report.domains != names[: len(report.domains)] for report in reports):
        places = [np.array([names.index(name) for name in report.domains], np.int32) for report in reports]
        numbers = [len(report.parts) // PART.itemsize for report in reports]
        shift = np.array([0, *accumulate(map(len, places))][:-1]).repeat(numbers)
        parts = parts.copy()
        parts["domain"] = np.concatenate(places)[parts["domain"] + shift]
    return parts, names
