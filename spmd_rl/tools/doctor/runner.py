"""Runs checks in a child process. Its crash or hang fails one check, and the others continue in a new child.

If all ranks run them, they agree where to continue.
"""

import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from spmd_rl.base.errors import UserError, one_line
from spmd_rl.base.process import contained
from spmd_rl.config.ranks import world_size
from spmd_rl.config.schema import RlvrConfig
from spmd_rl.tools.doctor.checks import ALONE, REPORT, Check, CheckOutcome, Failed, Skipped
from spmd_rl.tools.doctor.ranks import Ranks, names

GRACE = CLOSE_SECONDS = 10.0
"""Seconds beyond its limits that a child may take to end."""
HANG = "read the log; a collective that hangs: NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME=<interface>"
SETTING = "correct the setting that the message names"
CONSEQUENCE = "ended because"


def run_checks(
    checks: Sequence[Check], cfg: RlvrConfig, folder: Path, ranks: Ranks, earlier: Sequence[CheckOutcome] = ()
) -> list[CheckOutcome]:
    """Run checks of one process on these ranks and return their results, in order. folder: for logs and files."""
    results: list[CheckOutcome] = []
    while len(results) < len(checks):
        log = folder / f"{checks[0].process}-{len(results)}.log"
        results += _run_child(checks[len(results) :], cfg, log, ranks.size > 1, [*earlier, *results])
        reached = ranks.gather(log.stem, len(results), GRACE + max(check.limit for check in checks))
        if missing := [rank for rank, number in enumerate(reached) if number is None]:
            told = f"{names(missing)} does not answer"
            return results + [CheckOutcome(check.name, "skipped", told) for check in checks[len(results) :]]
        # Another rank came further before it failed; all continue at the same check.
        behind = checks[len(results) : max(reached)]
        results += [CheckOutcome(check.name, "failed", "this rank did not get this far") for check in behind]
    return results


def _run_child(
    checks: Sequence[Check], cfg: RlvrConfig, log: Path, leaves: bool, earlier: Sequence[CheckOutcome]
) -> list[CheckOutcome]:
    """Return a result for each check that one child has started. leaves: the child ends after a failure."""
    began = time.perf_counter()
    limit = sum(check.limit for check in checks) + CLOSE_SECONDS
    lines, end = contained(partial(_work, checks, cfg, log, {r.name: r.verdict for r in earlier}), limit)
    results = [CheckOutcome(**json.loads(line)) for line in lines]
    if len(results) == len(checks) or (leaves and results and results[-1].verdict == "failed"):
        return results
    check, seconds = checks[len(results)], time.perf_counter() - began - sum(r.seconds for r in results)
    lines = log.read_text(errors="replace").split("\n")
    last = next((line.strip()[:200] for line in reversed(lines) if line.strip()), "it printed nothing")
    if CONSEQUENCE in last:
        return [*results, CheckOutcome(check.name, "failed", last, "", seconds)]
    if end.endswith(signal.SIGALRM.name) or not end.startswith("ends"):
        told = f"not finished after {check.limit:g} s; the last line of {log}: {last}"
        return [*results, CheckOutcome(check.name, "failed", told, HANG, seconds, weight=1)]
    told = f"its process ended {end.removeprefix('ends its process ')}: {last}; {log}"
    return [*results, CheckOutcome(check.name, "failed", told, check.cure, seconds, weight=3, at=time.time())]


def _work(
    checks: Sequence[Check], cfg: RlvrConfig, log: Path, verdicts: dict[str, str], say: Callable[[str], None]
) -> None:
    """Run checks in this child one after the other, and say the result of each as JSON."""
    sys.stdout = sys.stderr = open(log, "w", buffering=1)  # noqa: SIM115 - until the end of the process
    for descriptor in (1, 2):
        os.dup2(sys.stderr.fileno(), descriptor)
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    meets = checks[0].process not in ALONE
    with ExitStack() as stack:
        # Made inside the first check, which then fails if a package cannot be imported.
        context = cache(lambda: _find("bench:Bench")(cfg.run.dir, log.parent, stack) if meets else cfg)
        for check in checks:
            # The kernel's timer also ends a call that never returns to the interpreter.
            signal.setitimer(signal.ITIMER_REAL, check.limit)
            result = _run(check, context, log, verdicts)
            verdicts[check.name] = result.verdict
            say(json.dumps(asdict(result)))
            if result.verdict == "failed" and meets and world_size() > 1 and context().has_world:
                # The other ranks may still be inside this check: World ends them with this one.
                raise RuntimeError(f"the check '{check.name}' failed")
        signal.setitimer(signal.ITIMER_REAL, CLOSE_SECONDS)
        if meets:
            context().close()


def _find(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module if "." in module else f"spmd_rl.tools.doctor.{module}"), name)


def _run(check: Check, context: Callable[[], Any], log: Path, verdicts: dict[str, str]) -> CheckOutcome:
    began = time.perf_counter()
    verdict, cure = "failed", check.cure
    try:
        if check.needs and verdicts.get(check.needs, "ok") != "ok":
            raise Skipped(f"it needs '{check.needs}'")
        function = _find(check.target)
        detail = function(check.subject, context()) if check.subject else function(context())
        if check.process not in ALONE:
            context().finish(check.name)
        verdict, cure = "ok", ""
    except Skipped as skipped:
        verdict, detail, cure = "skipped", str(skipped), ""
    except Failed as failed:
        detail, cure = failed.detail, failed.cure
    except UserError as error:
        detail, cure = str(error), SETTING if check.cure == REPORT else check.cure
    except Exception as error:  # noqa: BLE001 - a check may fail in any way: it is recorded, with its traceback
        traceback.print_exc()
        detail = f"{one_line(error)}; log: {log}"
    return CheckOutcome(check.name, verdict, detail, cure, time.perf_counter() - began, weight=2, at=time.time())
