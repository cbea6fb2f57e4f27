"""`SampleTable`: metadata of a step's samples, a row each, which ranks report to each other.

Samples stay on the rank that made them. Every rank holds all rows, in ticket order, and so decides alike what trains
and how (`learn/`). Of a trajectory's segments the last counts as the answer.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, groupby

import msgspec
import numpy as np

from spmd_rl.data import counter_seed
from spmd_rl.types import MISSING_PACKAGE, SCORED, SUSPECT, UNPROVEN, Group, Sample

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
        ("last", "?"),  # see `Sample.last`
        ("num_answer_tokens", "<i4"),
        ("num_prompt_tokens", "<i4"),  # before the first sampled one
        ("num_tokens", "<i4"),
    ]
)

AnswerRow = tuple[int, int, int, int, float, bool, bool, bool, int, bool, bool, int, int, int]

_LAST = ANSWER.names.index("last")

STEP = np.dtype(
    [
        ("ticket", "<i8"),
        ("answer", "<i4"),  # of the sample, a segment of the trajectory
        ("unit", "<i4"),  # see `Sample.unit`
        ("step", "<i4"),  # number of the turn in the trajectory, over all its segments
        ("reward", "<f8"),
        ("state", "<u8"),  # see `AgentStep.state`
        ("num_tokens", "<i4"),  # sampled ones
    ]
)

StepRow = tuple[int, int, int, int, float, int, int]


def answer_row(sample: Sample, rank: int, version: int) -> AnswerRow:
    """Return the metadata of a sample of `rank`, in a step whose policy has `version`."""
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
        sample.last,
        num_sampled,
        len(turns[0].prompt_ids),
        num_given + num_sampled,
    )


def answer_rows(rows: Iterable[AnswerRow]) -> np.ndarray:
    """Return `ANSWER` [n]."""
    return np.array([tuple(row) for row in rows], ANSWER)


def trajectories_of(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Yield each trajectory's samples, in order: one, or segments up to `Sample.last`."""
    segments: dict[int, list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: sample.key):
        segments.setdefault(sample.unit_number, []).append(sample)
        if sample.last:
            yield segments.pop(sample.unit_number)
    assert not segments, "a trajectory without its last segment"


def last_segments(answers: np.ndarray) -> np.ndarray:
    """Return the index of the last segment of each row's trajectory. answers: `ANSWER` [n]; int64 [n]."""
    if answers["last"].all():
        return np.arange(len(answers))
    order = np.lexsort((answers["answer"], answers["unit"], answers["ticket"]))
    ends = np.flatnonzero(answers["last"][order])
    found = np.empty(len(answers), np.int64)
    found[order] = order[ends[ends.searchsorted(np.arange(len(answers)))]]
    return found


def step_rows(samples: Iterable[Sample]) -> list[StepRow]:
    """Return a `STEP` row for each turn with a sampled token; empty without an agent.

    A turn without an environment's reply has no reward and a unique state. The reward of a turn without a sampled token
    is added to the previous row of its trajectory, or else to the next.
    """
    samples = list(samples)
    if not any(turn.step for sample in samples for turn in sample.turns):
        return []
    rows: list[StepRow] = []
    for trajectory in trajectories_of(samples):
        own: list[StepRow] = []
        before = 0.0  # rewards that no row has
        for number, (sample, turn) in enumerate((s, turn) for s in trajectory for turn in s.turns):
            reward = turn.step.reward if turn.step else 0.0
            if turn.token_ids:
                state = turn.step.state if turn.step else counter_seed("no state", *sample.key, number)
                places = (sample.ticket, sample.answer, sample.unit_number, number)
                own.append((*places, reward + before, state % 2**64, len(turn.token_ids)))
                before = 0.0
            elif own:
                own[-1] = (*own[-1][:4], own[-1][4] + reward, *own[-1][5:])
            else:
                before += reward
        rows += own
    return rows


class SliceReport(msgspec.Struct, array_like=True):
    """A replica's report of a slice with all its verdicts."""

    ticket: int
    number: int
    domain: str
    answers: list[AnswerRow]
    detail: str = ""
    reject_reason: str | None = None
    """Reason why the ticket does not train, in its last slice's report."""
    missing: list[str] = []
    """Missing packages, one per answer that needed one."""
    num_suspect: int = 0
    """Paid answers that look like cheats."""
    num_unproven: int = 0
    """Answers that could have made their verdicts themselves."""
    parts: dict[str, tuple[float, int]] = {}
    """Name -> (sum, count) of each part of the verdicts of an environment's episodes."""
    steps: list[StepRow] = []

    @property
    def num_answers(self) -> int:
        """Number of answers; see `Sample.last`."""
        return sum(row[_LAST] for row in self.answers)

    @classmethod
    def of(cls, group: Group, number: int, rank: int, version: int) -> "SliceReport":
        """Return the report of slice `number`; see `answer_row` for the others."""
        verdicts = [sample.verdict for sample in group.samples if sample.last]
        failed = next((verdict for verdict in verdicts if verdict.status not in SCORED), None)
        return cls(
            ticket=group.ticket,
            number=number,
            domain=group.prompt.domain,
            answers=[answer_row(sample, rank, version) for sample in group.samples],
            detail=f"{failed.status}: {failed.detail}" if failed else "",
            missing=[verdict.detail for verdict in verdicts if verdict.parts.get(MISSING_PACKAGE)],
            num_suspect=sum(SUSPECT in verdict.parts for verdict in verdicts),
            num_unproven=sum(UNPROVEN in verdict.parts for verdict in verdicts),
            steps=step_rows(group.samples),
            parts=sum_parts(group.samples),
        )


