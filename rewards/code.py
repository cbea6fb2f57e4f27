"""Code: the program in the answer must pass the problem's tests. It runs in the sandbox, never in this process.

`spmd_rl.base.code_answer` has the rules for the answer's program and for equal outputs. `prompt.extra` has the tests:

    HumanEval         `test` (defines `check`), `prompt` (precedes the answer), `entry_point` (else the last there)
    KodCode           `test`: pytest-style functions, which import `from solution`
    asserts           `case_type` `assert`, `pytest`, `check_based`;
                      `test_cases`: `[{"assert_code": ..., "entry_point": ...}]`
    stdin and stdout  `test_cases`: `[{"stdin": ..., "expected_stdout": ...}]` (or `input`, `output`)
    function calls    the same, with `test_case_function`: a JSON argument a line, and the JSON result

docs/CODE.md describes the limits of trust in a verdict, and `unsupported` rows.

    reward.code.target=rewards.code:CodeReward reward.code.sandbox=auto reward.code.packages=[numpy,sympy]
"""

import ast
import builtins
import contextlib
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from spmd_rl.base.code_answer import program, same_output
from spmd_rl.types import MISSING_PACKAGE, UNPROVEN, AnswerInfo, Message, Prompt, RunLimits, Sandbox, Verdict

CHEATS = {
    "equal to everything": """class Anything:
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = lambda *_: True
    __hash__ = __len__ = __sub__ = __rsub__ = __abs__ = lambda *_: 0
    __call__ = __getattr__ = __getitem__ = lambda self, *_, **__: self
cheat = Anything()""",
    "ends the process": "import os\ndef cheat(*_, **__): os._exit(0)",
    "skips the test": "import unittest\ndef cheat(*_, **__): raise unittest.SkipTest",
    "looks at the caller": "import sys\ndef cheat(*_, **__): return sys._getframe(1).f_globals.get('expected')",
    "patches modules": """import builtins, math, unittest
unittest.TestCase.assertEqual = math.isclose = builtins.all = builtins.isinstance = lambda *_, **__: True
builtins.AssertionError = StopIteration
def cheat(*_, **__): return None""",
    "prints many numbers": "print(*range(2000), sep='\\n')\ncheat = None",
    "prints its input": "print(open(0).read())\ncheat = None",
}
"""Programs that solve nothing, by title; `cheat` replaces each name that the tests call."""
TIME_IS_UP = "its processor time is used up"
TELLTALES = re.compile(
    r"__(?:eq|ne|lt|gt|le|ge|bool|contains|instancecheck|sub|rsub|abs|len|class)__\b"
    r"[^\n]*(?:\n\s*return|:\s*return|lambda[^:\n]*:) *(?:True|1|0|0\.0|self|int|float|str|list|dict)\b(?! *[.(\[])"
    r"|__class__ *= |os\._exit|os\.kill\b|raise StopIteration|_getframe|currentframe|inspect\.stack|gc\.get_|\bctypes\b"
    r"|set(?:trace|profile)\b|/proc/|\bSkipTest\b|pytest\.(?:skip|exit|xfail)|sys\.modules|meta_path"
    r"|setattr\((?:builtins|unittest|pytest)\b|\b(?:builtins|unittest|pytest|math|operator|json)(?:\.\w+)+ *=[^=]"
)
"""Expressions that honest programs hardly ever need."""


