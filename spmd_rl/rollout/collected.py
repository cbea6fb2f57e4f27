"""What came of one step's collection: this rank's groups, and what is known alike of everyone's (`outcomes.py`).

At the end of a step every rank gathers the same `RankReport`s and finds from them the same `StepResult`; samples stay
where they are.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np

from spmd_rl.config.schema import RlvrConfig, RolloutConfig
from spmd_rl.distributed import World
from spmd_rl.errors import RunFailed, tell
from spmd_rl.rollout.coordinator import Coordinator
from spmd_rl.rollout.filters import ADVICE
from spmd_rl.rollout.outcomes import Outcomes, SliceReport, gather_outcomes, last_segments
from spmd_rl.rollout.rounds import GroupSlice
from spmd_rl.types import Group

MAX_TEXT = 20_000
"""The most characters of a prompt or an answer in `error.txt`."""


class RankReport(msgspec.Struct, array_like=True):
    """What one rank reports to all others at the end of a step."""

    finished: list[SliceReport]
    running: list[GroupSlice]
    """Slices begun and not finished; empty unless they go on in the next step."""
    counted: list[int]
    """See `Coordinator.counted`."""
    end: str
    """See `Coordinator.end_mark`."""
    idle_seconds: float | None
    """In which its engine had nothing to do before the step's end; None on a rank that leads no replica."""
    seconds: float
    """From the step's beginning until it knew of its end."""
    num_aborted: int
    prompt_tokens: tuple[int, int] = (0, 0)
    """Of its requests: how many were asked for, and how many of these its engine had in its cache."""
    left: list[GroupSlice] = []
    """Slices begun and not finished which anybody may go on with; see `rollout.tape`."""
    leaves: bool = False
    """Whether it has other work between two steps, and may have come later than the others."""


@dataclass(frozen=True, slots=True)
class Collected:
    """One step, as this rank sees it."""

    step: int
    groups: tuple[Group, ...]
    """This rank's samples of the groups that train, in ticket order; may be empty. A ticket of several slices may have
    some of its samples here and others elsewhere."""
    dropped: tuple[tuple[Group, str], ...]
    """This rank's finished groups that do not train, each with the reason."""
    outcomes: Outcomes
    """Every rank's resolved tickets of the step; equal on all ranks."""
    bubble: float
    """The mean idle share of generation over the replicas."""
    num_aborted: int
    """Requests given up because the step had ended, over all ranks."""
    num_carried: int
    """Answers begun that go on in the next step, over all ranks."""
    cached: float | None = None
    """The share of the prompt tokens that the engines had in their caches; None without any."""
    pace: Mapping[str, float] = field(default_factory=dict)
    """Metrics of how training and generation keep up with each other, where they do not take turns."""
    failure: RunFailed | None = None
    """Why the run ends with this step, alike on all ranks: the error budget is spent."""

    def metrics(self) -> dict[str, float]:
        """Return means over all scored answers of the resolved tickets, filtered ones included; equal on all ranks.

        Greedy baselines are left out.
        """
        answers = self.outcomes.answers
        domains = self.outcomes.by_domain()
        sampled = ~answers["greedy"]
        last = answers["last"] & sampled
        scores = {domain: values for domain, rows in domains.items() if (values := _scores(rows))}
        num_accepted = self.outcomes.num_accepted
        metrics = {
            "rollout/accepted": num_accepted,
            "rollout/filtered": len(self.outcomes) - num_accepted,
            "rollout/generated_per_trained": len(self.outcomes) / max(1, num_accepted),
            "rollout/aborted": self.num_aborted,
            "rollout/carried": self.num_carried,
            "rollout/bubble": self.bubble,
            "rollout/error_share": self.outcomes.error_share,
            "rollout/zero_variance": self.outcomes.zero_variance_share,
            "tokens": int(answers["num_tokens"][sampled].sum()),
            **self.pace,
        }
        if self.cached is not None:
            metrics["rollout/prefix_cache_hit"] = self.cached
        if num_sampled := int(np.count_nonzero(last)):
            stale = last_segments(answers)[(answers["lag"] > 0) & sampled]
            metrics["rollout/response_length/mean"] = int(answers["num_answer_tokens"][sampled].sum()) / num_sampled
            metrics["rollout/truncated"] = int(np.count_nonzero(answers["truncated"] & last)) / num_sampled
            metrics["rollout/stale"] = len(np.unique(stale)) / num_sampled
        for tag, parts in self.outcomes.parts.items():
            metrics |= {f"env/{tag}/{name}": value for name, value in parts.items()}
        if missing := sum(self.outcomes.missing.values()):
            metrics["rollout/missing_package"] = missing
        for domain, count in self.outcomes.suspects.items():
            metrics[f"reward/{domain}/suspect"] = count / int(np.count_nonzero(domains[domain]["score"] > 0))
        for domain, count in self.outcomes.unproven.items():
            metrics[f"reward/{domain}/unproven"] = count / int(np.count_nonzero(domains[domain]["last"]))
        if scores:
            metrics["critic/score/mean"] = fmean(list(chain.from_iterable(scores.values())))
            metrics |= {f"score/{domain}/mean": fmean(values) for domain, values in scores.items()}
        return metrics


