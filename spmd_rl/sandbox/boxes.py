"""Runs jobs in boxes and waits for them: what both sandboxes have in common.

A box is a process that some `start` confines. It gets its job and stdin as sealed files in memory, writes to pipes that
are read here, up to a limit, and is killed here when its time is up. The verdict of tests comes from a box in which
no untrusted code runs (see `guest/link.py`).
"""

import contextlib
import fcntl
import json
import os
import select
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from signal import SIGKILL, SIGXCPU
from typing import Any, Protocol

from spmd_rl.types import CheckResult, RunEnd, RunLimits, RunResult

LIMITS = RunLimits()
DRAIN_SECONDS = 1.0
"""For what is still in the pipes of a box that has ended."""
_SEALS = 0xF  # no more sealing, shrinking, growing, writing
_CHUNK = 1 << 16


class Process(Protocol):
    """A box's process, as the one who waits for it sees it."""

    def fileno(self) -> int:
        """Readable when it has ended."""
        ...

    def kill(self) -> None:
        """End it and all that it has started."""
        ...

    def wait(self) -> tuple[int, float]:
        """(wait status, seconds of processor time) once it has ended. RuntimeError if it never began."""
        ...


@dataclass(frozen=True, slots=True)
class Descriptors:
    """What a box has open. The starter passes them on and does not close them."""

    stdin: int
    stdout: int
    stderr: int
    job: int
    report: int
    link: int = -1


class _Box:
    """One box under way. `readers`: by name, the ends of its pipes that are ours."""

    def __init__(self, process: Process, limits: RunLimits, readers: dict[str, int]) -> None:
        self.process = process
        self.limits = limits
        self.readers = readers
        self.data = {name: bytearray() for name in readers}
        self.started = time.monotonic()
        self.deadline = self.started + limits.wall_seconds
        self.waited_for = False
        self.end: RunEnd | None = None
        self.result: RunResult | None = None

    def kill(self, end: RunEnd) -> None:
        """End it, and say why."""
        self.end = self.end or end
        self.deadline = float("inf")
        if not self.waited_for:
            self.process.kill()

    def read(self, name: str) -> bool:
        """Take in what one pipe holds; whether there may be more later."""
        try:
            chunk = os.read(self.readers[name], _CHUNK)
        except BlockingIOError:
            return True
        room = max(self.limits.output_bytes, _CHUNK) - len(self.data[name])
        self.data[name] += chunk[:room]
        if len(chunk) > room:
            self.kill("output")
        return bool(chunk)

    def finish(self) -> None:
        """The process has ended: how, and what is left in its pipes."""
        self.waited_for = True
        status, cpu_seconds = self.process.wait()
        seconds = time.monotonic() - self.started
        for name, fd in self.readers.items():
            while select.select([fd], [], [], DRAIN_SECONDS)[0] and self.read(name):
                pass
        end, code = ended(status, cpu_seconds >= self.limits.cpu_seconds)
        texts = [self.data[name].decode(errors="replace") for name in ("stdout", "stderr")]
        code = code if self.end in (None, end) else 0
        self.result = RunResult(self.end or end, code, *texts, seconds)
        if not self.data["report"]:
            raise RuntimeError(f"the sandbox did not start ({end} {code}): {texts[1].strip()[-300:]}")


def ended(status: int, all_used: bool) -> tuple[RunEnd, int]:
    """What a wait status means. `all_used`: whether its processor time was used up."""
    code = os.waitstatus_to_exitcode(status)
    signal = -code if code < 0 else code - 128  # shells and bwrap add 128
    if signal == SIGXCPU or (signal == SIGKILL and all_used):
        return "cpu", 0
    return ("signal", -code) if code < 0 else ("exit", code)


