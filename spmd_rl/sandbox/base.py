"""The common part of all sandboxes: they start confined processes and wait for them.

A confined process gets its job and its standard input as sealed files in memory and writes to pipes, which are read
here up to a limit. The kernel ends it when its processor time is used up; one that sleeps is killed here.
"""

import contextlib
import json
import keyword
import os
import re
import select
import selectors
import shutil
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from signal import SIGKILL, SIGXCPU
from typing import Any

from spmd_rl.sandbox.packages import ENVIRONMENT, ROOM, find_pytest, module_names
from spmd_rl.sandbox.served import Forked, ServedSandbox, memory_file
from spmd_rl.types import CheckResult, RunEnd, RunLimits, RunResult

LIMITS = RunLimits()
# a first import from a cold disk is slow
PROOF = RunLimits(cpu_seconds=60, wall_seconds=120.0)
DRAIN_SECONDS = 1.0  # to read what is left in the pipes of a process that has ended
PATIENCE, LOOK, SLEEPS = 5, 0.1, 0.02
"""Wall time of a process that computes, in limits; time between two looks at it, as a share of the limit; share of a
processor below which it sleeps.
"""
PARSED = 8
"""Bytes of memory that the tests get, beyond the code's limit, per byte of a message."""
_CHUNK = 1 << 16


class _Run:
    def __init__(self, process: Forked, limits: RunLimits, readers: dict[str, int]) -> None:
        self.process = process
        self.limits = limits
        self.readers = readers
        self.data = {name: bytearray() for name in readers}
        self.started = time.monotonic()
        self.pause = max(min(limits.wall_seconds, 0.5), limits.wall_seconds * LOOK)
        self.deadline, self.used = self.started + limits.wall_seconds - self.pause, -1.0
        self.waited_for = False
        self.end: RunEnd | None = None
        self.result: RunResult | None = None

    def kill(self, end: RunEnd) -> None:
        self.end = self.end or end
        self.deadline = float("inf")
        if not self.waited_for:
            self.process.kill()

    def look(self, used: float) -> None:
        now, limit = time.monotonic(), self.limits.wall_seconds
        busy = min(used, self.used) < 0 or used - self.used > SLEEPS * self.pause
        patience = PATIENCE if self.limits.processes == 1 else 1
        if not busy or now > self.started + patience * limit:
            self.kill("wall")
        self.used, self.deadline = used, now + self.pause if self.end is None else float("inf")

    def read(self, name: str) -> bool:
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
        self.waited_for = True
        status, cpu_seconds = self.process.wait()
        seconds = time.monotonic() - self.started
        for name, fd in self.readers.items():
            while select.select([fd], [], [], DRAIN_SECONDS)[0] and self.read(name):
                pass
        end, code = ended(status, cpu_seconds >= self.limits.cpu_seconds)
        texts = [self.data[name].decode(errors="replace") for name in ("stdout", "stderr")]
        code = code if self.end in (None, end) else 0
        final = end if (end, self.end) == ("cpu", "exit") else self.end or end
        is_text = texts[0].encode() == self.data["stdout"]
        self.result = RunResult(final, code, *texts, seconds, cpu_seconds, is_text)
        # without a report it may also have been killed here before it was ready
        if not self.data["report"] and self.end is None:
            raise RuntimeError(f"the sandbox did not start ({end} {code}): {texts[1].strip()[-300:]}")


def ended(status: int, all_used: bool) -> tuple[RunEnd, int]:
    """Return the end and the exit code or signal of a wait status. `all_used`: no processor time is left."""
    code = os.waitstatus_to_exitcode(status)
    # bwrap and shells add 128 to a signal
    signal = -code if code < 0 else code - 128
    if signal == SIGXCPU or (signal == SIGKILL and all_used):
        return "cpu", 0
    return ("signal", -code) if code < 0 else ("exit", code)