def _scores(answers: np.ndarray) -> list[float]:
    """The scores of the answers that have one and are no baselines."""
    return answers["score"][answers["scored"] & ~answers["greedy"]].tolist()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the end of a step means, equal on all ranks."""

    used: frozenset[int]
    """Tickets that no later step will see."""
    outcomes: Outcomes
    """Those of the used tickets."""
    carried: frozenset[GroupSlice]
    """Slices with which their replicas go on in the next step."""
    num_carried: int
    """The number of answers in these."""
    bubble: float
    """See `Collected.bubble`."""
    num_aborted: int
    cached: float | None
    """See `Collected.cached`."""

    @classmethod
    def of(cls, settings: RolloutConfig, coordinator: Coordinator, reports: list[RankReport]) -> "StepResult":
        """Find it from the reports of all ranks. AssertionError unless the tickets that are used are whole."""
        positions = coordinator.used([r.end for r in reports], {position for r in reports for position in r.counted})
        used = frozenset(map(coordinator.round.order.ticket, positions))
        finished = [report for r in reports for report in r.finished]
        running = [group_slice for r in reports for group_slice in r.running]
        assert not any(group_slice.ticket in used for group_slice in running), "a used ticket is still under way"
        kept = [r for r in finished if r.ticket not in used] if settings.partial_rollout else []
        asked = sum(r.prompt_tokens[0] for r in reports)
        seconds = max(r.seconds for r in reports)  # then the last has come: the others have been idle since they came
        idle = [
            r.idle_seconds + (0 if r.leaves else seconds - r.seconds) for r in reports if r.idle_seconds is not None
        ]
        return cls(
            used=used,
            outcomes=gather_outcomes(finished, used, coordinator.round.slices),
            carried=frozenset([*running, *(GroupSlice(r.ticket, r.number) for r in kept)]),
            num_carried=settings.slice_size * len(running) + sum(r.num_answers for r in kept),
            bubble=fmean(idle) / seconds,
            num_aborted=sum(r.num_aborted for r in reports),
            cached=sum(r.prompt_tokens[1] for r in reports) / asked if asked else None,
        )

    def collected(self, step: int, finished: Mapping[GroupSlice, Group]) -> Collected:
        """Return the step as the rank sees it that holds these finished slices."""
        slices: dict[int, list[Group]] = defaultdict(list)
        for group_slice in sorted(set(finished) - self.carried):
            slices[group_slice.ticket].append(finished[group_slice])
        reasons = self.outcomes.reasons
        groups = [(_joined(some), reasons.get(t) if t in self.used else "surplus") for t, some in slices.items()]
        return Collected(
            step=step,
            groups=tuple([group for group, reason in groups if reason is None]),
            dropped=tuple([(group, reason) for group, reason in groups if reason is not None]),
            outcomes=self.outcomes,
            bubble=self.bubble,
            num_aborted=self.num_aborted,
            num_carried=self.num_carried,
            cached=self.cached,
        )


class Generated(NamedTuple):
    """What a rank knows of a step's generation once all ranks that generate have ended it."""

    report: RankReport
    """This rank's."""
    result: StepResult
    finished: Mapping[GroupSlice, Group]
    """This rank's slices, those that are carried on included."""
    pace: Mapping[str, float] = MappingProxyType({})
    """See `Collected.pace`."""


