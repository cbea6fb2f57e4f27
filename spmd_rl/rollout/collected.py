"""The result of one step, in three types:

RankReport   metadata of one rank's slices, and their cost; sent to all ranks at the end of the step
SampleTable  metadata of all samples of the used tickets, from all reports; equal on all ranks
Collected    the table, and the samples that stay on this rank
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean
from types import MappingProxyType

import msgspec
import numpy as np

from spmd_rl.base.errors import RunFailed, plural, tell
from spmd_rl.config.schema import RewardsConfig, RolloutConfig
from spmd_rl.distributed import World
from spmd_rl.rollout.coordinator import Coordinator
from spmd_rl.rollout.filters import ADVICE
from spmd_rl.rollout.step_plan import GroupSlice
from spmd_rl.rollout.table import SampleTable, SliceReport, build_table, last_segments
from spmd_rl.types import Group

NO_COUNTS = 0, 0, 0, 0
MAX_TEXT = 20_000
"""Characters of a prompt or an answer in `error.txt`."""


class RankReport(msgspec.Struct, array_like=True):
    """Report of one rank at the end of a step."""

    finished: list[SliceReport]
    running: list[GroupSlice]
    """Unfinished slices that started here; empty unless they are carried on."""
    idle_seconds: float | None
    """Engine idle time before the step's end; None unless the rank leads a replica."""
    seconds: float
    """Time from the step's start until this rank learned of its end."""
    num_aborted: int
    token_counts: tuple[int, int, int, int] = NO_COUNTS
    """(prompt tokens, cached prompt tokens, verified drafts, accepted draft tokens)."""
    pace: dict[str, float] = {}

    @classmethod
    def empty(cls) -> "RankReport":
        """Return the report of a rank that generates nothing."""
        return cls(finished=[], running=[], idle_seconds=None, seconds=0.0, num_aborted=0)


