"""A worker process of environments: builds them, and plays the resets and steps that its host sends.

A single slot plays in the main thread; several have a thread each. An environment's exception, or a malformed reply, is
a `SessionFailure` with file and line; the next episode gets a new environment.
"""

import asyncio
import bdb
import contextlib
import inspect
import os
import queue
import re
import resource
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from spmd_rl.base.errors import UserError, located, printable, traceback_of
from spmd_rl.base.targets import ENVIRONMENT, build_target, start_target
from spmd_rl.sidecar import wire
from spmd_rl.sidecar.env_replies import checked_reset, checked_step, packed
from spmd_rl.sidecar.frames import receive_frame, send_frame
from spmd_rl.sidecar.services import service_factories
from spmd_rl.sidecar.worker import no_debugger
from spmd_rl.types import EnvReply

STACK_BYTES = 2 << 20

Call = wire.ResetRequest | wire.StepRequest
Outcome = wire.SessionReply | wire.SessionFailure


class EnvSlot:
    """Player of one episode at a time, in a reused environment."""

    def __init__(self, tag: str, spec: wire.EnvPoolSpec, services: Mapping[str, Callable[[], Any]]) -> None:
        self._section, self._spec, self._services = f"env.{tag}", spec, services
        self._built: dict[bool, Any] = {}  # by whether it is held out
        self._current: Any = None
        self._solve = False

    def build(self, held_out: bool = False) -> Any:
        """Return the environment, built at the first call. UserError if that fails."""
        if held_out not in self._built:
            args = self._spec.args | (self._spec.eval_args if held_out else {})
            env = build_target(self._section, self._spec.target, args, ENVIRONMENT, self._services)
            start_target(self._section, self._spec.target, env)
            self._built[held_out] = env
        return self._built[held_out]

    async def play(self, call: Call) -> EnvReply:
        """Reset or step. ValueError for a malformed reply; the environment's exceptions pass."""
        if isinstance(call, wire.ResetRequest):
            self._current, self._solve = self.build(call.held_out), call.solve
            returned = self._current.reset(seed=call.seed)
        else:
            returned = self._current.step(call.action)
        if inspect.isawaitable(returned):
            returned = await returned
        verb, check = ("reset", checked_reset) if isinstance(call, wire.ResetRequest) else ("step", checked_step)
        try:
            if self._solve and hasattr(self._current, "solution"):
                observation, *rest, info = returned
                returned = observation, *rest, {**info, "solution": self._current.solution()}
            return check(returned)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self._spec.target}.{verb}: {error}") from None

    async def answer(self, call: Call) -> Outcome:
        """Play a call; exceptions become failures."""
        number = call.number if isinstance(call, wire.StepRequest) else 0
        try:
            return wire.SessionReply(call.session, number, packed(await self.play(call)))
        except bdb.BdbQuit:
            raise  # the user left the debugger
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code, at its boundary
            self.close()
            return failure(call.session, number, error)

    def close(self) -> None:
        """Close the environments; the next call rebuilds them."""
        built, self._built, self._current = self._built, {}, None
        for env in built.values():
            with contextlib.suppress(Exception):
                if hasattr(env, "close"):
                    env.close()


def failure(session: int, number: int, error: BaseException) -> wire.SessionFailure:
    """Convert an environment's exception to a failure."""
    return wire.SessionFailure(session, number, "error", located(error), printable(traceback_of(error)))


class _Player:
    def __init__(self, slot: EnvSlot, runner: asyncio.Runner | None, send: Callable[[msgspec.Struct], None]) -> None:
        self._slot, self._runner, self._send = slot, runner, send
        self._calls: queue.SimpleQueue[Call] | None = None

    def play(self, call: Call) -> None:
        outcome = self._outcome(call)
        if isinstance(outcome, wire.SessionFailure) and "MemoryError" in outcome.detail:
            # Sent before the reply, so that the host assigns no reset in between to a process short of memory.
            self._send(wire.Goodbye())
        try:
            self._send(wire.SessionReplies([outcome]))
        except wire.WireError as error:  # of a failure's text
            self._send(wire.SessionReplies([failure(call.session, outcome.number, error)]))

    def play_soon(self, call: Call) -> None:
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=self._play_all, args=(self._calls,), daemon=True).start()
        self._calls.put(call)

    def _play_all(self, calls: "queue.SimpleQueue[Call]") -> None:
        with contextlib.suppress(OSError):  # the host has hung up
            while True:
                self.play(calls.get())

    def _outcome(self, call: Call) -> Outcome:
        coroutine = self._slot.answer(call)
        if self._runner is not None:
            return self._runner.run(coroutine)
        try:
            coroutine.send(None)
        except StopIteration as done:
            return done.value
        coroutine.close()
        number = call.number if isinstance(call, wire.StepRequest) else 0
        return failure(call.session, number, TypeError("it returned an awaitable: declare it `async def`"))


def serve(sock: socket.socket, tag: str, spec: wire.EnvPoolSpec) -> None:
    """Serve as a worker until the host hangs up."""
    send_frame(sock, wire.Started(os.getpid()))
    sys.breakpointhook = no_debugger
    if spec.memory_mb:
        limit_memory(spec.memory_mb << 20, spec.slots)
    services = service_factories(f"env.{tag}", spec.sandbox, packages=spec.packages)
    slots = [EnvSlot(tag, spec, services) for _ in range(spec.slots)]
    try:
        env = slots[0].build()
    except UserError as error:
        send_frame(sock, wire.StartFailed(str(error)))
        return
    is_async = any(inspect.iscoroutinefunction(getattr(env, verb)) for verb in ENVIRONMENT.verbs)
    lock = threading.Lock()

    def send(message: msgspec.Struct) -> None:
        with lock:
            send_frame(sock, message)

    players = [_Player(slot, asyncio.Runner() if is_async else None, send) for slot in slots]
    send(wire.Ready())
    while (message := receive_frame(sock, wire.TO_ENV_WORKER)) is not None:
        if isinstance(message, wire.Ping):
            send(wire.Pong())
            continue
        for call in message.items:
            player = players[call.session]
            (player.play if spec.slots == 1 else player.play_soon)(call)
    for slot in slots:
        slot.close()


def limit_memory(num_bytes: int, slots: int) -> None:
    """Limit this process's memory to its present use plus `num_bytes` and the stacks of its slots."""
    # RLIMIT_DATA counts writable private memory, not what libraries reserve or map. An allocation beyond it is a
    # MemoryError.
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    has = int(re.search(r"VmData:\s+(\d+) kB", status)[1]) << 10
    threading.stack_size(STACK_BYTES)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = has + num_bytes + (slots * STACK_BYTES if slots > 1 else 0)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