class Boxes(ABC):
    """A `Sandbox`, but for how a box is started. One call at a time; others wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @abstractmethod
    def start(self, slot: int, limits: RunLimits, files: Descriptors) -> Process:
        """Begin a job in a confined process. `slot`: 0 or 1, unlike for boxes that run at once."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Give back what the sandbox holds."""

    def prove(self) -> None:
        """RuntimeError if the sandbox does not work here."""
        if (result := self.run("print(6 * 7)")).stdout != "42\n":
            raise RuntimeError(result.stderr.strip() or f"it ended by {result.end} {result.code}")

    def run(self, code: str, stdin: str = "", limits: RunLimits = LIMITS) -> RunResult:
        """As `Sandbox.run`."""
        job = {"mode": "run", "code": code, "prelude": ""}
        with self._lock, ExitStack() as stack:
            (box,) = self._open(stack, [job], limits, stdin)
            _watch([box])
        return box.result

    def check(
        self,
        code: str,
        tests: Sequence[str],
        prelude: str = "",
        entry: str = "",
        limits: RunLimits = LIMITS,
    ) -> CheckResult:
        """As `Sandbox.check`."""
        shared = {"prelude": prelude, "entry": entry}
        jobs = [{"mode": "test", "tests": list(tests), **shared}, {"mode": "serve", "code": code, **shared}]
        with self._lock, ExitStack() as stack:
            testing, tested = self._open(stack, jobs, limits, "")
            _watch([testing, tested])
        result, code_result = testing.result, tested.result
        try:
            report = json.loads(testing.data["report"][1:])
        except ValueError:
            if "wall" in (result.end, code_result.end):
                return CheckResult("wall", ())
            raise RuntimeError(f"the tests ended by {result.end} {result.code}: {result.stderr.strip()}") from None
        if report["error"]:
            raise RuntimeError(report["error"])
        if not report["passed"]:
            raise RuntimeError("there are no tests")
        return CheckResult(code_result.end, tuple(report["passed"]), report["detail"])

    def _open(self, stack: ExitStack, jobs: list[dict[str, Any]], limits: RunLimits, stdin: str) -> list[_Box]:
        """Boxes that have been started, two of them with a link between; `stack` ends them and closes what is ours."""
        kernel = {"cpu": limits.cpu_seconds, "memory": limits.memory_bytes, "disk": limits.disk_bytes}
        kernel["processes"] = limits.processes
        boxes = []
        with ExitStack() as theirs:
            links = [theirs.enter_context(end).fileno() for end in socket.socketpair()] if len(jobs) == 2 else [-1]
            for slot, job in enumerate(jobs):
                files, readers = {}, {}
                for name in ("stdout", "stderr", "report"):
                    readers[name], files[name] = os.pipe()
                    os.set_blocking(readers[name], False)
                    stack.callback(os.close, readers[name])
                files["stdin"] = _sealed(stdin)
                files["job"] = _sealed(json.dumps({**job, "limits": kernel}))
                for fd in files.values():
                    theirs.callback(os.close, fd)
                process = self.start(slot, limits, Descriptors(**files, link=links[slot]))
                boxes.append(_Box(process, limits, readers))
                stack.callback(_give_up, boxes[-1])
        return boxes


def _give_up(box: _Box) -> None:
    if not box.waited_for:
        box.process.kill()
        with contextlib.suppress(RuntimeError):
            box.process.wait()


def _watch(boxes: list[_Box]) -> None:
    """Until all have ended. The first is the one that matters: when it has ended, so have the others."""
    with selectors.DefaultSelector() as selector:
        for box in boxes:
            for name, fd in box.readers.items():
                selector.register(fd, selectors.EVENT_READ, (box, name))
            selector.register(box.process.fileno(), selectors.EVENT_READ, (box, ""))
        while running := [box for box in boxes if box.result is None]:
            patience = min(box.deadline for box in running) - time.monotonic()
            for key, _ in selector.select(min(max(patience, 0), 3600)):
                box, name = key.data
                if not name:
                    selector.unregister(key.fileobj)
                    box.finish()
                    if box is boxes[0]:
                        for other in running:
                            if other.result is None:
                                other.kill("exit")
                elif box.result is not None or not box.read(name):
                    selector.unregister(key.fileobj)
            for box in running:
                if box.result is None and time.monotonic() > box.deadline:
                    box.kill("wall")


def _sealed(text: str) -> int:
    """A descriptor from which the text can be read, and nothing else done."""
    fd = os.memfd_create("job", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(text.encode(errors="replace"))
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd
