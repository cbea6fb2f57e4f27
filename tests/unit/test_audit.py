"""The audit of rewards: no cheat that a shipped reward knows is paid by it, and one that is paid is told."""

import asyncio
import json
import os
import subprocess
import sys
import time

import msgspec
import pytest

from rewards.choice import ChoiceReward
from rewards.code import CodeReward
from rewards.composite import CompositeReward
from rewards.format import FormatReward
from rewards.general import GeneralReward
from rewards.ifeval import IfevalReward
from rewards.math_verify import MathReward
from rewards.reasoning_gym import ReasoningGymReward
from spmd_rl.base.errors import RunFailed
from spmd_rl.base.targets import build_target
from spmd_rl.config.load import load
from spmd_rl.config.schema import RlvrConfig
from spmd_rl.sandbox.forkserver import ForkServer
from spmd_rl.sidecar import wire
from spmd_rl.sidecar.worker import judge
from spmd_rl.tools import audit
from spmd_rl.tools.reward_audit import (
    ASKED,
    EMPTY,
    GOLD,
    OTHER,
    PROMPT,
    UNSUPPORTED,
    cheats_asked,
    describe,
    paid_cheats,
    unjudged,
)
from spmd_rl.tools.reward_audit import audit as audited
from spmd_rl.types import SUSPECT, AnswerInfo, Message, Prompt, Verdict
from tests.unit.test_dry_run import line, place  # noqa: F401 - a fixture


def row(truth: str, question: str = "What is it?", **extra) -> Prompt:
    return Prompt("0" * 32, (Message("user", question),), "x", truth, extra)


ADD = "def add(a, b):\n    return a + b"
ONE_MORE = "class Any:\n    __contains__ = lambda *a: True\ndef add(a, b): return Any()"
ROWS = {
    MathReward: [row("18"), row("\\frac{3}{4}"), row("(0, 1]"), row("{1, 2, 3}"), row("x^2 + 1"), row("5 \\text{ km}")],
    ChoiceReward: [row("B"), row("AC"), row("J")],
    GeneralReward: [row("Western blot"), row("the bishop moves"), row("1789")],
    ReasoningGymReward: [
        row(answer, task="chain_sum", entry={"question": "", "answer": answer, "metadata": {}})
        for answer in ("-4", "6")
    ],
}


@pytest.mark.parametrize("reward", ROWS)
def test_no_known_cheat_is_paid(reward):
    kinds = audited(reward(), ROWS[reward], 9)
    assert kinds[GOLD].mean == 1.0 and not kinds[GOLD].wrong and not paid_cheats(kinds), dict(describe(kinds))
    assert {EMPTY, PROMPT, OTHER} < kinds.keys() and sum(name.startswith("cheat: ") for name in kinds) > 3


def test_no_known_cheat_of_code_is_paid():
    try:
        sandbox = ForkServer()
        sandbox.prove()
    except RuntimeError as error:
        pytest.skip(str(error))
    rows = [
        row("", test="def check(candidate):\n    assert candidate(1, 2) == 3", entry_point="add", solution=ADD),
        row("", test_cases=[{"assert_code": "assert add(1, 2) > 2"}], case_type="assert", solution=ADD),
        row("", test_cases=[{"input": "1\n2", "output": "3"}], test_case_function="add", solution=ADD),
        row("", test_cases=[{"input": "4", "output": "16"}], solution="print(int(input()) ** 2)"),
    ]
    rows.append(row("", test="def test_f(tmp_path): assert add(1, 2) == 3", solution=ADD))
    rows.append(row("", test="def test_f(): assert add(1, 2) == 3", solution="class add(int):\n    pass"))
    rows.append(row("", test="def test_f(): assert list(map(add, [1], [2])) in add(1, 2)", solution=ONE_MORE))
    kinds = audited(CodeReward(sandbox), [msgspec.structs.replace(one, id=f"{i}") for i, one in enumerate(rows)], 9)
    sandbox.close()
    assert kinds[GOLD].scores == [1.0] * 4 + [0.0] and not paid_cheats(kinds), dict(describe(kinds))
    told = dict(describe(kinds))[UNSUPPORTED]
    assert told.startswith("2 rows, left out of a run: 1 x process: the tests need the fixture tmp_path; 1 x gold: ")


def test_what_form_and_words_alone_pay_is_told():
    assert paid_cheats(audited(FormatReward(), [row("")], 1)) == ["cheat: empty tags", "cheat: blank tags"]
    asked = {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["rose", "red"]}]}
    assert "cheat: the words asked for" in paid_cheats(audited(IfevalReward(), [row("", **asked)], 1))


