"""Rows of metadata: what a rank packs is what all read, and columns say what a walk over the samples would."""

from array import array
from itertools import pairwise
from random import Random
from statistics import fmean

import msgspec
import numpy as np
import pytest

from spmd_rl.config.schema import FilterConfig
from spmd_rl.rollout.collected import Collected
from spmd_rl.rollout.filters import reject_reason
from spmd_rl.rollout.table import ANSWER, SliceReport, answer_row, answer_rows, build_table
from spmd_rl.types import MISSING_PACKAGE, SUSPECT, UNPROVEN, Group, Message, Prompt, Sample, Turn, Verdict
from tests.fakes import tickets_of

STATUSES = ("ok", "ok", "ok", "wrong_format", "timeout", "error")
VERSION = 3


def turn(draw: Random, old: bool) -> Turn:
    n = draw.randrange(1, 9)
    versions = [VERSION] * n
    versions[0] -= old
    return Turn(
        array("i", range(draw.randrange(1, 5))),
        array("i", range(n)),
        array("f", [-1.0] * n),
        array("i", versions),
        draw.choice(["stop", "length"]),
    )


def group(ticket: int, num_answers: int = 6) -> Group:
    """Answers of one to three turns, of all kinds of verdicts; the last one is a baseline."""
    draw = Random(ticket)
    samples = []
    for answer in range(num_answers):
        turns = tuple(turn(draw, old=draw.random() < 0.2) for _ in range(draw.randrange(1, 4)))
        status = draw.choice(STATUSES)
        score = draw.random() if status in ("ok", "wrong_format") else float("nan")
        verdict = Verdict(status, score, detail=f"why {answer}")
        samples.append(Sample(ticket, answer, turns, verdict, greedy=answer == num_answers - 1))
    return Group(Prompt(f"{ticket:032x}", (Message("user", "?"),), "abc"[ticket % 3], ""), ticket, tuple(samples))


def rows_of(some: Group, rank: int = 5) -> np.ndarray:
    return answer_rows(answer_row(s, rank, VERSION) for s in some.samples)


def num_sampled(s: Sample) -> int:
    return sum(len(turn.token_ids) for turn in s.turns)


def num_tokens(s: Sample) -> int:
    return sum(len(turn.prompt_ids) for turn in s.turns) + num_sampled(s)


GROUPS = [group(10**10 + ticket) for ticket in range(12)]


def test_rows_survive_the_way_and_say_what_the_samples_say() -> None:
    reports = [SliceReport.of(g, 0, 5, VERSION) for g in GROUPS]
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(reports), type=list[SliceReport])
    table = build_table(arrived, [g.ticket for g in GROUPS], 1)
    assert [(o.ticket, o.domain, len(o.answers), o.reject_reason) for o in tickets_of(table)] == [
        (g.ticket, g.prompt.domain, 6, None) for g in GROUPS
    ]
    failed = next(s.verdict for s in GROUPS[0].samples if not s.verdict.scored)
    assert next(tickets_of(table)).detail == f"{failed.status}: {failed.detail}"
    rows = table.answers
    for row, s in zip(rows, [s for g in GROUPS for s in g.samples], strict=True):
        assert (row["ticket"], row["answer"], row["rank"]) == (*s.key, 5)
        assert (row["scored"], row["wrong_format"]) == (s.verdict.scored, s.verdict.status == "wrong_format")
        assert row["score"] == s.verdict.score or not s.verdict.scored
        assert (row["num_answer_tokens"], row["num_tokens"]) == (num_sampled(s), num_tokens(s))
        assert row["num_prompt_tokens"] == len(s.turns[0].prompt_ids)
        assert row["truncated"] == (s.turns[-1].finish_reason == "length")
        assert row["lag"] == max(VERSION - v for t in s.turns for v in t.versions)
        assert row["greedy"] == s.greedy and row["last"]
    assert any(rows["lag"]) and not all(rows["lag"])


def split(g: Group, sizes: tuple[int, ...]) -> list[Group]:
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return [Group(g.prompt, g.ticket, g.samples[begin:end]) for begin, end in pairwise(bounds)]


