"""How a run of tests ends: each outcome is written down as it comes, and the interpreter has a limit at its own end."""

import faulthandler
import os
import sys

import pytest

from tests.patience import patient

END_SECONDS = 60.0
"""The time for the interpreter after the last test: it waits for threads that nobody has ended."""


def _note(*words: str) -> None:
    """A line for `tests/parts.py`, there even if this process is killed."""
    if path := os.environ.get("TEST_RESULTS"):
        with open(path, "a") as file:
            file.write("\t".join(word.replace("\t", " ").replace("\n", " ") for word in words) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _note("started", nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        _note(report.outcome, report.nodeid, _why(report))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _note("failed", report.nodeid, _why(report))


def pytest_unconfigure() -> None:
    faulthandler.dump_traceback_later(patient(END_SECONDS), exit=True, file=sys.__stderr__)


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    if report.skipped:
        return report.longrepr[2].removeprefix("Skipped: ")[:160] if isinstance(report.longrepr, tuple) else ""
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message.partition("\n")[0][:160] if report.failed and crash else ""