@dataclass(frozen=True, slots=True)
class Collected:
    """One step as this rank sees it."""

    step: int
    groups: tuple[Group, ...]
    """This rank's part of the groups that train, by ticket; may be empty."""
    dropped: tuple[tuple[Group, str], ...]
    """This rank's finished groups that do not train, with the reason."""
    table: SampleTable
    bubble: float
    """Mean idle share of generation over the replicas."""
    num_aborted: int
    """Aborted requests of all ranks."""
    num_carried: int
    """Answers of all ranks carried into the next step."""
    cached: float | None = None
    """Share of prompt tokens found in the engines' caches."""
    accepted_drafts: float | None = None
    """Mean accepted tokens per draft; None if none was verified."""
    pace: Mapping[str, float] = field(default_factory=dict)
    failure: RunFailed | None = None
    """Error that ends the run with this step, on all ranks."""
    carried: frozenset[GroupSlice] = frozenset()
    """Slices of all ranks that are carried on."""
    slices: Mapping[GroupSlice, Group] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        step: int,
        settings: RolloutConfig,
        coordinator: Coordinator,
        reports: Sequence[RankReport],
        finished: Mapping[GroupSlice, Group],
    ) -> "Collected":
        """Combine the reports of all ranks with this rank's finished slices."""
        used = frozenset(coordinator.used_tickets())
        slices = [report for r in reports for report in r.finished]
        running = [group_slice for r in reports for group_slice in r.running]
        assert not any(group_slice.ticket in used for group_slice in running), "a used ticket is still under way"
        kept = [r for r in slices if r.ticket not in used] if settings.partial_rollout else []
        asked, num_cached, verified, accepted = map(sum, zip(*(r.token_counts for r in reports), strict=True))
        # A rank's seconds end when it learns of the step's end; until the last rank's end its engine is idle.
        seconds = max(r.seconds for r in reports)
        idle = [r.idle_seconds + seconds - r.seconds for r in reports if r.idle_seconds is not None]
        collected = cls(
            step=step,
            groups=(),
            dropped=(),
            table=build_table(slices, used, coordinator.plan.slices),
            bubble=fmean(idle) / seconds,
            num_aborted=sum(r.num_aborted for r in reports),
            num_carried=settings.slice_size * len(running) + sum(r.num_answers for r in kept),
            cached=num_cached / asked if asked else None,
            accepted_drafts=accepted / verified if verified else None,
            carried=frozenset([*running, *(GroupSlice(r.ticket, r.number) for r in kept)]),
            pace=means([r.pace for r in reports]),
        )
        return collected.with_slices(finished)

    @classmethod
    def given(
        cls,
        step: int,
        slices: Mapping[GroupSlice, Group],
        tickets: Iterable[int],
        world: World,
        reasons: Mapping[int, str] = MappingProxyType({}),
    ) -> "Collected":
        """[all] Return a step of existing slices: rows, demonstrations, a dump. reasons: why tickets do not train, on
        every rank.
        """
        mine = [SliceReport.of(group, one.number, world.rank, version=step - 1) for one, group in slices.items()]
        everyone = world.gather("collect: given samples", mine, list[SliceReport])  # [all]
        reports = [report for theirs in everyone for report in theirs]
        for report in reports:
            report.reject_reason = reasons.get(report.ticket)
        table = build_table(reports, tickets, max((report.number + 1 for report in reports), default=1))
        collected = cls(step, groups=(), dropped=(), table=table, bubble=0.0, num_aborted=0, num_carried=0)
        return collected.with_slices(slices)

    def with_slices(self, finished: Mapping[GroupSlice, Group]) -> "Collected":
        """Return this step with more finished slices of this rank; carried ones are ignored."""
        mine = {**self.slices, **{one: group for one, group in finished.items() if one not in self.carried}}
        by_ticket: dict[int, list[Group]] = defaultdict(list)
        for group_slice in sorted(mine):
            by_ticket[group_slice.ticket].append(mine[group_slice])
        reasons, used = self.table.reasons, set(self.table.tickets.tolist())
        groups = [(_joined(some), reasons.get(t) if t in used else "surplus") for t, some in by_ticket.items()]
        return replace(
            self,
            groups=tuple([group for group, reason in groups if reason is None]),
            dropped=tuple([(group, reason) for group, reason in groups if reason is not None]),
            slices=mine,
        )

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics, equal on all ranks: means over scored answers, without baselines."""
        answers = self.table.answers
        domains = self.table.by_domain()
        sampled = ~answers["greedy"]
        last = answers["last"] & sampled
        scores = {domain: values for domain, rows in domains.items() if (values := _scores(rows))}
        num_accepted = self.table.num_accepted
        metrics = {
            "rollout/accepted": num_accepted,
            "rollout/filtered": len(self.table) - num_accepted,
            "rollout/generated_per_trained": len(self.table) / max(1, num_accepted),
            "rollout/aborted": self.num_aborted,
            "rollout/carried": self.num_carried,
            "rollout/bubble": self.bubble,
            "rollout/error_share": self.table.error_share,
            "rollout/zero_variance": self.table.zero_variance_share,
            "tokens": int(answers["num_tokens"][sampled].sum()),
            "generated_tokens": int(answers["num_answer_tokens"][sampled].sum()),
            **self.pace,
        }
        if self.cached is not None:
            metrics["rollout/prefix_cache_hit"] = self.cached
        if self.accepted_drafts is not None:
            metrics["rollout/accepted_drafts/mean"] = self.accepted_drafts
        if num_sampled := int(np.count_nonzero(last)):
            stale = last_segments(answers)[(answers["lag"] > 0) & sampled]
            metrics["rollout/response_length/mean"] = int(answers["num_answer_tokens"][sampled].sum()) / num_sampled
            metrics["rollout/truncated"] = int(np.count_nonzero(answers["truncated"] & last)) / num_sampled
            metrics["rollout/stale"] = len(np.unique(stale)) / num_sampled
        for tag, parts in self.table.parts.items():
            metrics |= {f"env/{tag}/{name}": value for name, value in parts.items()}
        if missing := sum(self.table.missing.values()):
            metrics["rollout/missing_package"] = missing
        for domain, count in self.table.suspects.items():
            metrics[f"reward/{domain}/suspect"] = count / max(1, int(np.count_nonzero(domains[domain]["score"] > 0)))
        for domain, count in self.table.unproven.items():
            metrics[f"reward/{domain}/unproven"] = count / int(np.count_nonzero(domains[domain]["last"]))
        if scores:
            metrics["critic/score/mean"] = fmean(list(chain.from_iterable(scores.values())))
            metrics |= {f"score/{domain}/mean": fmean(values) for domain, values in scores.items()}
        return metrics


def _scores(answers: np.ndarray) -> list[float]:
    return answers["score"][answers["scored"] & ~answers["greedy"]].tolist()


def means(of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each value over the ranks that have it."""
    keys = sorted({key for theirs in of_ranks for key in theirs})
    return {key: fmean([theirs[key] for theirs in of_ranks if key in theirs]) for key in keys}


