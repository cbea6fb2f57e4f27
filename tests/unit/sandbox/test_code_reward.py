"""The code reward: row shapes, extraction, what is a zero and what is none; with hostile answers in a real sidecar."""

import asyncio
import gzip
import json
import sys

import pytest

from rewards.code import CodeReward
from spmd_rl import sidecar
from spmd_rl.config.schema import RewardConfig, RewardsConfig
from spmd_rl.sandbox.forkserver import ForkServer
from spmd_rl.types import AnswerInfo, Prompt
from tests.unit.rewards.helpers import DATA, verdict
from tests.unit.sidecar_helpers import private_node, workers_of

pytestmark = pytest.mark.judge
INFO = AnswerInfo(1, "stop")
SUM = {"test_cases": [{"stdin": f"{n} 1", "expected_stdout": str(n + 1)} for n in range(4)]}


CHECK = "def check(candidate):\n    assert candidate(2) == 2\n"


def calls(*outputs: str) -> dict:
    """A row of calls `f(0)`, `f(1)`, ... with these results."""
    cases = [{"input": str(number), "output": output} for number, output in enumerate(outputs)]
    return {"test_case_function": "f", "test_cases": cases}


@pytest.fixture
def node(monkeypatch):
    yield from private_node(monkeypatch)


def row(**extra) -> Prompt:
    return Prompt("0" * 32, (), "code", "", extra)


def fenced(code: str) -> str:
    return f"Sure:\n```python\n{code}\n```\nDone."


@pytest.mark.mounts
def test_examples(sandbox):
    for asked, answer, score in CodeReward.examples():
        found = CodeReward(sandbox).score(asked, answer, INFO)
        assert found.scored and found.score == score, (asked, answer, found)


def test_a_usage_example_after_the_program_is_left_out(sandbox):
    answer = fenced("def f(x): return x + 1") + "For example:\n" + fenced("print(f(1), f(input()))")
    tests = {"case_type": "assert", "test_cases": ["assert f(1) == 2"]}
    assert CodeReward(sandbox).score(row(**tests), answer, INFO).score == 1.0
    answer = fenced("print(sum(map(int, input().split())))") + "For `1 2`:\n" + fenced("print(1 + 2)")
    assert CodeReward(sandbox).score(row(**SUM), answer, INFO).score == 1.0


def test_output_limit_and_tolerance_are_settings(sandbox):
    extra = {"test_cases": [{"input": "", "output": "0.333333\n" * 60_000}]}
    answer = fenced("for _ in range(60_000): print(1 / 3)")
    assert CodeReward(sandbox).score(row(**extra), answer, INFO).score == 1.0
    assert CodeReward(sandbox, tolerance=0.0).score(row(**extra), answer, INFO).score == 0.0
    assert CodeReward(sandbox, output_mb=1).score(row(**extra), answer, INFO).score == 0.0


def test_partial_credit(sandbox):
    answer = fenced("n = int(input().split()[0])\nprint(n + 1 if n < 3 else 0)")
    assert CodeReward(sandbox, partial=True).score(row(**SUM), answer, INFO).score == 0.75
    assert CodeReward(sandbox).score(row(**SUM), answer, INFO).score == 0.0


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "print('x' * 10**7)",
        "1/0",
        "import os; os.abort()",
        "print(1",
        "exit(3)",
        "print(1); exit(1)",
    ],
)
def test_a_program_at_fault_is_a_zero(sandbox, code):
    found = CodeReward(sandbox, seconds=1, total_seconds=50.0).score(row(**SUM), fenced(code), INFO)
    assert (found.status, found.score) == ("ok", 0.0), found


def test_a_program_that_waits_is_no_zero(sandbox):
    reward = CodeReward(sandbox, total_seconds=1.0)
    assert reward.score(row(**SUM), fenced("import time; time.sleep(60)"), INFO).status == "timeout"
    tests = {"case_type": "assert", "test_cases": ["assert f() == 1"]}
    found = reward.score(row(**tests), fenced("import time\ndef f(): time.sleep(60)"), INFO)
    assert found.status == "timeout" and found.detail == "it slept through 1 s of wall time"


def test_what_works_is_ended_by_processor_time_and_its_verdict_says_so(sandbox, monkeypatch):
    """However small the share of a busy machine that it gets: its wall time is less than its processor time here, and
    no patience ends."""
    monkeypatch.setattr("spmd_rl.sandbox.base.PATIENCE", float("inf"))
    tests = {"case_type": "assert", "test_cases": ["assert f() == 1"]}
    for extra, code in ((SUM, "while True: pass"), (tests, "def f():\n    while True: pass")):
        found = CodeReward(sandbox, seconds=1, total_seconds=0.9).score(row(**extra), fenced(code), INFO)
        assert (found.status, found.score) == ("ok", 0.0) and "processor time is used up" in found.detail, found
    slow = fenced("n = int(input().split()[0])\nfor i in range(20 * 10**6): pass\nprint(n + 1)")
    assert CodeReward(sandbox, total_seconds=0.9).score(row(**SUM), slow, INFO).detail.endswith("0.9 s for all")


def test_another_interpreter():
    made = ForkServer()
    with pytest.raises(RuntimeError, match="no interpreter python9"):
        CodeReward(made, python="python9.9")
    version = row(test_cases=[{"input": "", "output": sys.version.split()[0]}])
    answer = fenced("import sys\nprint(sys.version.split()[0])")
    assert CodeReward(made, python=sys.executable).score(version, answer, INFO).score == 1.0
    made.close()


