"""A worker process: builds one rewarder and judges the questions that its host sends, one frame at a time.

One of the two places with a broad `except`: whatever a rewarder raises becomes an `error` verdict that says so.
Deadlines are not kept here: a worker that takes too long is killed from outside.
"""

import asyncio
import bdb
import inspect
import math
import os
import socket
from collections.abc import Iterable
from typing import Any, get_args

from spmd_rl import wire
from spmd_rl.errors import UserError, one_line
from spmd_rl.sidecar.channel import receive, send
from spmd_rl.sidecar.services import services
from spmd_rl.targets import build_target, start_target
from spmd_rl.types import Rewarder, Verdict, VerdictStatus

MAX_PARTS = 100


def style(rewarder: Rewarder) -> str:
    """How it wants its questions: `each` (one by one), `async` (many at a time) or `batch` (one call for many)."""
    if hasattr(rewarder, "score_batch"):
        return "batch"
    return "async" if inspect.iscoroutinefunction(rewarder.score) else "each"


async def judge(rewarder: Rewarder, question: wire.Question, timeout: float | None = None) -> Verdict:
    """The verdict of one question, whatever happens. `timeout` (seconds) bounds an `async def score` alone."""
    try:
        if not hasattr(rewarder, "score"):
            return _checked_batch(rewarder.score_batch([question.prompt], [question.answer], [question.info]), 1)[0]
        verdict = rewarder.score(question.prompt, question.answer, question.info)
        if inspect.isawaitable(verdict):
            verdict = await asyncio.wait_for(verdict, timeout)
        return _checked(verdict)
    except bdb.BdbQuit:
        raise  # the user left the debugger
    except TimeoutError as error:
        return Verdict("timeout", detail=one_line(error))
    except Exception as error:  # noqa: BLE001 - user code, at its boundary
        return Verdict("error", detail=one_line(error))


def judge_now(rewarder: Rewarder, question: wire.Question) -> Verdict:
    """`judge` without an event loop, for a plain `def score`."""
    coroutine = judge(rewarder, question)
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    return Verdict("error", detail="score returned an awaitable: declare it `async def`")


def judge_batch(rewarder: Any, questions: list[wire.Question]) -> list[Verdict]:
    """The verdicts of one `score_batch` call; if it raises, of one call for each, so that one cannot spoil the rest."""
    prompts, answers, infos = ([getattr(q, name) for q in questions] for name in ("prompt", "answer", "info"))
    try:
        return _checked_batch(rewarder.score_batch(prompts, answers, infos), len(questions))
    except Exception as error:  # noqa: BLE001 - user code, at its boundary
        if len(questions) == 1:
            return [Verdict("error", detail=one_line(error))]
        return [judge_batch(rewarder, [question])[0] for question in questions]


def _checked_batch(verdicts: Iterable[Verdict], num_questions: int) -> list[Verdict]:
    checked = [_checked(verdict) for verdict in verdicts]
    if len(checked) != num_questions:
        raise ValueError(f"score_batch returned {len(checked)} verdicts for {num_questions} answers")
    return checked


def _checked(verdict: Any) -> Verdict:
    """The verdict in plain types, so that NumPy's floats and a NaN do not travel."""
    if not isinstance(verdict, Verdict):
        raise TypeError(f"score returned {type(verdict).__name__}, not a Verdict")
    if verdict.status not in get_args(VerdictStatus):
        raise ValueError(f"unknown verdict status {verdict.status!r}")
    if len(verdict.parts) > MAX_PARTS:
        raise ValueError(f"{len(verdict.parts)} parts; at most {MAX_PARTS}")
    parts = {str(name): float(value) for name, value in verdict.parts.items()}
    for name, value in {"score": float(verdict.score), **parts}.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}")
    return Verdict(verdict.status, float(verdict.score), parts, one_line(verdict.detail))


def serve(sock: socket.socket, domain: str, pool: wire.Pool) -> None:
    """Be a worker until the host hangs up."""
    send(sock, wire.Started(os.getpid()))
    try:
        provided = services(domain, pool.sandbox, pool.url)
        rewarder = build_target(f"reward.{domain}", pool.target, pool.args, services=provided)
        start_target(f"reward.{domain}", pool.target, rewarder)
    except UserError as error:
        send(sock, wire.Failed(str(error)))
        return
    how = style(rewarder)
    send(sock, wire.Ready(how, min(getattr(rewarder, "max_batch", wire.BATCH_ITEMS), wire.BATCH_ITEMS)))
    if how == "async":
        asyncio.run(_serve_async(sock, rewarder))
        return
    while (work := receive(sock, wire.TO_WORKER)) is not None:
        if how == "batch":
            _serve_batch(sock, rewarder, work)
        else:
            for job in work.jobs:
                _reply(sock, job, judge_now(rewarder, wire.QUESTION.unpack(job.question)))


async def _serve_async(sock: socket.socket, rewarder: Rewarder) -> None:
    """Questions as they come, so that none waits for a slow one."""

    async def one(job: wire.Job) -> None:
        _reply(sock, job, await judge(rewarder, wire.QUESTION.unpack(job.question), job.timeout))

    under_way: set[asyncio.Task[None]] = set()
    while (work := await asyncio.to_thread(receive, sock, wire.TO_WORKER)) is not None:
        for job in work.jobs:
            task = asyncio.create_task(one(job))
            under_way.add(task)
            task.add_done_callback(under_way.discard)


def _serve_batch(sock: socket.socket, rewarder: Rewarder, work: wire.Work) -> None:
    questions = [wire.QUESTION.unpack(job.question) for job in work.jobs]
    for job, verdict in zip(work.jobs, judge_batch(rewarder, questions), strict=True):
        _reply(sock, job, verdict)


def _reply(sock: socket.socket, job: wire.Job, verdict: Verdict) -> None:
    send(sock, wire.Done(job.number, wire.pack(verdict)))