def left_slices(
    before: Mapping[GroupSlice, int], reports: Sequence[RankReport], used: Collection[int]
) -> dict[GroupSlice, int]:
    """Return the slices that wait, begun, for somebody to go on with them after a step, and the rank that left each.

    before: those before the step.
    """
    begun = {group_slice for r in reports for group_slice in r.running}
    begun |= {GroupSlice(f.ticket, f.number) for r in reports for f in r.finished}
    waiting = {one: rank for one, rank in before.items() if one not in begun and one.ticket not in used}
    return waiting | {one: rank for rank, r in enumerate(reports) for one in r.left}


def _joined(slices: list[Group]) -> Group:
    """Slices of one ticket, in order, as one group."""
    return Group(slices[0].prompt, slices[0].ticket, tuple(sample for some in slices for sample in some.samples))


def review(collected: Collected, cfg: RlvrConfig, world: World) -> Collected:
    """[all] Print one line for answers without a score, and one where a step has fewer groups than it wants.

    Returns the step, with a `failure` if the answers without a score are more than the error budget allows.
    """
    step, budget, wanted = collected.step, cfg.reward.error_budget, cfg.rollout.prompts_per_step
    outcomes, rank = collected.outcomes, world.rank
    if outcomes.details:
        first = f"of step {step} got no score; the first: {next(iter(outcomes.details.values()))}"
        if outcomes.error_share > budget:  # alike on all ranks
            reports = world.gather("generate: answers without a score", _first_failure(collected))  # [all]
            report = min((r for r in reports if r), default=(0, 0, ""))[2]
            line = f"reward.error_budget={budget}: {outcomes.error_share:.0%} of the answers {first}"
            return replace(collected, failure=RunFailed(line, report))
        if rank == 0:
            tell(f"{outcomes.num_unscored} of {outcomes.num_answers} answers {first}")
    if rank == 0:
        _tell_missing(step, outcomes)
    if rank == 0 and outcomes.num_accepted < wanted:
        _tell_few(step, outcomes, wanted)
    return collected


def _tell_few(step: int, outcomes: Outcomes, wanted: int) -> None:
    """Print that a step trains on fewer prompts than it wants, why, and what helps against the most frequent reason."""
    accepted, reasons = outcomes.num_accepted, Counter(outcomes.reasons.values()).most_common()
    scores = outcomes.answers["score"][outcomes.answers["scored"]]
    mean = f", mean score {scores.mean():.2f}" if len(scores) else ""
    tell(
        f"step {step}: {'trains' if accepted else 'no update: it would train'} on the answers to {accepted} prompts, "
        f"not to {wanted}; {len(outcomes)} were asked{mean}, and {len(outcomes) - accepted} are of no use "
        f"({', '.join(f'{count} {reason}' for reason, count in reasons)})"
        + "".join(f": {ADVICE[reason]}" for reason, _ in reasons[:1])
    )


def _tell_missing(step: int, outcomes: Outcomes) -> None:
    """Print a line for each domain in which answers failed for want of a package."""
    for domain in dict.fromkeys(domain for domain, _ in outcomes.missing):
        counts = sorted(((n, name) for (d, name), n in outcomes.missing.items() if d == domain), reverse=True)
        named = ", ".join(f"{name} {n}" for n, name in counts[:5])
        tell(
            f"step {step}: {sum(n for n, _ in counts)} answers of {domain} failed for want of a package ({named}); "
            f"reward.{domain}.packages can give it to them"
        )


def _first_failure(collected: Collected) -> tuple[int, int, str] | None:
    """The first answer without a score among this rank's, for `error.txt`: its prompt, its answer, what was raised."""
    groups = [*collected.groups, *(group for group, _ in collected.dropped)]
    failed = [
        (s, g)
        for g in groups
        if g.ticket in collected.outcomes.details
        for s in g.samples
        if s.last and not s.verdict.scored
    ]
    if not failed:
        return None
    sample, group = min(failed, key=lambda pair: pair[0].key)
    prompt, verdict = group.prompt, sample.verdict
    told = [f"{message.role}: {message.content}" for message in prompt.messages]
    parts = {
        f"prompt {prompt.id}, domain {prompt.domain}": "\n".join(told),
        "ground truth": prompt.ground_truth,
        f"answer {sample.answer} of ticket {sample.ticket}": "\n".join(turn.text for turn in sample.turns),
        "verdict": f"{verdict.status}: {verdict.detail}\n{verdict.traceback}",
    }
    return *sample.key, "".join(f"--- {title}\n{text[:MAX_TEXT]}\n" for title, text in parts.items())
