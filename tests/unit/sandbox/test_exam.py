"""The exam: right answers of every shape pass it in each sandbox, and what only looks right does not."""

import json
import random
import time
from types import SimpleNamespace

import pytest

from spmd_rl.sandbox import open_sandbox
from spmd_rl.sandbox.exam import examine
from spmd_rl.types import RunLimits, RunResult
from tests.patience import patient
from tests.unit.sandbox.exam_answers import ANSWERS
from tests.unit.sandbox.exam_cheats import CHEATS, SHAPES

LIMITS = RunLimits(cpu_seconds=2, wall_seconds=60.0)
PASSED = RunResult("exit", 0, "", "", 0.1)


@pytest.fixture(scope="module")
def box():
    """One sandbox, for the long lists."""
    made = open_sandbox("auto", "reward.code.sandbox")
    yield made
    made.close()


def exam(box, code: str, source: str, prelude: str = "", entry: str = "", limits: RunLimits = LIMITS, seed: int = 0):
    return examine(box, code, source, prelude, entry, limits, random.Random(seed))


@pytest.mark.parametrize("name", ANSWERS)
def test_a_right_answer_passes(box, name: str) -> None:
    passed, why = exam(box, *ANSWERS[name])
    assert passed and all(passed), why


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_does_not_pass(box, name: str) -> None:
    shape, code = CHEATS[name]
    passed, why = exam(box, code, SHAPES[shape])
    assert passed and not all(passed) and why


@pytest.mark.parametrize("name", ["fixtures", "unittest with set-up", "files", "a linked list of the tests"])
def test_answers_in_each_sandbox(sandbox, name: str) -> None:
    passed, why = exam(sandbox, *ANSWERS[name])
    assert passed and all(passed), why


@pytest.mark.parametrize("name", ["equal to everything", "a forged report", "reads the expectation from the caller"])
def test_cheats_in_each_sandbox(sandbox, name: str) -> None:
    shape, code = CHEATS[name]
    assert not any(exam(sandbox, code, SHAPES[shape])[0])


@pytest.mark.mounts
def test_where_there_are_no_files(sandbox) -> None:
    code, source = ANSWERS["a class with operators"]
    assert exam(sandbox, code, source)[0] == [True, True, True]


def test_each_test_is_told_apart(box) -> None:
    source = "def test_a(): assert f(1) == 2\ndef test_b(): assert f(2) == 5\ndef test_c(): f(3)"
    passed, why = exam(box, "def f(x): return 2 * x", source)
    assert passed == [True, False, True] and why.startswith("test_b: AssertionError")


def test_the_entry_is_the_codes_and_the_rest_of_the_prelude_is_not(box) -> None:
    prelude = "def helper(x): return x * 2\ndef f(x):\n    'Doc.'\n"
    test = "def check(candidate):\n    assert candidate(1) == helper(1)\ncheck(f)"
    assert exam(box, "def f(x): return helper(x)", test, prelude, "f")[0] == [True]
    assert exam(box, "def helper(x): return 0\ndef f(x): return 0", test, prelude, "f")[0] == [False]
    assert exam(box, "x = 1", test, prelude, "f")[0] == [False]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("assert f(1) ==", "do not compile"),
        ("import nowhere_at_all\nassert f(1) == 1", "need nowhere_at_all"),
        ("def test_a(nothing): assert f(1) == 1", "need the fixture nothing"),
        ("f(1)", "check nothing"),
        ("", "check nothing"),
    ],
)
def test_faulty_tests_are_an_error(box, source: str, why: str) -> None:
    with pytest.raises(RuntimeError, match=why):
        exam(box, "def f(x): return x", source)


SKIPS = """
import sys, pytest, unittest
@pytest.mark.skipif(sys.platform == "nowhere", reason="no")
def test_here(): assert f(2) == 4
@pytest.mark.skipif(sys.platform != "nowhere", reason="no")
def test_nowhere(): assert f(2) == 5
@pytest.mark.parametrize("a, b", [(1, 2), pytest.param(3, 7, marks=pytest.mark.skip), (5, 10)])
def test_in_part(a, b): assert f(a) == b
"""


def test_tests_that_skip_themselves_do_not_count(box) -> None:
    assert exam(box, "def f(x): return 2 * x", SKIPS)[0] == [True, True]
    for given in (2, 5):
        code = f"import pytest\ndef f(x):\n    if x == {given}: pytest.skip('no')\n    return 2 * x"
        assert exam(box, code, SKIPS)[0] == [given != 2, given != 5]


@pytest.mark.parametrize(
    "source",
    [
        "import pytest\n@pytest.mark.skip\ndef test_a(): assert f(1) == 2",
        "import pytest\npytestmark = pytest.mark.skip\ndef test_a(): assert f(1) == 2",
        "import pytest\ndef test_a():\n    pytest.skip('later')\n    assert f(1) == 2",
        "import unittest\nclass T(unittest.TestCase):\n def test_a(self):\n  self.skipTest('')\n  assert f(1) == 2",
    ],
)
@pytest.mark.parametrize("code", ["def f(x): return 2 * x", "", "raise SystemExit"])
def test_tests_that_all_skip_themselves_are_an_error(box, source: str, code: str) -> None:
    with pytest.raises(RuntimeError, match="skip themselves"):
        exam(box, code, source)


