"""A child process of the doctor, which runs checks one after the other and writes a line of JSON about each.

python -m spmd_rl.tools.doctor.child JOB FD
"""

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from spmd_rl.base.errors import UserError, one_line
from spmd_rl.base.process import die_with_parent
from spmd_rl.tools.doctor.checks import REPORT, Check, CheckOutcome, Failed, Options, Skipped

SETTING = "correct the setting that the message names"


def main(arguments: Sequence[str]) -> None:
    """Run the checks of a job, and write a line at the beginning of each and its result."""
    job, out = json.loads(arguments[0]), int(arguments[1])
    # A killed doctor must not leave a child on a device.
    die_with_parent(job["parent"])
    options = Options(**job["options"])
    checks = [Check(**fields) for fields in job["checks"]]
    verdicts = job["verdicts"]
    with ExitStack() as stack:
        context = build_context(checks[0].process, options, stack)
        for check in checks:
            _tell(out, {"begin": check.name})
            result = run(check, context, verdicts)
            verdicts[check.name] = result.verdict
            _tell(out, asdict(result))
            if result.verdict == "failed" and context_meets(context):
                context.leave_if_others_wait(check.name)
        if context_meets(context):
            context.close()
    # Threads and processes of a library must not delay the doctor.
    os._exit(0)


def build_context(process: str, options: Options, stack: ExitStack) -> Any:
    """Return the argument of the checks of a process: the options, or a `Bench`."""
    if process == "node":
        return options
    from spmd_rl.tools.doctor.bench import Bench

    return Bench(options, stack)


def context_meets(context: Any) -> bool:
    """Return True if the other ranks run the same checks."""
    return not isinstance(context, Options)


def run(check: Check, context: Any, verdicts: dict[str, str]) -> CheckOutcome:
    """Run one check; an exception becomes its result."""
    began = time.perf_counter()
    verdict, cure = "failed", check.cure
    try:
        if check.needs and verdicts.get(check.needs, "ok") != "ok":
            raise Skipped(f"it needs '{check.needs}'")
        module, _, name = check.target.partition(":")
        module = module if "." in module else f"spmd_rl.tools.doctor.{module}"
        function = getattr(importlib.import_module(module), name)
        detail = function(check.subject, context) if check.subject else function(context)
        if context_meets(context):
            context.finish(check.name)
        verdict, cure = "ok", ""
    except Skipped as skipped:
        verdict, detail, cure = "skipped", str(skipped), ""
    except Failed as failed:
        detail, cure = failed.detail, failed.cure
    except UserError as error:
        detail, cure = str(error), SETTING if check.cure == REPORT else check.cure
    except Exception as error:  # noqa: BLE001 - a check may fail in any way: it is recorded, with its traceback
        traceback.print_exc()
        folder = (context.options if context_meets(context) else context).folder
        detail = f"{one_line(error)}; log: {folder}"
    return CheckOutcome(check.name, verdict, detail, cure, time.perf_counter() - began, weight=2, at=time.time())


def _tell(out: int, line: dict[str, Any]) -> None:
    os.write(out, json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
