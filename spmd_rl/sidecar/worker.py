"""A worker process: builds one rewarder and answers its host's score requests.

A rewarder's exception becomes the verdict `error` with text, file and line. Only `async` rewarders are timed here; the
host kills a late worker.
"""

import asyncio
import bdb
import inspect
import math
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from spmd_rl.base.errors import MAX_TRACEBACK, UserError, located, one_line, printable, traceback_of
from spmd_rl.base.targets import build_target, start_target
from spmd_rl.sidecar import wire
from spmd_rl.sidecar.frames import receive_frame, send_frame
from spmd_rl.sidecar.services import service_factories
from spmd_rl.types import SUSPECT, Rewarder, Verdict, VerdictStatus

MAX_PARTS = 100
MAX_NAME = 200


def call_mode(rewarder: Rewarder) -> str:
    """Return a rewarder's call mode: `sync` (one by one), `async` (many at a time) or `batch` (one call for many)."""
    if hasattr(rewarder, "score_batch"):
        return "batch"
    return "async" if inspect.iscoroutinefunction(rewarder.score) else "sync"


async def judge(rewarder: Rewarder, given: wire.ScoreInput, timeout: float | None = None) -> Verdict:
    """Return the verdict on one answer; only a debugger's exit is raised. timeout: seconds of an `async def score`."""
    try:
        if not hasattr(rewarder, "score"):
            return _checked_batch(rewarder.score_batch([given.prompt], [given.answer], [given.info]), 1)[0]
        verdict = rewarder.score(given.prompt, given.answer, given.info)
        if inspect.isawaitable(verdict):
            verdict = await asyncio.wait_for(verdict, timeout)
        return _examined(rewarder, given, checked(verdict))
    except bdb.BdbQuit:
        raise  # the user left the debugger
    except TimeoutError as error:
        return Verdict("timeout", detail=one_line(error) if str(error) else f"no score after {timeout} s")
    except Exception as error:  # noqa: BLE001 - user code, at its boundary
        return _failed(error)


def _examined(rewarder: Rewarder, given: wire.ScoreInput, verdict: Verdict) -> Verdict:
    paid = verdict.scored and verdict.score > 0 and hasattr(rewarder, "suspect")
    if paid and (reason := rewarder.suspect(given.prompt, given.answer)):
        return Verdict(verdict.status, verdict.score, {**verdict.parts, SUSPECT: 1.0}, one_line(reason))
    return verdict


def judge_sync(rewarder: Rewarder, given: wire.ScoreInput) -> Verdict:
    """Call `judge` without an event loop, for a plain `def score`."""
    coroutine = judge(rewarder, given)
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    return Verdict("error", detail="score returned an awaitable: declare it `async def`")


def judge_batch(rewarder: Any, given: list[wire.ScoreInput]) -> list[Verdict]:
    """Return the verdicts of one `score_batch` call. If it raises, each answer is judged alone."""
    prompts, answers, infos = ([getattr(one, name) for one in given] for name in ("prompt", "answer", "info"))
    try:
        found = list(rewarder.score_batch(prompts, answers, infos))
        if len(found) != len(given):
            # Judging each alone could hide the mistake: a function that always returns one score would pass.
            return [Verdict("error", detail=_wrong_number(found, len(given)))] * len(given)
        return _checked_batch(found, len(given))
    except Exception as error:  # noqa: BLE001 - user code, at its boundary
        if len(given) == 1:
            return [_failed(error)]
        return [judge_batch(rewarder, [one])[0] for one in given]