@pytest.mark.mounts
def test_tests_of_files_where_there_are_none_are_an_error(sandbox) -> None:
    code, source = "def f(path): return open(path).read()", "open('a', 'w').write('b')\nassert f('a') == 'b'"
    if sandbox.name == "forkserver-unmounted":
        with pytest.raises(RuntimeError, match="the tests need files"):
            exam(sandbox, code, source)
    else:
        assert exam(sandbox, code, source)[0] == [True]


def test_a_type_is_what_an_object_is(box) -> None:
    code = "class Fake:\n    __class__ = int\ndef f(x): return Fake()"
    assert exam(box, code, "assert isinstance(f(1), int)\nassert f(1) is not None")[0] == [False]
    source = "import unittest\nclass T(unittest.TestCase):\n  def test_a(self): self.assertIsInstance(f(1), int)"
    assert exam(box, code, source)[0] == [False]
    assert exam(box, "def f(x): return 1", source)[0] == [True]


def test_code_cannot_blame_the_tests(box) -> None:
    code = "def f(x): raise ModuleNotFoundError(\"No module named 'nowhere'\")"
    assert exam(box, code, "assert f(1) == 1")[0] == [False]
    code = "def f(x): raise ValueError(\"fixture 'a' not found\")"
    assert exam(box, code, "def test_a(): assert f(1) == 1")[0] == [False]


def test_without_time_there_is_no_verdict(box) -> None:
    limits = RunLimits(wall_seconds=0.5)
    begun = time.monotonic()
    assert exam(box, "import time\ndef f(): time.sleep(100)", "assert f() == 1", limits=limits) == ([], "")
    assert time.monotonic() - begun < patient(5)


# -- without a sandbox ------------------------------------------------------------------------------------------------


class Forger:
    """Answers each job with a report of its own making."""

    def __init__(self, report, result: RunResult = PASSED) -> None:
        self.report, self.result, self.jobs = report, result, 0

    def run_jobs(self, jobs: list[dict], limits: RunLimits, stdin: str = "") -> list[SimpleNamespace]:
        self.jobs += 1
        report = self.report() if callable(self.report) else self.report
        return [SimpleNamespace(result=self.result, report=report)]


def told(held: str) -> bytes:
    return json.dumps({"units": {"": "passed"}, "events": [["", 0, held]], "detail": ""}).encode()


@pytest.mark.parametrize(
    "report",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff" * 100,
        b"[" * 100_000,
        b'{"units": {}, "events": [], "detail": ""}',
        b'{"units": {"": "passed"}, "events": {"a": 1}, "detail": ""}',
        b'{"units": {"": "passed"}, "events": [["", 0, "1"], ["", 0, "1"]], "detail": ""}',
        b'{"units": {"": "passed"}, "events": [["", 99, "1"]], "detail": ""}',
        b'{"units": {"": "passed"}, "events": [["", 0, ""]], "detail": ""}',
        b'{"units": {"": "passed"}, "events": [["", 0, null]], "detail": ""}',
        b'{"units": {"": "passed"}, "events": [["", true, "1"]], "detail": ""}',
        b'{"units": {"": []}, "events": [], "detail": ""}',
        b'{"units": {"": "passed"}, "events": [], "detail": 5}',
        told("1"),
        told("0"),
    ],
)
def test_a_report_that_is_forged_is_a_failure(report: bytes) -> None:
    passed, why = exam(Forger(report), "", "assert f(1) == 2")
    assert passed == [False] and why.isprintable()


def test_a_process_that_was_killed_is_a_failure() -> None:
    for end in ("cpu", "signal", "output"):
        assert exam(Forger(told("1"), RunResult(end, 0, "", "", 0.1)), "", "assert f(1) == 2")[0] == [False]


@pytest.mark.parametrize("chance", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("source", ["assert f(1) == 2", "assert f(1) > 2", "assert 3 in f(1)"])
def test_a_report_by_chance_hardly_ever_passes(chance: float, source: str) -> None:
    coin = random.Random(int(chance * 10))
    forger = Forger(lambda: told("1" if coin.random() < chance else "0"))
    passes = sum(exam(forger, "", source, seed=seed)[0] == [True] for seed in range(100))
    assert passes <= 2


def test_without_partial_credit_one_failure_ends_it(box) -> None:
    jobs = []

    class Counted:
        def run_jobs(self, *args) -> list:
            jobs.append(args)
            return box.run_jobs(*args)

    source = "def test_a(): assert f(1) == 3\ndef test_b(): assert f(1) == 2"
    code = "def f(x): return 2 * x"
    assert examine(Counted(), code, source, "", "", LIMITS, partial=False)[0] == [False, False] and len(jobs) == 1
    assert examine(Counted(), code, source, "", "", LIMITS)[0] == [False, True] and len(jobs) > 8


def test_an_honest_failure_costs_one_run() -> None:
    forger = Forger(told("0"))
    exam(forger, "", "assert f(1) == 2")
    assert forger.jobs == 1