@dataclass(frozen=True, slots=True, eq=False)
class SampleTable:
    """Metadata of a step's m tickets, trained on or not, in order, and of their n samples; equal on all ranks."""

    tickets: np.ndarray
    """int64 [m]"""
    bounds: np.ndarray
    """int64 [m + 1]: rows bounds[i] : bounds[i + 1] belong to ticket i"""
    answers: np.ndarray
    """`ANSWER` [n]"""
    domains: np.ndarray
    """int32 [m]: indices into `names`"""
    names: tuple[str, ...]
    reasons: dict[int, str]
    """Ticket -> reason why it does not train."""
    details: dict[int, str]
    """Ticket -> detail of its first verdict without a score."""
    missing: dict[tuple[str, str], int] = field(default_factory=dict)
    """(domain, package) -> answers that needed the missing package."""
    suspects: dict[str, int] = field(default_factory=dict)
    """Sums of `SliceReport.num_suspect` by domain."""
    unproven: dict[str, int] = field(default_factory=dict)
    """Sums of `SliceReport.num_unproven` by domain."""
    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    """Environment tag -> means of the parts of its verdicts."""
    steps: np.ndarray = field(default_factory=lambda: np.empty(0, STEP))
    """`STEP` [k]"""

    def __len__(self) -> int:
        return len(self.tickets)

    @property
    def num_accepted(self) -> int:
        """Number of tickets that train."""
        return len(self) - len(self.reasons)

    @property
    def accepted(self) -> np.ndarray:
        """`ANSWER` rows of the tickets that train."""
        if not self.reasons:
            return self.answers
        trains = np.isin(self.tickets, list(self.reasons), invert=True)
        return self.answers[trains.repeat(np.diff(self.bounds))]

    @property
    def num_answers(self) -> int:
        """Number of answers; see `Sample.last`."""
        return int(np.count_nonzero(self.answers["last"]))

    @property
    def num_unscored(self) -> int:
        """Number of answers whose verdict is no score."""
        return int(np.count_nonzero(self.answers["last"] & ~self.answers["scored"]))

    @property
    def error_share(self) -> float:
        """Share of answers whose verdict is no score."""
        return self.num_unscored / max(1, self.num_answers)

    @property
    def zero_variance_share(self) -> float:
        """Share of groups of several scored answers, without baselines, whose scores are all equal; 0 without any."""
        rows = self.answers[self.answers["last"] & self.answers["scored"] & ~self.answers["greedy"]]
        begins = np.flatnonzero(np.diff(rows["ticket"], prepend=-1))
        several = np.diff(begins, append=len(rows)) > 1
        if not several.any():
            return 0.0
        flat = np.minimum.reduceat(rows["score"], begins) == np.maximum.reduceat(rows["score"], begins)
        return float(flat[several].mean())

    def by_domain(self) -> dict[str, np.ndarray]:
        """Return the `ANSWER` rows of each domain's answers, in order of first use."""
        domains, last = self.domains.repeat(np.diff(self.bounds)), self.answers["last"]
        return {name: self.answers[(domains == index) & last] for index, name in enumerate(self.names)}


def build_table(reports: Iterable[SliceReport], used: Iterable[int], num_slices: int) -> SampleTable:
    """Return the table of the `used` tickets, each of `num_slices` slices. AssertionError if a slice is missing."""
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
    return SampleTable(
        tickets=np.array(tickets, np.int64),
        bounds=np.array([0, *accumulate(sizes)], np.int64),
        answers=answer_rows(row for r in mine for row in r.answers),
        domains=np.array([index[slices[0].domain] for slices in groups], np.int32),
        names=names,
        reasons={r.ticket: r.reject_reason for r in mine if r.reject_reason},
        details={ticket: detail for ticket, detail in details.items() if detail},
        missing=Counter((r.domain, package) for r in mine for package in r.missing),
        suspects={name: n for name in names if (n := sum(r.num_suspect for r in mine if r.domain == name))},
        unproven={name: n for name in names if (n := sum(r.num_unproven for r in mine if r.domain == name))},
        parts={name: mean_parts(r.parts for r in mine if r.domain == name) for name in names},
        steps=np.array([tuple(row) for r in mine for row in r.steps], STEP),
    )


def sum_parts(samples: Iterable[Sample]) -> dict[str, tuple[float, int]]:
    """Return the sum and count of each part of the verdicts: environment metrics, such as `success`, and stop reasons,
    such as `stop/max_turns`.
    """
    sums: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.last and not sample.greedy and sample.verdict.scored and sample.turns[-1].step is not None:
            for name, value in sample.verdict.parts.items():
                sums[name].append(value)
    return {name: (sum(values), len(values)) for name, values in sorted(sums.items())}


def mean_parts(parts: Iterable[Mapping[str, tuple[float, int]]]) -> dict[str, float]:
    """Return each part's mean, by name."""
    pairs: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for some in parts:
        for name, pair in some.items():
            pairs[name].append(pair)
    return {name: sum(v for v, _ in found) / sum(n for _, n in found) for name, found in sorted(pairs.items())}
