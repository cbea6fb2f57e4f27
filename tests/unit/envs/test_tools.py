"""The tools environment: questions from seeds, tools, answers; its calculator and its search."""

import json
import random
import re

import pytest

from envs.calculator import calculate
from envs.retrieval import Bm25
from envs.tool_tasks import KINDS, is_right, make_corpus, make_towns
from envs.tools import ToolsEnv
from spmd_rl.types import RunResult

TOWNS = make_towns(0)


class FakeSandbox:
    """Runs nothing: answers by what the program is."""

    def run(self, code: str, stdin: str = "", limits=None) -> RunResult:
        known = {
            "print(1)": RunResult("exit", 0, "1\n", "", 0.1),
            "pass": RunResult("exit", 0, "", "", 0.1),
            "1/0": RunResult("exit", 1, "before\n", "Traceback\nZeroDivisionError: division by zero", 0.1),
            "while True: pass": RunResult("cpu", 0, "", "", 4.0),
            "print('x' * 10**9)": RunResult("output", 0, "x" * 5000, "", 1.0),
        }
        return known[code]


def call(name: str, **arguments) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def test_the_seed_makes_the_question() -> None:
    one, two = ToolsEnv(FakeSandbox()), ToolsEnv(FakeSandbox())
    questions = [one.reset(seed)[0] for seed in range(30)]
    assert questions == [two.reset(seed)[0] for seed in range(30)] and len(set(questions)) == 30
    assert [tool["function"]["name"] for tool in one.reset(0)[1]["tools"]] == ["python", "search", "calculator"]


@pytest.mark.parametrize(
    ("code", "reply"),
    [
        ("print(1)", "1"),
        ("pass", "(nothing was printed)"),
        ("1/0", "before\nerror: Traceback\nZeroDivisionError: division by zero"),
        ("while True: pass", "error: the program ran too long"),
    ],
)
def test_python(code: str, reply: str) -> None:
    env = ToolsEnv(FakeSandbox())
    env.reset(0)
    text, reward, terminated, truncated, info = env.step(call("python", code=code))
    assert (text, reward, terminated, truncated) == (reply, 0.0, False, False)
    assert info["metrics"]["action_is_valid"] == 1.0


def test_a_long_reply_is_cut_and_no_sandbox_is_a_reply() -> None:
    env = ToolsEnv(FakeSandbox(), max_characters=100)
    env.reset(0)
    assert env.step(call("python", code="print('x' * 10**9)"))[0] == "x" * 100 + "\n[cut]"
    env = ToolsEnv(None)
    env.reset(0)
    assert "there is no sandbox here" in env.step(call("python", code="pass"))[0]


def test_an_episode_with_two_searches() -> None:
    env = ToolsEnv(FakeSandbox(), tools=["search", "calculator"], kinds=["lookup"])
    seed = next(seed for seed in range(100) if "born" in env.reset(seed)[0])
    question, _ = env.reset(seed)
    town = re.search(r"founder of (\w+) born", question)[1]
    first = env.step(call("search", query=town))[0]
    founder = re.search(rf"{town} is a town.* by ([\w ]+), and has", first)[1]
    second = env.step(call("search", query=founder))[0]
    year = re.search(rf"{founder} was a \w+, born in (\d+)", second)[1]
    _, reward, terminated, _, info = env.step(f"<answer>{year}</answer>")
    assert (reward, terminated) == (1.0, True)
    assert info["metrics"]["success"] == info["metrics"]["answered"] == 1.0 and info["metrics"]["tool_calls"] == 0.0
    env.reset(seed)
    assert env.step(f"<think>1 or 2? {call('search', query='x')}</think> {year}.")[1:3] == (1.0, True)
    env.reset(seed)
    assert env.step(f"<think>It is {year}")[1:3] == (0.0, False)
    env.reset(seed)
    assert env.step("It was in 1066.")[1:3] == (0.0, True)
    env.reset(seed)
    text, reward, terminated, _, info = env.step("")
    assert (reward, terminated, info["metrics"]["action_is_valid"]) == (0.0, False, 0.0) and "error" in text