@pytest.mark.parametrize("seed", range(20))
def test_in_which_order_slices_are_reported_makes_no_difference(seed: int) -> None:
    """Slices of unequal size, reported in any order; the tickets of three are not used."""
    draw = Random(seed)
    sizes = draw.choice([(6,), (2, 4), (1, 2, 3)])
    parts = [SliceReport.of(part, n, 5, VERSION) for g in GROUPS for n, part in enumerate(split(g, sizes))]
    dropped = {g.ticket: draw.choice(["too hard", "zero variance"]) for g in draw.sample(GROUPS, 4)}
    for part in parts:
        part.reject_reason = dropped.get(part.ticket) if part.number == draw.randrange(len(sizes)) else None
    dropped = {part.ticket: part.reject_reason for part in parts if part.reject_reason}
    draw.shuffle(parts)
    unused = {g.ticket for g in draw.sample(GROUPS, 3)}
    used = [g for g in GROUPS if g.ticket not in unused]
    table = build_table(parts, [g.ticket for g in used], len(sizes))
    assert len(table) == len(used)
    for g, o in zip(used, tickets_of(table), strict=True):
        assert (o.ticket, o.domain, o.reject_reason) == (g.ticket, g.prompt.domain, dropped.get(g.ticket))
        assert o.answers.tobytes() == rows_of(g).tobytes()
        failed = next((s.verdict for s in g.samples if not s.verdict.scored), None)
        assert o.detail == (f"{failed.status}: {failed.detail}" if failed else "")
    kept = [g for g in used if g.ticket not in dropped]
    assert table.num_accepted == len(kept)
    assert table.accepted.tobytes() == b"".join(rows_of(g).tobytes() for g in kept)
    by_domain = table.by_domain()
    assert list(by_domain) == list(dict.fromkeys(g.prompt.domain for g in used))
    for domain, rows in by_domain.items():
        assert rows.tobytes() == b"".join(rows_of(g).tobytes() for g in used if g.prompt.domain == domain)


@pytest.mark.parametrize("wrong", ["lost", "twice", "slice lost"])
def test_a_ticket_must_be_whole(wrong: str) -> None:
    parts = [SliceReport.of(part, n, 5, VERSION) for g in GROUPS for n, part in enumerate(split(g, (3, 3)))]
    used = [g.ticket for g in GROUPS]
    if wrong == "twice":
        parts.append(parts[4])
    else:
        parts = [part for part in parts if part.ticket != GROUPS[2].ticket or (wrong == "slice lost" and part.number)]
    with pytest.raises(AssertionError, match="lost, used twice or not whole"):
        build_table(parts, used, 2)


def collected(groups: list[Group]) -> Collected:
    reports = [SliceReport.of(g, 0, 5, VERSION) for g in groups]
    for report in reports:
        report.reject_reason = "zero variance" if report.ticket % 4 == 1 else None
    return Collected(1, (), (), build_table(reports, [g.ticket for g in groups], 1), 0.25, 3, 4)


def test_metrics_are_those_of_a_walk_over_the_samples() -> None:
    samples = [s for g in GROUPS for s in g.samples if not s.greedy]
    everything = [s for g in GROUPS for s in g.samples]
    failed = sum(not s.verdict.scored for s in everything)
    assert 0 < failed < len(everything)
    scores = {d: [s.verdict.score for g in GROUPS if g.prompt.domain == d for s in g.samples
                  if s.verdict.scored and not s.greedy] for d in "abc"}  # fmt: skip
    metrics = collected(GROUPS).metrics()
    assert metrics == {
        "rollout/accepted": 9,
        "rollout/filtered": 3,
        "rollout/generated_per_trained": 12 / 9,
        "rollout/aborted": 3,
        "rollout/carried": 4,
        "rollout/bubble": 0.25,
        "rollout/error_share": failed / len(everything),
        "rollout/zero_variance": 0.0,
        "tokens": sum(map(num_tokens, samples)),
        "generated_tokens": sum(map(num_sampled, samples)),
        "rollout/response_length/mean": fmean(map(num_sampled, samples)),
        "rollout/truncated": fmean(s.turns[-1].finish_reason == "length" for s in samples),
        "rollout/stale": fmean(any(v != VERSION for t in s.turns for v in t.versions) for s in samples),
        "critic/score/mean": fmean(score for some in scores.values() for score in some),
        **{f"score/{domain}/mean": fmean(some) for domain, some in scores.items()},
    }
    assert all(type(value) in (int, float) for value in metrics.values()), "they go into JSON"
    assert collected(GROUPS).table.error_share == metrics["rollout/error_share"]


