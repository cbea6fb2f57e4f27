"""What a step's rollout leaves behind: this rank's groups, and the metadata of everyone's.

Samples stay on the rank that made them. Only their metadata are gathered, a row of `ANSWER` for each; every rank holds
all of them, in ticket order, and finds alike what trains and how. With many ranks most rows are of others: nothing here
is done row by row, except where a rank writes those of its own samples.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from spmd_rl.types import SCORED, Group, Sample

ANSWER = np.dtype(
    [
        ("ticket", "<i8"),
        ("answer", "<i4"),
        ("rank", "<i4"),  # that generated it, and holds it
        ("score", "<f8"),
        ("scored", "?"),  # whether `score` means anything
        ("wrong_format", "?"),
        ("truncated", "?"),
        ("stale", "?"),  # some token was sampled by an older policy version than the step's
        ("greedy", "?"),  # a baseline, see `Sample.greedy`
        ("num_answer_tokens", "<i4"),
        ("num_prompt_tokens", "<i4"),  # before the first sampled one, which the group's samples have in common
        ("num_tokens", "<i4"),
    ]
)
"""Metadata of one sample: all that ranks tell each other of it, 41 bytes."""


def answer_row(sample: Sample, rank: int, version: int) -> tuple[Any, ...]:
    """The metadata of a finished sample of `rank`, in a step whose policy is of `version`."""
    turns, verdict = sample.turns, sample.verdict
    num_sampled = num_given = num_fresh = 0
    for turn in turns:
        num_sampled += len(turn.token_ids)
        num_given += len(turn.prompt_ids)
        num_fresh += turn.versions.count(version)
    return (
        sample.ticket,
        sample.answer,
        rank,
        verdict.score,
        verdict.status in SCORED,
        verdict.status == "wrong_format",
        turns[-1].finish_reason == "length",
        num_fresh < num_sampled,
        sample.greedy,
        num_sampled,
        len(turns[0].prompt_ids),
        num_given + num_sampled,
    )


def joined(answers: Iterable[bytes | np.ndarray]) -> np.ndarray:
    """Rows of `ANSWER` laid end to end, to be read: `np.concatenate` takes thousands of times as long over them."""
    return np.frombuffer(b"".join(answers), ANSWER)


class Finished(msgspec.Struct, array_like=True):
    """A part of a ticket whose verdicts are all in, as its replica tells the others."""

    ticket: int
    part: int
    domain: str
    answers: bytes
    """rows of `ANSWER`"""
    detail: str
    """The first failed verdict's detail, if any."""
    why_not: str | None = None
    """Of the last part to come: why the ticket does not train."""

    @property
    def num_answers(self) -> int:
        """Rows."""
        return len(self.answers) // ANSWER.itemsize


def finished(group: Group, part: int, rank: int, version: int) -> Finished:
    """The metadata of a finished part."""
    rows = np.array([answer_row(sample, rank, version) for sample in group.samples], ANSWER)
    failed = next((s.verdict for s in group.samples if s.verdict.status not in SCORED), None)
    detail = f"{failed.status}: {failed.detail}" if failed else ""
    return Finished(group.ticket, part, group.prompt.domain, rows.tobytes(), detail)


class Outcome(msgspec.Struct, frozen=True, eq=False):
    """Metadata of one resolved ticket, all its parts together."""

    ticket: int
    domain: str
    why_not: str | None
    """Why the group does not train; None if it does."""
    answers: np.ndarray
    """`ANSWER` [n]"""
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
        return _error_share(joined(o.answers for o in self.outcomes))

    def metrics(self) -> dict[str, float]:
        """Means over all scored answers of the resolved tickets, filtered ones included; equal on all ranks.

        Greedy baselines are left out.
        """
        tickets: dict[str, list[np.ndarray]] = defaultdict(list)
        for o in self.outcomes:
            tickets[o.domain].append(o.answers)
        domains = {domain: joined(answers) for domain, answers in tickets.items()}
        answers = joined(domains.values())
        scores = {domain: values for domain, rows in domains.items() if (values := _scores(rows))}
        num_accepted = len(self.accepted)
        sampled = ~answers["greedy"]
        metrics = {
            "rollout/accepted": num_accepted,
            "rollout/filtered": len(self.outcomes) - num_accepted,
            "rollout/aborted": self.num_aborted,
            "rollout/carried": self.num_carried,
            "rollout/bubble": self.bubble,
            "rollout/error_share": _error_share(answers),
            "tokens": int(answers["num_tokens"][sampled].sum()),
        }
        if num_sampled := int(np.count_nonzero(sampled)):
            metrics["rollout/response_length/mean"] = int(answers["num_answer_tokens"][sampled].sum()) / num_sampled
            metrics["rollout/truncated"] = int(np.count_nonzero(answers["truncated"] & sampled)) / num_sampled
            metrics["rollout/stale"] = int(np.count_nonzero(answers["stale"] & sampled)) / num_sampled
        if scores:
            metrics["critic/score/mean"] = fmean(list(chain.from_iterable(scores.values())))
            metrics |= {f"score/{domain}/mean": fmean(values) for domain, values in scores.items()}
        return metrics


def _scores(answers: np.ndarray) -> list[float]:
    """Of those that are scored and no baselines."""
    return answers["score"][answers["scored"] & ~answers["greedy"]].tolist()


def _error_share(answers: np.ndarray) -> float:
    return int(np.count_nonzero(~answers["scored"])) / max(1, len(answers))