class BaseSandbox(ServedSandbox):
    """A `Sandbox` without `launch`. One call runs at a time; other threads wait."""

    def __init__(self, packages: Mapping[str, Path] | None) -> None:
        """packages: of `find_packages`, loaded before the first fork."""
        self.packages = find_pytest() | dict(packages or {})
        self.own_bytes = ROOM if packages else 0
        # sets of texts print in the same order each time
        self.environment = {"PYTHONHASHSEED": "0"} | (ENVIRONMENT if packages else {})
        self._lock = threading.Lock()
        super().__init__()

    def use(self, python: str) -> None:
        """Run code with another interpreter. RuntimeError if not found."""
        if (found := shutil.which(os.path.expanduser(python))) is None:
            raise RuntimeError(f"there is no interpreter {python}")
        self.python = os.path.realpath(found)
        self.reopen()
        self.prove()

    def prove(self, packages: Sequence[str] = ()) -> None:
        """Run a program that imports these packages. RuntimeError if the sandbox does not work here."""
        program = "".join(f"__import__('importlib').import_module({name!r})\n" for name in module_names(packages))
        if (result := self.run(program + "print(6 * 7)", limits=PROOF)).stdout != "42\n":
            raise RuntimeError(result.stderr.strip()[-300:] or f"it ended by {result.end} {result.code}")

    def run(self, code: str, stdin: str = "", limits: RunLimits = LIMITS) -> RunResult:
        """Run a program with this standard input."""
        ((result, _),) = self.run_jobs([{"mode": "run", "code": code, "prelude": ""}], limits, stdin)
        return result

    def run_jobs(self, jobs: list[dict[str, Any]], limits: RunLimits, stdin: str = "") -> list[tuple[RunResult, bytes]]:
        """Run one job, or two with a socket pair between them, until the first has ended; return the ends and reports.

        Only the report of the mode `test` comes from trusted code. RuntimeError if a process did not start.
        """
        with self._lock, ExitStack() as stack:
            runs = self._open(stack, jobs, limits, stdin)
            _watch(runs, self.process.pid)
        return [(run.result, bytes(run.data["report"][1:])) for run in runs]

    def check(
        self,
        code: str,
        tests: Sequence[str],
        prelude: str = "",
        entry: str = "",
        limits: RunLimits = LIMITS,
        unproven: bool = False,
    ) -> CheckResult:
        """Test code in a separate process, or in that of the tests if `unproven`."""
        lends = all("from spmd_rl.sandbox.guest.testing import same" in test for test in tests)  # function calls
        shared = {"prelude": prelude, "entry": entry, "message_bytes": limits.message_bytes, "lends": lends}
        jobs: list[dict[str, Any]] = [{"mode": "test", "tests": list(tests), **shared}]
        if unproven:
            jobs[0] |= {"mode": "beside", "code": code}
        else:
            jobs.append({"mode": "serve", "code": code, **shared})
        (testing, report), *_ = ended = self.run_jobs(jobs, limits)
        end = ended[-1][0].end
        if "wall" in (testing.end, end):
            return CheckResult("wall", ())
        if (found := _read(report)) is None:
            why = f"the tests ended by {testing.end} {testing.code}"
            idle = _idle(tests)
            if code == idle:
                raise RuntimeError(f"{why}: {testing.stderr.strip()}")
            # the code is to blame, whatever it did, unless the tests end like that without it too
            self.check(idle, tests, prelude, entry, limits)
            return CheckResult(end, (False,) * len(tests), f"{why}, caused by the code")
        error, unsupported, sources = found
        if error or not (sources or unsupported):
            raise RuntimeError(error or "there are no tests")
        if unsupported and not unproven:
            return CheckResult(end, (), unsupported=unsupported)
        passed = tuple(outcome for outcomes, _ in sources for outcome in outcomes)
        return CheckResult(end, passed, next((why for _, why in sources if why), ""))

    def _open(self, stack: ExitStack, jobs: list[dict[str, Any]], limits: RunLimits, stdin: str) -> list[_Run]:
        memory = limits.memory_bytes + self.own_bytes
        kernel = {"cpu": limits.cpu_seconds, "disk": limits.disk_bytes}
        kernel["processes"] = limits.processes + (self.own_processes * len(jobs) if limits.processes > 1 else 0)
        runs = []
        with ExitStack() as theirs:
            sockets = [theirs.enter_context(end).fileno() for end in socket.socketpair()] if len(jobs) == 2 else []
            for slot, job in enumerate(jobs):
                room = PARSED * limits.message_bytes if job["mode"] in ("test", "beside") else 0
                text = json.dumps({**job, "limits": {**kernel, "memory": memory + room}})
                pipes = {name: os.pipe() for name in ("stdout", "stderr", "report")}
                for reader, writer in pipes.values():
                    os.set_blocking(reader, False)
                    stack.callback(os.close, reader)
                    theirs.callback(os.close, writer)
                files = [memory_file(content) for content in (stdin.encode(errors="replace"), text.encode())]
                for fd in files:
                    theirs.callback(os.close, fd)
                out, err, report = (writer for _, writer in pipes.values())
                process = self.start(slot, limits, [files[0], out, err, files[1], report, *sockets[slot : slot + 1]])
                runs.append(_Run(process, limits, {name: reader for name, (reader, _) in pipes.items()}))
                stack.callback(_give_up, runs[-1])
        return runs