def test_a_step_without_any_ticket_has_no_means() -> None:
    metrics = collected([]).metrics()
    assert metrics["rollout/error_share"] == metrics["tokens"] == metrics["generated_tokens"] == 0
    assert not [key for key in metrics if key.endswith("/mean")]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, None),
        ({"zero_variance": True}, "zero variance"),
        ({"min_mean_score": 0.31}, "too hard"),
        ({"min_mean_score": 0.3}, None),
        ({"max_mean_score": 0.29}, "too easy"),
        ({"max_mean_score": 0.3}, None),
        ({"max_truncated": 0.2}, "too many truncated"),
        ({"max_truncated": 0.25}, None),
        ({"max_mean_tokens": 2.4}, "too long"),
        ({"max_mean_tokens": 2.5}, None),
    ],
)
def test_a_group_is_judged_by_its_sampled_answers(settings: dict, reason: str | None) -> None:
    """Three scored answers of 0.3, one that failed, and a baseline that would change every mean."""
    rows = np.zeros(5, ANSWER)
    rows["score"], rows["scored"], rows["num_answer_tokens"] = 0.3, True, (1, 2, 3, 4, 99)
    rows["unit"], rows["last"] = np.arange(5), True
    rows["scored"][3], rows["score"][3] = False, np.nan
    rows["greedy"][4], rows["score"][4], rows["truncated"][[0, 4]] = True, 9.0, True
    assert reject_reason(rows, 3, FilterConfig(**({"zero_variance": False} | settings))) == reason
    assert reject_reason(rows, 4, FilterConfig(**settings)) == "too few scored"


def test_answers_that_want_a_package_are_counted_over_all_slices() -> None:
    def wanting(ticket: int, packages: list[str]) -> Group:
        some = group(ticket)
        verdicts = [Verdict("ok", 0.0, {MISSING_PACKAGE: 1.0}, package) for package in packages]
        samples = [msgspec.structs.replace(s, verdict=v) for s, v in zip(some.samples, verdicts, strict=False)]
        return Group(some.prompt, ticket, tuple(samples) + some.samples[len(samples) :])

    reports = [
        SliceReport.of(wanting(3, ["numpy", "numpy"]), 0, 0, VERSION),
        SliceReport.of(wanting(6, ["sympy"]), 0, 1, VERSION),
        SliceReport.of(wanting(5, ["pandas"]), 0, 1, VERSION),
        SliceReport.of(wanting(4, []), 0, 1, VERSION),
    ]
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(reports), type=list[SliceReport])
    table = build_table(sent, [3, 4, 6], 1)
    assert table.missing == {("a", "numpy"): 2, ("a", "sympy"): 1}
    collected = Collected(1, (), (), table, 0.0, 0, 0)
    assert collected.metrics()["rollout/missing_package"] == 3
    none = Collected(1, (), (), build_table(sent, [4], 1), 0.0, 0, 0)
    assert "rollout/missing_package" not in none.metrics()


def test_suspect_passes_are_counted_by_domain() -> None:
    def passing(ticket: int, *parts: dict[str, float]) -> Group:
        some = group(ticket)
        samples = [msgspec.structs.replace(s, verdict=Verdict("ok", 1.0, p)) for s, p in zip(some.samples, parts)]
        return Group(some.prompt, ticket, tuple(samples))

    groups = [passing(3, {SUSPECT: 1.0}, {UNPROVEN: 1.0}), passing(4, {}), passing(6, {SUSPECT: 1.0}, {})]
    reports = [SliceReport.of(some, 0, 0, VERSION) for some in groups]
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(reports), type=list[SliceReport])
    metrics = Collected(1, (), (), build_table(sent, [3, 4, 6], 1), 0.0, 0, 0).metrics()
    assert {name: value for name, value in metrics.items() if "suspect" in name} == {"reward/a/suspect": 0.5}
    assert metrics["reward/a/unproven"] == 0.25