class CodeReward:
    """A rewarder with 1.0 if all tests pass, else 0.0, or with `partial` their share."""

    def __init__(
        self,
        sandbox: Sandbox,
        partial: bool = False,
        seconds: int = 4,
        total_seconds: float = 9.0,
        tolerance: float = 1e-6,
        unproven: bool = False,
        **limits: Any,
    ) -> None:
        """Set the limits of programs: `memory_mb` (512), `output_mb` (16) and another interpreter (`python`) too.

        `seconds`: processor time of one program (all its tests, or one input). `total_seconds`: that of all inputs of
        an answer, and the longest sleep. `tolerance`: of a printed number against an expected one with a fraction.
        """
        known = {"memory_mb": 512, "output_mb": 16, "python": ""}
        if unknown := limits.keys() - known.keys():
            raise TypeError(f"unexpected keyword argument '{min(unknown)}'")
        memory, output, python = (known | limits).values()
        self._sandbox, self._partial, self._unproven, self._tolerance = sandbox, partial, unproven, tolerance
        self._limits = RunLimits(seconds, total_seconds, memory << 20, output_bytes=output << 20)
        self._reasons: dict[bytes, str] = {}
        if python and sandbox is not None:
            sandbox.use(python)

    def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Run the program against its tests. Raises if the row has none or they are at fault."""
        if (code := asked_program(prompt.extra, answer)) is None:
            return Verdict("wrong_format", 0.0, {"passed": 0.0})
        # Compared here, outside of the sandbox, where a program cannot forge them.
        if pairs := stdin_cases(prompt.extra):
            unproven, (passed, why) = False, self._run(code, pairs)
        else:
            given = (code, *test_sources(prompt.extra, code))
            unproven = self._unproven and bool(self._reason(prompt))
            result = self._sandbox.check(*given, self._limits, unproven)
            passed, why = list(result.passed), result.detail
            lacks = passed and not all(passed) and not unproven and self._reason(prompt)
            if reason := result.unsupported or lacks:
                return Verdict("unsupported", detail=reason)
            if result.end == "cpu" and not all(passed):
                why = f"{TIME_IS_UP}: {self._limits.cpu_seconds} s"
        if not passed:
            return Verdict("timeout", detail=f"it slept through {self._limits.wall_seconds:g} s of wall time")
        share = sum(passed) / len(passed)
        parts, package = {"passed": share}, missing_package(why) if share < 1.0 else ""
        parts |= ({MISSING_PACKAGE: 1.0} if package else {}) | ({UNPROVEN: 1.0} if unproven else {})
        told = why if why.startswith(TIME_IS_UP) else package
        return Verdict("ok", share if self._partial else float(share == 1.0), parts, told)

    def unsupported(self, prompt: Prompt) -> str:
        """Return why no answer to the row can be judged by plain values; empty if answers can."""
        return "" if self._unproven or stdin_cases(prompt.extra) else self._reason(prompt)

    def _reason(self, prompt: Prompt) -> str:
        # the check runs the gold answer, so its result is kept for all answers to a row
        key = blake2b(repr(prompt.extra).encode()).digest()
        if key in self._reasons:
            return self._reasons[key]
        gold = asked_program(prompt.extra, self.gold(prompt)) or ""
        given = (gold, *test_sources(prompt.extra, gold), self._limits)
        result = self._sandbox.check(*given)
        reason = result.unsupported
        if gold and not reason and result.passed and not all(result.passed):
            beside = self._sandbox.check(*given, True).passed
            reason = f"gold: it passes only together with its tests ({result.detail})" if beside and all(beside) else ""
        self._reasons[key] = reason
        return reason

    def _run(self, code: str, pairs: list[tuple[str, str]]) -> tuple[list[bool], str]:
        """Return the success of each input, empty if the program slept, and the error of the first failure."""
        passed, why, most = [False] * len(pairs), "", self._limits.wall_seconds
        left, end = most, time.monotonic() + 5 * most
        for i, (stdin, expected) in enumerate(pairs):
            patience = min(most, max(0.1, end - time.monotonic()))
            result = self._sandbox.run(code, stdin, replace(self._limits, wall_seconds=patience))
            if result.end == "wall":
                return [], ""
            left -= result.cpu_seconds
            if result.end == "cpu" or left <= 0:
                return passed, f"{TIME_IS_UP}: {self._limits.cpu_seconds} s for an input, {most:g} s for all"
            ended = result.end == "exit" and result.code == 0
            passed[i] = ended and result.is_text and same_output(result.stdout, expected, self._tolerance)
            if not passed[i]:
                why = why or result.stderr.strip().rpartition("\n")[2]
                if not self._partial:
                    break
        return passed, why

    def gold(self, prompt: Prompt) -> str:
        """Return the row's solution as an answer; empty without one."""
        known = (prompt.extra.get(key) for key in ("canonical_solution", "solution", "reference_solution"))
        code = next((text for text in known if isinstance(text, str) and text), "")
        begun = prompt.extra.get("prompt", "") if "canonical_solution" in prompt.extra else ""
        return f"```python\n{begun}{code}\n```" if code else ""

    def cheats(self, prompt: Prompt) -> Iterator[tuple[str, str]]:
        """Yield programs that solve nothing; each defines every name that the row's tests seem to call as its cheat."""
        called = set(re.findall(r"\b[A-Za-z_]\w*(?=\()", " ".join(map(str, prompt.extra.values()))))
        called |= {str(prompt.extra.get(key) or "f") for key in ("entry_point", "test_case_function")}
        names = sorted(name for name in called if name.isidentifier() and not hasattr(builtins, name))
        for title, body in CHEATS.items():
            yield title, "\n".join(["```python", body, *(f"{name} = cheat" for name in names), "```"])

    def suspect(self, prompt: Prompt, answer: str) -> str:
        """Return the sign of a cheat in a passing program: its first match of `TELLTALES`."""
        found = TELLTALES.search(asked_program(prompt.extra, answer) or "")
        return f"the program has {found[0].strip()!r:.60}" if found else ""

    @classmethod
    def examples(cls) -> Iterator[tuple[Prompt, str, float]]:
        """Yield gold and wrong answers with their scores, in each shape."""
        right, wrong = (f"Here:\n```python\ndef add(a, b):\n    return a {sign} b\n```" for sign in "+-")
        echo = "<think>```python\n1\n```</think>\n```python\nprint(sum(map(int, input().split())))\n```"
        calls = [{"stdin": "[1]\n[2]", "expected_stdout": "[1, 2]"}, {"stdin": "1\n2", "expected_stdout": "3"}]
        check = "def check(candidate):\n    assert candidate(1, 2) == 3"
        human = {"prompt": "def add(a, b):\n    pass\n", "test": check}
        for extra, answer, score in (
            (human, right, 1.0),
            (human, wrong, 0.0),
            ({"test": "from solution import add\ndef test_add():\n    assert add(1, 2) == 3"}, right, 1.0),
            ({"case_type": "assert", "test_cases": [{"assert_code": "assert add(2, 2) == 4"}]}, wrong, 0.0),
            ({"case_type": "input", "test_cases": '[{"stdin": "1 2", "expected_stdout": "3.0"}]'}, echo, 1.0),
            ({"case_type": "input", "test_cases": [{"input": "1 2", "output": "4"}]}, echo, 0.0),
            ({"test_case_function": "add", "test_cases": calls}, right, 1.0),
            ({"test_case_function": "add", "test_cases": calls}, "I would add them.", 0.0),
        ):
            yield Prompt("0" * 32, (Message("user", "?"),), "code", "", extra), answer, score