def _read(report: bytes) -> tuple[str, str, list[tuple[list[bool], str]]] | None:
    """Return the tests' mistake, why they are unsupported, and outcomes and first failure of each source."""
    try:
        found = json.loads(report)
        sources = [([each is True for each in passed] or [False], str(why)[:1000]) for passed, why in found["sources"]]
        return str(found["error"])[:1000], str(found["unsupported"])[:1000], sources
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _idle(tests: Sequence[str]) -> str:
    words = {word for test in tests for word in re.findall(r"[A-Za-z_]\w*", test) if not keyword.iskeyword(word)}
    return "".join(f"def {word}(*_, **__): raise Exception\n" for word in sorted(words))


def _give_up(run: _Run) -> None:
    if not run.waited_for:
        run.process.kill()
        with contextlib.suppress(RuntimeError):
            run.process.wait()


def used_seconds(owner: int) -> float:
    """Return the processor time of a process's descendants, 0.0 without a `/proc`; -1.0 if one of their threads has a
    processor or waits for one.
    """
    used, found = 0.0, [owner]
    for pid in found:
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            if pid != owner:
                paths = [Path(f"/proc/{pid}/stat"), *Path(f"/proc/{pid}").glob("task/*/stat")]
                (state, *words), *threads = (path.read_text().rpartition(")")[2].split() for path in paths)
                if "R" in [state, *(thread[0] for thread in threads)]:
                    return -1.0
                used += (int(words[10]) + int(words[11])) / os.sysconf("SC_CLK_TCK")
    return used


def _watch(runs: list[_Run], owner: int) -> None:
    # The end of the first, which has the tests, ends the others.
    with selectors.DefaultSelector() as selector:
        for run in runs:
            for name, fd in run.readers.items():
                selector.register(fd, selectors.EVENT_READ, (run, name))
            selector.register(run.process.fileno(), selectors.EVENT_READ, (run, ""))
        while running := [run for run in runs if run.result is None]:
            patience = min(run.deadline for run in running) - time.monotonic()
            for key, _ in selector.select(min(max(patience, 0), 3600)):
                run, name = key.data
                if not name:
                    selector.unregister(key.fileobj)
                    run.finish()
                    if run is runs[0]:
                        for other in running:
                            if other.result is None:
                                other.kill("exit")
                elif run.result is not None or not run.read(name):
                    selector.unregister(key.fileobj)
            late = [run for run in running if run.result is None and time.monotonic() > run.deadline]
            used = used_seconds(owner) if late else 0.0
            for run in late:
                run.look(used)