def test_a_term_for_the_form_is_no_cheat_but_a_part_that_is_cheated_is_told():
    parts = {"right": {"target": "rewards.math_verify:MathReward"}}
    form = {"form": {"target": "rewards.format:FormatReward", "args": {"form": "boxed"}, "weight": 0.1}}
    kinds = audited(CompositeReward(parts | form, build_target), [row("18"), row("7")], 2)
    assert "cheat: right: several boxes" in kinds and kinds[OTHER].mean == pytest.approx(0.1) and not paid_cheats(kinds)
    alone = CompositeReward({"form": {"target": "rewards.format:FormatReward"}}, build_target)
    assert "cheat: form: empty tags" in paid_cheats(audited(alone, [row("")], 1))


SUSPECTS = [
    (MathReward(), "\\boxed{1} \\boxed{2} \\boxed{3} \\boxed{18}", True),
    (MathReward(), "First \\boxed{17}, no: \\boxed{18}.", False),
    (ChoiceReward(), "The answer is A. The answer is C. The answer is D. The answer is B.", True),
    (ChoiceReward(), "Not A. The answer is B.", False),
    (GeneralReward(), "\\boxed{a} \\boxed{b} \\boxed{c} \\boxed{Western blot}", True),
    (GeneralReward(), "The answer is: Western blot", False),
    (FormatReward(), "<think>a</think><answer> </answer>", True),
    (FormatReward(), "<think>a</think><answer>4</answer>", False),
    (IfevalReward(), "rose " * 50, True),
    (IfevalReward(), "A rose is a rose.", False),
    (CodeReward(None), "```python\nclass A:\n    def __eq__(self, other):\n        return True\n```", True),
    (CodeReward(None), "```python\nimport os\nos._exit(0)\n```", True),
    (CodeReward(None), "```python\nclass A:\n    def __eq__(self, o):\n        return self.x == o.x\n```", False),
    (CodeReward(None), "```python\nclass A: __eq__ = lambda s, o: True\n```", True),
    (CodeReward(None), "```python\nclass A: __sub__ = lambda s, o: 0\n```", True),
    (CodeReward(None), "```python\nclass A:\n    def __bool__(self): return True\n```", True),
    (CodeReward(None), "```python\nclass A: __class__ = int\n```", True),
    (CodeReward(None), "```python\nimport gc, sys\ngc.get_objects()\n```", True),
    (CodeReward(None), "```python\nimport builtins\nbuiltins.abs = lambda x: 0\n```", True),
    (CodeReward(None), "```python\nclass A:\n    def __sub__(self, o): return A(self.x - o.x)\n```", False),
    (CodeReward(None), "```python\nclass A:\n    def __len__(self): return len(self.x)\n```", False),
    (CompositeReward({"a": {"target": "rewards.format:FormatReward"}}, build_target), "<answer></answer>", True),
]


@pytest.mark.parametrize(("rewarder", "answer", "suspect"), SUSPECTS)
def test_tell_tales(rewarder, answer, suspect):
    assert bool(rewarder.suspect(row("18"), answer)) is suspect


class Pays:
    """Pays for everything, and finds one kind of answer suspect."""

    def score(self, prompt, answer, info):
        return float(answer != "wrong")

    def cheats(self, prompt):
        yield "anything", "anything"

    def suspect(self, prompt, answer):
        return "it ends with a bell" if answer.endswith("\a") else ""


def test_a_paid_answer_that_looks_like_a_cheat_is_marked():
    found = [
        asyncio.run(judge(Pays(), wire.ScoreInput(row(""), answer, AnswerInfo(1, "stop"))))
        for answer in ("right", "ding\a", "wrong")
    ]
    assert found == [Verdict("ok", 1.0), Verdict("ok", 1.0, {SUSPECT: 1.0}, "it ends with a bell"), Verdict("ok", 0.0)]


def test_the_table_and_its_end(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"question": f"{n}?", "answer": str(n)}) + "\n" for n in range(9))
    )
    given = [
        "data=jsonl_math",
        f"data.train={tmp_path}/rows.jsonl",
        "reward.math.target=rewards.math_verify:MathReward",
    ]
    audit.show(load("rlvr", RlvrConfig, given), 2)
    said = capsys.readouterr().out
    assert "math: rewards.math_verify:MathReward, 2 rows" in said and "cheat: several boxes" in said and "!" not in said
    given[-1] = "reward.math.target=tests.unit.test_audit:Pays"
    with pytest.raises(RunFailed, match="that solve nothing are rewarded: math: empty answer"):
        audit.show(load("rlvr", RlvrConfig, given), 2)
    assert "! 2 paid" in capsys.readouterr().out


