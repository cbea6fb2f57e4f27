"""Runs checks in child processes with time limits. A child that dies or hangs fails its current check.

The remaining checks continue in a new child. If all ranks run them, they agree where to continue.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from spmd_rl.tools.doctor.checks import Check, CheckOutcome, Options
from spmd_rl.tools.doctor.ranks import Ranks, names

GRACE = 8.0
"""Seconds that a rank's child has left after another rank's has failed."""
CLOSE_SECONDS = 10.0
HANG = "read the log; a collective that hangs: NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME=<interface>"
CONSEQUENCE = "ended because"


def run_checks(checks: Sequence[Check], options: Options, ranks: Ranks, verdicts: dict[str, str]) -> list[CheckOutcome]:
    """Run checks of one process and return their results, in order. `verdicts` are those of earlier checks."""
    results: list[CheckOutcome] = []
    attempt = 0
    while len(results) < len(checks):
        name = f"{checks[0].process}-{attempt}"
        child = CheckProcess(
            name, checks[len(results) :], options, {**verdicts, **{r.name: r.verdict for r in results}}
        )
        results += child.watch(ranks)
        limit = GRACE + max(check.limit for check in checks)
        reached = ranks.gather(f"end of {name}", len(results), limit)
        if missing := [rank for rank, number in enumerate(reached) if number is None]:
            left = checks[len(results) :]
            return [
                *results,
                *(CheckOutcome(check.name, "skipped", f"{names(missing)} does not answer") for check in left),
            ]
        # Another rank came further before it failed; all continue at the same check.
        for check in checks[len(results) : max(reached)]:
            results.append(CheckOutcome(check.name, "failed", "this rank did not get this far"))
        attempt += 1
    return results


class CheckProcess:
    """One child process that runs some checks."""

    def __init__(self, name: str, checks: Sequence[Check], options: Options, verdicts: dict[str, str]) -> None:
        self._name, self._checks = name, list(checks)
        self.log = Path(options.folder) / f"{name}.log"
        self._reader, writer = os.pipe()
        job = {
            "parent": os.getpid(),
            "options": asdict(options),
            "checks": [asdict(check) for check in checks],
            "verdicts": verdicts,
        }
        command = [sys.executable, "-m", "spmd_rl.tools.doctor.child", json.dumps(job), str(writer)]
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[writer],
                # A session for each child, so that `kill` reaches all processes that it starts.
                start_new_session=True,
            )
        os.close(writer)
        self._pending = b""

    def watch(self, ranks: Ranks) -> list[CheckOutcome]:
        """Read results until the child has ended, and kill it after a failure; one result for each started check."""
        results: list[CheckOutcome] = []
        began = time.monotonic()
        deadline, hurried, inside = began + self._checks[0].limit, False, True
        try:
            while len(results) < len(self._checks):
                lines = self._lines(0.1)
                if lines is None:
                    # Otherwise it has left after a failure, since other ranks wait in that check.
                    if inside:
                        results.append(self._died(self._checks[len(results)], time.monotonic() - began))
                    break
                for line in lines:
                    began, inside = time.monotonic(), "begin" in line
                    if not inside:
                        results.append(CheckOutcome(**line))
                    deadline = began + self._checks[min(len(results), len(self._checks) - 1)].limit
                if not hurried and ranks.announced(f"failed {self._name}"):
                    deadline, hurried = min(deadline, time.monotonic() + GRACE), True
                if time.monotonic() > deadline:
                    results.append(self._too_slow(self._checks[len(results)], time.monotonic() - began, hurried))
                    break
            else:
                self._wait(CLOSE_SECONDS)
        finally:
            self.kill()
        if len(results) < len(self._checks):
            ranks.announce(f"failed {self._name}")
        return results

    def _lines(self, seconds: float) -> list[dict] | None:
        if not select.select([self._reader], [], [], seconds)[0]:
            return []
        if not (chunk := os.read(self._reader, 1 << 16)):
            return None
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def _died(self, check: Check, seconds: float) -> CheckOutcome:
        died = time.time()
        self._wait(CLOSE_SECONDS)
        code = self._process.poll()
        how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
        said = self._last_line()
        if CONSEQUENCE in said:
            return CheckOutcome(check.name, "failed", said, "", seconds)
        told = f"its process ended ({how}): {said}; {self.log}"
        return CheckOutcome(check.name, "failed", told, check.cure, seconds, weight=3, at=died)

    def _too_slow(self, check: Check, seconds: float, hurried: bool) -> CheckOutcome:
        if hurried:
            return CheckOutcome(check.name, "failed", "waited for a rank that had failed", "", seconds)
        told = f"not finished after {check.limit:g} s; the last line of {self.log}: {self._last_line()}"
        return CheckOutcome(check.name, "failed", told, HANG, seconds, weight=1)

    def _last_line(self) -> str:
        lines = self.log.read_text(errors="replace").split("\n")
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "it printed nothing")

    def _wait(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def kill(self) -> None:
        """Kill the child and all processes that it has started; idempotent."""
        # The child leads its own session, so the group has everything that it started.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._reader >= 0:
            os.close(self._reader)
            self._reader = -1