def missing_package(why: str) -> str:
    """Return the missing package outside of the standard library that a failure names; empty without one."""
    found = re.search(r"No module named '(\w{1,100})'", why)
    return found[1] if found and found[1] not in sys.stdlib_module_names else ""


def _cases(extra: Mapping[str, Any]) -> tuple[list[Any], str]:
    cases, function = extra.get("test_cases", ()), extra.get("test_case_function") or ""
    return list(json.loads(cases) if isinstance(cases, str) else cases), "" if function == "None" else function


def stdin_cases(extra: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the (input, output) pairs of a row of that shape, else an empty list."""
    cases, function = _cases(extra)
    if "test" in extra or function or extra.get("case_type", "input") in ("assert", "pytest", "check_based"):
        return []
    return [(case.get("stdin", case.get("input")), case.get("expected_stdout", case.get("output"))) for case in cases]


def tests_text(extra: Mapping[str, Any]) -> str:
    """Return the tests of a row as one text, which mentions the names that a program has to define."""
    keys = "test", "assert_code", "entry_point"
    cases, function = _cases(extra)
    found = [str(case.get(key, "")) for case in (extra, *cases) if isinstance(case, Mapping) for key in keys]
    return "\n".join([*found, *(case for case in cases if isinstance(case, str)), function])


def asked_program(extra: Mapping[str, Any], answer: str) -> str | None:
    """Return the program of an answer that matches the row's tests, or None."""
    return program(answer, "" if stdin_cases(extra) else tests_text(extra))


def test_sources(extra: Mapping[str, Any], code: str) -> tuple[list[str], str, str]:
    """Return (tests, prelude, entry) for `Sandbox.check`. ValueError if the row does not say what to test."""
    cases, function = _cases(extra)
    if function and "test" not in extra:
        call = f"Solution().{function}" if re.search(r"^class Solution\b", code, re.MULTILINE) else function
        return [_call_source(call, case) for case in cases], "", "" if "." in call else call
    if "test" in extra:
        cases, prelude = [extra], _prelude(extra.get("prompt"))
    else:
        cases = [case if isinstance(case, dict) else {"assert_code": case} for case in cases]
        prelude = cases[0].get("import_prefix", "") if cases else ""
    sources, entry = [], cases[0].get("entry_point", "") if cases else ""
    for case in cases:
        source = case["test"] if "test" in case else case["assert_code"]
        if "def check(" in source and not re.search(r"^check\(", source, re.MULTILINE):
            entry = entry or _last_function(prelude)
            source += f"\ncheck({entry})"
        sources.append(source)
    return sources, prelude, entry


def _call_source(call: str, case: Mapping[str, Any]) -> str:
    """Return a test of one function call, with its values as JSON."""
    text = case.get("stdin", case.get("input")).strip()
    lines = text.split("\n") if text else []
    expected = case.get("expected_stdout", case.get("output"))
    values = json.dumps([[_value(line) for line in lines], _value(expected)])
    source = f"given, expected = json.loads({values!r})\nassert same({call}(*given), expected)"
    return f"import json\nfrom spmd_rl.sandbox.guest.testing import same\n{source}"


def _value(text: str) -> Any:
    """Return the value of a JSON text, or else of a Python literal."""
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return float(text) if text.strip() in ("inf", "-inf", "nan") else ast.literal_eval(text.strip())


def _prelude(prompt: Any) -> str:
    """Return the program that a prompt begins; empty if it begins none."""
    for source in [prompt, f"{prompt}\n    pass\n"] if isinstance(prompt, str) else []:
        with contextlib.suppress(SyntaxError, ValueError):
            if any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in ast.parse(source).body):
                return source
    return ""


def _last_function(prelude: str) -> str:
    if names := [node.name for node in ast.parse(prelude).body if isinstance(node, ast.FunctionDef)]:
        return names[-1]
    raise ValueError("the row has a `check` but neither an `entry_point` nor a `prompt` with a function")