def test_the_answers_of_generated_questions() -> None:
    rng = random.Random(5)
    for _ in range(50):
        task = KINDS["chain"](rng, TOWNS)
        value = 0
        for verb, number in re.findall(r"(Start with|Add|Subtract|Multiply by|Divide by) (\d+)", task.question):
            n = int(number)
            value = {"Start with": n, "Add": value + n, "Subtract": value - n, "Multiply by": value * n}.get(
                verb, int(value / n)
            )
        assert task.answer == str(value)
        task = KINDS["count"](rng, TOWNS)
        low, high, modulus, digits = map(int, re.findall(r"\d+", task.question))
        found = [n for n in range(low, high + 1) if n % modulus == 0 and sum(int(d) for d in str(n)) % digits == 0]
        assert task.answer == str(len(found))


def test_each_text_of_the_corpus_is_found_by_its_name() -> None:
    texts = make_corpus(TOWNS)
    index = Bm25(texts)
    assert len({town.name for town in TOWNS} | {town.founder for town in TOWNS}) == 2 * len(TOWNS)
    for i, town in enumerate(TOWNS):
        assert i in index.search(town.name, 3)
        assert len(TOWNS) + i in index.search(f"When was {town.founder} born?", 3)
    assert index.search("zzz", 3) == index.search("", 3) == []
    assert Bm25(["a red shoe", "a blue hat", "a blue, blue hat"]).search("blue hats", 10) == [2, 1]
    assert Bm25([]).search("x", 3) == []


@pytest.mark.parametrize(
    ("said", "answer", "right"),
    [
        ("42", "42", True),
        ("The answer is 42.", "42", True),
        ("41 or 42", "42", False),
        ("1 + 1 = <answer>2</answer>", "2", True),
        ("<answer>3</answer> no, <answer>2</answer>", "2", True),
        ("12,345", "12345", True),
        ("-7", "7", False),
        ("forty-two", "42", False),
        ("the glassmaker.", "glassmaker", True),
        ("glassmaker or weaver", "glassmaker", False),
        ("", "glassmaker", False),
    ],
)
def test_right_answers(said: str, answer: str, right: bool) -> None:
    assert is_right(said, answer) is right


def test_own_corpus_and_questions(tmp_path) -> None:
    corpus, questions = tmp_path / "c.jsonl", tmp_path / "q.jsonl"
    corpus.write_text('{"title": "Oslo", "text": "the capital of Norway"}\n{"text": "Bergen is rainy"}\n')
    questions.write_text('{"question": "Capital of Norway?", "answer": "Oslo"}\n')
    env = ToolsEnv(tools=["search"], corpus=str(corpus), questions=str(questions))
    assert env.reset(99)[0] == "Capital of Norway?"
    assert env.step(call("search", query="norway capital"))[0] == "[1] Oslo: the capital of Norway"
    assert env.step(call("search", query="sweden"))[0] == "(nothing was found)"
    assert env.step("Oslo")[1] == 1.0


@pytest.mark.parametrize(("key", "value"), [("tools", ["web"]), ("kinds", ["trivia"])])
def test_an_unknown_name_is_told(key: str, value: list[str]) -> None:
    with pytest.raises(ValueError, match=f"{key}: unknown {value[0]}; known are "):
        ToolsEnv(**{key: value})


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3 + 4) * 2 - 1", "13"),
        ("2 ^ 10", "1024"),
        ("-7 // 2", "-4"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("sqrt(16) + max(1, 2)", "6"),
        ("round(2.345, 1)", "2.3"),
        ("2 * pi", "6.283185307179586"),
    ],
)
def test_calculator(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *("__import__('os')", "(1).__class__", "[1, 2]", "x", "1 if 1 else 2", "'a' * 9", "True", "lambda: 1", ""),
        *("9**9**9", "2 ** 100000", "1 / 0", "sqrt(-1)", "(-8) ** 0.5", "exp(1e9)", "1 +", "round(5, -99999999)"),
        *("max()", "sqrt(1, 2)", "(" * 300, "9" * 500, "abs(x=1)", "10.0 ** 400", "(-1) ** 0.5 + 1j"),
    ],
)
def test_what_the_calculator_refuses(expression: str) -> None:
    with pytest.raises(ValueError):
        calculate(expression)