def checked(verdict: Any) -> Verdict:
    """Convert a verdict to plain types. ValueError if that fails, such as for NaN."""
    verdict = Verdict.of(verdict)
    if verdict.status not in get_args(VerdictStatus):
        raise ValueError(f"unknown verdict status {verdict.status!r}")
    if len(verdict.parts) > MAX_PARTS:
        raise ValueError(f"{len(verdict.parts)} parts; at most {MAX_PARTS}")
    parts = {str(name): float(value) for name, value in verdict.parts.items()}
    if long := [name for name in parts if len(name) > MAX_NAME]:
        raise ValueError(f"the name of a part has {len(long[0])} characters; at most {MAX_NAME}")
    for name, value in {"score": float(verdict.score), **parts}.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}")
    detail, traceback = one_line(verdict.detail), printable(verdict.traceback[:MAX_TRACEBACK])
    answer = printable(str(verdict.answer)[:MAX_NAME], lines=False)
    return Verdict(verdict.status, float(verdict.score), parts, detail, traceback, answer)


def _checked_batch(verdicts: Iterable[Verdict], num_answers: int) -> list[Verdict]:
    found = [checked(verdict) for verdict in verdicts]
    if len(found) != num_answers:
        raise ValueError(_wrong_number(found, num_answers))
    return found


def _wrong_number(found: list[Any], num_answers: int) -> str:
    return f"the reward returned {len(found)} scores for {num_answers} answers"


def _failed(error: Exception) -> Verdict:
    return Verdict("error", detail=located(error), traceback=traceback_of(error))


def serve(sock: socket.socket, domain: str, pool: wire.PoolSpec) -> None:
    """Serve as a worker until the host hangs up."""
    send_frame(sock, wire.Started(os.getpid()))
    sys.breakpointhook = no_debugger
    try:
        services = service_factories(f"reward.{domain}", pool.sandbox, pool.url, pool.packages)
        rewarder = build_target(f"reward.{domain}", pool.target, pool.args, services=services)
        start_target(f"reward.{domain}", pool.target, rewarder)
    except UserError as error:
        send_frame(sock, wire.StartFailed(str(error)))
        return
    mode = call_mode(rewarder)
    send_frame(sock, wire.Ready(mode, min(getattr(rewarder, "max_batch", wire.BATCH_ITEMS), wire.BATCH_ITEMS)))
    if mode == "async":
        asyncio.run(_serve_async(sock, rewarder))
        return
    while (requests := receive_frame(sock, wire.TO_WORKER)) is not None:
        understood = _understood(sock, requests.items)
        if mode == "batch":
            items = list(understood)
            verdicts = judge_batch(rewarder, [given for _, given in items]) if items else []
            for (item, _), verdict in zip(items, verdicts, strict=True):
                _reply(sock, item, verdict)
        else:
            for item, given in understood:
                _reply(sock, item, judge_sync(rewarder, given))


def no_debugger(*args: object, **kwargs: object) -> None:
    """Replace `breakpoint()` in a worker: raise RuntimeError."""
    raise RuntimeError("breakpoint(): there is no terminal here; use debug=true")


async def _serve_async(sock: socket.socket, rewarder: Rewarder) -> None:

    async def judge_one(item: wire.ScoreRequest, given: wire.ScoreInput) -> None:
        _reply(sock, item, await judge(rewarder, given, item.timeout))

    tasks: set[asyncio.Task[None]] = set()
    while (requests := await asyncio.to_thread(receive_frame, sock, wire.TO_WORKER)) is not None:
        for item, given in _understood(sock, requests.items):
            task = asyncio.create_task(judge_one(item, given))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


def _understood(
    sock: socket.socket, items: Iterable[wire.ScoreRequest]
) -> Iterator[tuple[wire.ScoreRequest, wire.ScoreInput]]:
    for item in items:
        try:
            given = wire.SCORE_INPUT.unpack(item.input)
        except wire.WireError as error:
            _reply(sock, item, Verdict("error", detail=str(error)))
        else:
            yield item, given


def _reply(sock: socket.socket, item: wire.ScoreRequest, verdict: Verdict) -> None:
    try:
        send_frame(sock, wire.ScoreReplies([wire.ScoreReply(item.id, verdict)]))
    except wire.WireError as error:
        # A verdict that cannot be encoded fails alone; raising would end the worker and its other requests.
        send_frame(sock, wire.ScoreReplies([wire.ScoreReply(item.id, Verdict("error", detail=f"its verdict {error}"))]))
