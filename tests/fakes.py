"""Small fakes: an engine of chosen lengths, a scorer with chosen delays, a tokenizer of bytes, chosen samples."""

import asyncio
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from spmd_rl.engine.base import Capacity, EngineCounts
from spmd_rl.model.bridge import Bridge
from spmd_rl.rollout import Rollouts, Services
from spmd_rl.rollout.table import SampleTable, SliceReport, answer_row, build_table, step_rows
from spmd_rl.types import AnswerInfo, Completion, Group, Message, Prompt, Request, Sample, Verdict


def table_of(groups: Iterable[Group], rank_of: Callable[[Sample], int], version: int = 0) -> SampleTable:
    """What the ranks that hold these samples report of them; every group trains."""
    reports = []
    for g in groups:
        rows = [answer_row(sample, rank_of(sample), version) for sample in g.samples]
        reports.append(SliceReport(g.ticket, 0, g.prompt.domain, rows, steps=step_rows(g.samples)))
    return build_table(reports, {report.ticket for report in reports}, 1)


class Ticket(NamedTuple):
    """One ticket of a step's table."""

    ticket: int
    domain: str
    reject_reason: str | None
    answers: np.ndarray
    detail: str


def tickets_of(table: SampleTable) -> Iterator[Ticket]:
    """The tickets of a step, in order."""
    columns = zip(table.tickets.tolist(), table.domains.tolist(), pairwise(table.bounds.tolist()), strict=True)
    for ticket, domain, (begin, end) in columns:
        rest = table.answers[begin:end], table.details.get(ticket, "")
        yield Ticket(ticket, table.names[domain], table.reasons.get(ticket), *rest)


def make_rollouts(cfg, engine, prompts, scorer, world, episode=None, **parts) -> Rollouts:
    """[all] `Rollouts` with a tokenizer of bytes."""
    return Rollouts(cfg.generation, engine, prompts, Services(scorer, FakeTokenizer(), episode), world, **parts)


class FakeTokenizer:
    """Bytes are tokens; token 0 ends an answer."""

    stop_ids = (0,)

    def render(self, messages) -> array:
        return array("i", list(" ".join(m.content for m in messages).encode()))

    def bridge(self, messages) -> Bridge:
        return Bridge(self.render(messages), True, True)

    def decode(self, ids) -> str:
        return bytes(i for i in ids if i).decode()


class FakeEngine:
    """Answers each request with `length(request)` times the digit `seed % 10`; counts what it computed."""

    leads = True
    processor = None

    def __init__(self, length: Callable[[Request], int] = lambda request: 3, max_running: int = 64) -> None:
        self.capacity, self.token_counts = Capacity(max_running, 10**6, 4096), EngineCounts()
        self.length, self.version = length, 0
        self.running: dict[str, tuple[Request, int]] = {}
        self.aborted: list[str] = []
        self.aborted_now: set[str] = set()
        self.added: list[tuple[int, ...]] = []
        self.most_running = 0

    def add(self, request: Request) -> None:
        assert request.id not in self.running
        self.added.append(request.order)
        self.aborted_now.discard(request.id)
        self.running[request.id] = (request, 0)

    def abort(self, ids) -> None:
        self.aborted += ids
        self.aborted_now |= set(ids)

    @property
    def num_unfinished(self) -> int:
        return len(self.running)

    def step(self) -> list[Completion]:
        self.most_running = max(self.most_running, len(self.running))
        ended = []
        for id, (request, n) in list(self.running.items()):
            n += 1
            stop = n >= self.length(request)
            full = n == request.max_new_tokens
            if stop or full or id in self.aborted_now:
                del self.running[id]
                text = str(request.seed % 10).encode() * n
                reason = "stop" if stop else "length" if full else "abort"
                ended.append(
                    Completion(
                        id, array("i", list(text)), array("f", [-0.5] * n), array("i", [self.version] * n), reason
                    )
                )
            else:
                self.running[id] = (request, n)
        return ended

    def driven(self, join=None):
        return nullcontext()

    def joined(self, message):
        return nullcontext()

    def awake(self):
        return nullcontext()

    def sleep(self):
        pass


class FakeScorer:
    """Scores 1 where `good(prompt, answer)`, after `delay(prompt)` seconds."""

    def __init__(self, good: Callable[[Prompt, str], bool], delay: Callable[[Prompt], float] = lambda p: 0.0) -> None:
        self.good, self.delay, self.outstanding = good, delay, 0

    async def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        self.outstanding += 1
        try:
            await asyncio.sleep(self.delay(prompt))
        finally:
            self.outstanding -= 1
        return Verdict("ok", float(self.good(prompt, answer)))


class FakePrompts:
    """`n` prompts in an endless round."""

    def __init__(self, n: int) -> None:
        self.train = tuple(Prompt(f"{i:032x}", (Message("user", f"problem {i}"),), "toy", str(i)) for i in range(n))
        self.eval = self.train[:2]

    def fingerprint(self) -> str:
        return "fake"

    def ticket(self, ticket: int, seed: int) -> tuple[int, Prompt]:
        return ticket // len(self.train), self.train[ticket % len(self.train)]