def whole(groups: Iterable[Group]) -> dict[GroupSlice, Group]:
    """Return slices of groups that are their ticket's only slice."""
    return {GroupSlice(group.ticket, 0): group for group in groups}


def _joined(slices: list[Group]) -> Group:
    return Group(slices[0].prompt, slices[0].ticket, tuple(sample for some in slices for sample in some.samples))


def check_errors(collected: Collected, reward: RewardsConfig, rollout: RolloutConfig, world: World) -> Collected:
    """[all] Report answers without a score and missing groups; set `failure` if the error budget is exceeded."""
    step, budget, wanted = collected.step, reward.error_budget, rollout.prompts_per_step
    table, rank = collected.table, world.rank
    if table.details:
        first = f"of step {step} got no score; the first: {next(iter(table.details.values()))}"
        if table.error_share > budget:  # alike on all ranks
            reports = world.gather("generate: answers without a score", _first_failure(collected))  # [all]
            report = min((r for r in reports if r), default=(0, 0, ""))[2]
            line = f"reward.error_budget={budget}: {table.error_share:.0%} of the answers {first}"
            return replace(collected, failure=RunFailed(line, report))
        if rank == 0:
            tell(f"{table.num_unscored} of {table.num_answers} answers {first}")
    if rank == 0:
        _print_missing(step, table)
    if rank == 0 and table.num_accepted < wanted:
        _print_few(step, table, wanted)
    return collected


def _print_few(step: int, table: SampleTable, wanted: int) -> None:
    accepted, reasons = table.num_accepted, Counter(table.reasons.values()).most_common()
    scores = table.answers["score"][table.answers["scored"]]
    mean = f", mean score {scores.mean():.2f}" if len(scores) else ""
    tell(
        f"step {step}: {'trains' if accepted else 'no update: it would train'} on the answers to "
        f"{plural(accepted, 'prompt')}, not to {wanted}; {len(table)} were asked{mean}, "
        f"and {len(table) - accepted} are unusable ({', '.join(f'{count} {reason}' for reason, count in reasons)})"
        + "".join(f": {ADVICE[reason]}" for reason, _ in reasons[:1])
    )


def _print_missing(step: int, table: SampleTable) -> None:
    for domain in dict.fromkeys(domain for domain, _ in table.missing):
        counts = sorted(((n, name) for (d, name), n in table.missing.items() if d == domain), reverse=True)
        named = ", ".join(f"{name} {n}" for n, name in counts[:5])
        tell(
            f"step {step}: {sum(n for n, _ in counts)} answers of {domain} failed because a package is missing "
            f"({named}); reward.{domain}.packages can add it"
        )


def _first_failure(collected: Collected) -> tuple[int, int, str] | None:
    groups = [*collected.groups, *(group for group, _ in collected.dropped)]
    failed = [
        (s, g)
        for g in groups
        if g.ticket in collected.table.details
        for s in g.samples
        if s.last and not s.verdict.scored
    ]
    if not failed:
        return None
    sample, group = min(failed, key=lambda pair: pair[0].key)
    prompt, verdict = group.prompt, sample.verdict
    messages = [f"{message.role}: {message.plain_text}" for message in prompt.messages]
    parts = {
        f"prompt {prompt.id}, domain {prompt.domain}": "\n".join(messages),
        "ground truth": prompt.ground_truth,
        f"answer {sample.answer} of ticket {sample.ticket}": "\n".join(turn.text for turn in sample.turns),
        "verdict": f"{verdict.status}: {verdict.detail}\n{verdict.traceback}",
    }
    return *sample.key, "".join(f"--- {title}\n{text[:MAX_TEXT]}\n" for title, text in parts.items())