class Fails:
    """Cannot judge an empty answer."""

    def score(self, prompt, answer, info):
        return float(answer.split()[0] == prompt.ground_truth)


def test_a_reward_that_fails_on_an_answer_is_told(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"question": "{n}?", "answer": "{n}"}}\n' for n in range(9)))
    given = [f"data.train={tmp_path}/rows.jsonl", "reward.math.target=tests.unit.test_audit:Fails"]
    with pytest.raises(RunFailed, match=r"^2 rows cannot be judged: math, row \w+, empty answer: error: .*IndexError"):
        audit.show(load("rlvr", RlvrConfig, ["data=jsonl_math", *given]), 2)
    assert "! 2 not: error: " in capsys.readouterr().out


def test_a_domain_that_is_not_trained_on_is_audited_as_evaluated_only(tmp_path, capsys):
    """Also: the last line tells of what was asked, and of what was not."""
    rows = [{"question": f"{n}?", "answer": str(n), "domain": "ab"[n % 2]} for n in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [f"data.train={tmp_path}/rows.jsonl", "data.mix={a: 1, b: 0}", "data.holdout=0.6"]
    given += [f"reward.{domain}.target=rewards.math_verify:MathReward" for domain in "ab"]
    audit.show(load("rlvr", RlvrConfig, ["data=jsonl_math", *given]), 1)
    said = capsys.readouterr().out
    assert "a: rewards.math_verify:MathReward, 1 row\n" in said
    assert "b: rewards.math_verify:MathReward, 1 row, evaluated only\n" in said
    assert said.endswith(
        "Held-out rows of domains that are trained on were not audited. rows=N audits more rows of each domain.\n"
    )


def test_answers_without_a_score_are_not_counted_as_unpaid():
    kinds = audited(Fails(), [row("1"), row("2")], 2)
    assert cheats_asked(kinds) == (0, 2)


def whole(answer, ground_truth):
    return answer == ground_truth


def never(answer, ground_truth):
    return 0.0


@pytest.mark.parametrize(
    ("reward", "why"),
    [
        ("whole", r"^math, row \w+: it rewards '\d', but not .*boxed.* \(and 1 more\)$"),
        ("never", "^math, no form of the"),
    ],
)
def test_a_right_answer_that_is_not_paid_as_the_prompt_asks_is_told(tmp_path, capsys, reward, why):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"question": "{n}?", "answer": "{n}"}}\n' for n in range(9)))
    given = [f"data.train={tmp_path}/rows.jsonl", f"reward.math.target=tests.unit.test_audit:{reward}"]
    with pytest.raises(RunFailed, match=why):
        audit.show(load("rlvr", RlvrConfig, ["data=jsonl_math", *given]), 2)
    said = " ".join(capsys.readouterr().out.split())
    assert f"{ASKED} 0.00 2 scored ! 2 below 1 as '\\\\boxed{{...}}'" in said


def test_a_reward_that_takes_too_long_is_asked_once(monkeypatch):
    asked = []

    class Sleeps:
        def score(self, prompt, answer, info):
            asked.append(answer)
            time.sleep(60)

    kinds = audited(Sleeps(), [row("1"), row("2")], 2, seconds=0.1)
    assert asked == ["1"] and unjudged(kinds)[0].endswith("timeout: no score after 0.1 s")


def test_rows_whose_tests_check_nothing_are_told():
    try:
        sandbox = ForkServer()
        sandbox.prove()
    except RuntimeError as error:
        pytest.skip(str(error))
    idle = row("", test_cases=[{"assert_code": "assert 1 < 2"}], case_type="assert", solution="x = 1")
    idle = msgspec.structs.replace(idle, id="idle")
    good = row("", test_cases=[{"assert_code": "assert add(1, 2) > 2"}], case_type="assert", solution=ADD)
    kinds = audited(CodeReward(sandbox), [idle, good], 9)
    sandbox.close()
    (told,) = unjudged(kinds)
    assert told.startswith(f"row idle, {GOLD}: error: ") and "tests never call the program" in told
    assert not paid_cheats(kinds)


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        ([], 1, "solve nothing are rewarded"),
        (["rows=0"], 2, "error: rows=0: must"),
        (["--dry-run"], 2, "error: --dry-run: not an option of audit"),
    ],
)
def test_the_command_line(place, given, code, words):  # noqa: F811
    (place / "audited.py").write_text("class Pays:\n    def score(self, prompt, answer, info):\n        return 1.0\n")
    command = [sys.executable, "-m", "spmd_rl", "audit", *given, *line(place), "reward.math.target=audited:Pays"]
    env = {**os.environ, "PYTHONPATH": f"{place}:{os.getcwd()}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == code and words in done.stderr, done
    assert not (place / "run").exists()