@pytest.mark.parametrize(
    ("extra", "right", "wrong"),
    [
        (  # LiveCodeBench: a method of Solution
            {"test_case_function": "twice", "test_cases": [{"input": '[1, 2]\n"x"', "output": "[2, 4]"}]},
            "class Solution:\n    def twice(self, xs: List[int], s): return tuple(2 * x for x in xs)",
            "class Solution:\n    def twice(self, xs, s): return xs",
        ),
        (  # ROLL
            {
                "case_type": "check_based",
                "test_cases": '[{"assert_code": "def check(candidate):\\n    assert candidate(2) == 4\\n", '
                '"import_prefix": "import math\\n", "entry_point": "square"}]',
            },
            "def square(x): return int(math.pow(x, 2))",
            "def square(x): return 2 ** x + 1",
        ),
        (
            {"case_type": "pytest", "test_cases": [{"assert_code": "def test_f():\n    assert f(1) == 2"}]},
            "def f(x): return x + 1",
            "def f(x): return x",
        ),
        (  # a function named as a builtin
            {"test_case_function": "sum", "test_cases": [{"stdin": "[1, 2]", "expected_stdout": "3"}]},
            "def sum(xs):\n    return xs[0] + xs[1]",
            "x = 1",
        ),
    ],
)
def test_shapes(sandbox, extra, right, wrong):
    assert CodeReward(sandbox).score(row(**extra), fenced(right), INFO).score == 1.0
    found = CodeReward(sandbox).score(row(**extra), fenced(wrong), INFO)
    assert (found.status, found.score) == ("ok", 0.0)


@pytest.mark.parametrize(
    ("extra", "right"),
    [
        (calls("Infinity", "-inf", "NaN"), "def f(x): return float(['inf', '-inf', 'nan'][x])"),
        (calls("[true, null]", '{"0": 1}', "'a'"), "def f(x): return [(True, None), {'0': 1.0}, 'a'][x]"),
        ({"test": CHECK, "prompt": "def g(x):\n    return x\n\ndef f(x):\n"}, "def f(x): return g(x)"),
        ({"test": CHECK, "prompt": "Write f!", "entry_point": "f"}, "def f(x): return x"),
        ({"test": CHECK + "check(f)", "entry_point": "f"}, "def f(x): return x"),
    ],
)
def test_what_a_row_leaves_out(sandbox, extra, right):
    assert CodeReward(sandbox).score(row(**extra), fenced(right), INFO).score == 1.0
    found = CodeReward(sandbox).score(row(**extra), fenced("same = lambda *_: True\ndef f(x): return -1"), INFO)
    assert (found.status, found.score) == ("ok", 0.0)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"test_cases": "[]"},
        {"test": CHECK},
        {"test": "import numpy", "entry_point": "f"},
        {"case_type": "text", "test_cases": [{}]},
    ],
)
def test_a_row_at_fault_is_an_error(sandbox, extra):
    assert verdict(CodeReward(sandbox), row(**extra), fenced("def f(): pass")).status == "error"


HOSTILE = {
    "while True: pass": 0.0,
    "import os\nwhile True: os.fork()": 0.0,
    "b = []\nwhile True: b.append(bytes(1 << 24))": 0.0,
    "import os, signal\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)": 0.0,
    "while True: print('x' * 65536)": 0.0,
    "import os\nos._exit(0)": 0.0,
    "import threading\nthreading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()": 0.0,
    "print(2)": 0.0,
    "print(sum(map(int, input().split())))": 1.0,
}


@pytest.mark.parametrize("name", ["auto", "forkserver"])
def test_hostile_answers_in_a_sidecar_cost_no_worker(node, name):
    code = RewardConfig(
        target="rewards.code:CodeReward",
        args={"seconds": 1, "total_seconds": 50.0},
        workers=2,
        timeout=60.0,
        sandbox=name,
    )

    async def ask(scorer, answers):
        return await asyncio.gather(*(scorer.score(row(**SUM), answer, INFO) for answer in answers))

    try:
        with sidecar.connect(RewardsConfig(domains={"code": code}), node) as scorer:
            before = {worker.pid for worker in workers_of(scorer)}
            found = asyncio.run(ask(scorer, map(fenced, HOSTILE)))
            assert before == {worker.pid for worker in workers_of(scorer)} or len(before) < 2  # the second was starting
    except sidecar.scorer.UserError as error:
        pytest.skip(str(error))
    assert [(one.status, one.score) for one in found] == [("ok", score) for score in HOSTILE.values()]


def humaneval() -> list[dict]:
    path = DATA / "human_eval" / "HumanEval.jsonl.gz"
    if not path.exists():
        pytest.skip(f"no {path}")
    with gzip.open(path) as file:
        return [json.loads(line) for line in file]


def test_humaneval_canonical_solutions_score_one_and_those_of_other_rows_zero(sandbox):
    reward, rows = CodeReward(sandbox, total_seconds=30.0), humaneval()
    for mine, other in zip(rows, rows[1:] + rows[:1], strict=True):
        asked = row(**mine)
        right = reward.score(asked, fenced(mine["prompt"] + mine["canonical_solution"]), INFO)
        assert right.score == 1.0, (mine["task_id"], right)
        wrong = reward.score(asked, fenced(mine["prompt"] + "    pass\n"), INFO)
        assert (wrong.status, wrong.score) == ("ok", 0.0), (mine["task_id"], wrong)
        alien = other["canonical_solution"]
        wrong = reward.score(asked, fenced(mine["prompt"] + alien), INFO)
        assert (wrong.status, wrong.score) == ("ok", 0.0), (mine["task_id"], other["task_id"], wrong)
