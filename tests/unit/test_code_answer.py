"""Which program an answer gives, and which outputs are equal."""

import time

import pytest

from spmd_rl.base.code_answer import program, same_output

F = "def add(a, b):\n    return a + b\n"
MAIN = "a, b = map(int, input().split())\nprint(a + b)\n"
TESTS = "from solution import add\ndef test_add():\n    result = add(1, 2)\n    assert result == 3"


def block(code: str, info: str = "python", fence: str = "```") -> str:
    return f"{fence}{info}\n{code}{fence}\n"


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("Sure:\n" + block(F) + "Done.", F),
        (block(F, "Python"), F),
        (block(F, "py3"), F),
        (block(F, "python3.11"), F),
        (block(F, " python"), F),
        (block(F, 'python title="solution.py" linenos'), F),
        (block(F, "{.python .numberLines}"), F),
        (block(F, "python:solution.py"), F),
        (block(F, "python", "~~~"), F),
        (block(F, "python", "````"), F),
        (block(F, ""), F),
        (block(block(F), "markdown", "````"), F),
        (block(F).replace("\n", "\r\n"), F),
        ("1. So:\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n2. Done", F),
        ("- ```python\n  def add(a, b):\n      return a + b\n  ```\n", F),
        ("\t```python\n\tdef add(a, b):\n\t    return a + b\n\t```\n", F),
        ("> ```python\n> def add(a, b):\n>     return a + b\n> ```\n", F),
        ("Solution: ```python\n" + F + "```", F),
        ("```python\ndef add(a, b):\n    return a + b```", F[:-1]),
        ("```python\n" + F, F),  # a stop string may have cut the fence off
        ("```python\nx = 1\n```\n```python\n", "x = 1\n"),
        ("Use ```x``` or ``` y ``` here.\n" + block(F), F),
        ("<think>" + block("no\n") + "</think>" + block(F), F),
        ("<think>" + block("no\n") + "</think>nothing", None),
        ("<think>\n" + block("no\n"), None),
        ("a</think>\n" + block(F) + "\n<think>\n" + block("no\n"), F),
        (block("int main;\n", "cpp"), None),
        (block(F) + block("int main;\n", "cpp") + block("5\n", ""), F),
        ("", None),
    ],
)
def test_the_forms_of_one_block(answer, code):
    assert program(answer) == code


@pytest.mark.parametrize(
    "code",
    [
        "fence = '```'\nprint('```')\n",
        'def f():\n    """\n    ```\n    f()\n    ```\n    """\n    return 1\n',
        'x = """\n```\n"""\ny = 1\n',
        "x = '''\n```python\nf()\n```\n'''\ny = 1\n",
        "# ``` no fence\nx = 1\n",
    ],
)
def test_a_fence_in_the_code_does_not_end_it(code):
    assert program("Here:\n" + block(code) + "And this prints ``` twice.\n" + block("5\n", "text")) == code


def test_a_block_whose_string_never_ends_ends_at_its_fence():
    assert program(block('x = """oops\n') + "Sorry:\n" + block(F), TESTS) == F


CALL = "print(add(1, 2))\n"
HELPER = "def double(x):\n    return 2 * x\n"


@pytest.mark.parametrize(
    ("blocks", "tests", "wanted"),
    [
        ([F, CALL], TESTS, [0]),
        ([F, "result = add(1, 2)\nassert result == 3\n"], TESTS, [0]),
        ([F, "def test_add():\n    assert add(1, 2) == 3\n"], TESTS, [0]),
        ([F, "def main():\n    print(add(1, 2))\nmain()\n"], TESTS, [0]),
        ([F, ">>> add(1, 2)\n3\n"], TESTS, [0]),
        (["def add(a, b): return a - b\n", F], TESTS, [1]),
        (["import numpy as np\n", "def add(a, b):\n    return np.add(a, b)\n"], TESTS, [0, 1]),
        (["MOD = 7\n", "def add(a, b):\n    return (a + b) % MOD\n"], TESTS, [0, 1]),
        ([HELPER, "def add(a, b):\n    return double(a) + b\n", CALL], TESTS, [0, 1]),
        (["x = add(1, 2)\n", "def add(a, x):\n    return a + x\n"], TESTS, [1]),
        ([HELPER, F, CALL], "assert add(1, 2) == double(3)", [0, 1]),
        (["add = lambda a, b: a + b\n", CALL], TESTS, [0]),
        (["class Solution:\n    def add(self, a, b):\n        return a + b\n", "Solution().add(1, 2)\n"], "\nadd", [0]),
        ([MAIN, "print('for 1 2 it prints 3')\n"], "", [0]),
        ([MAIN, "# with the input\nmain_example = [1, 2]\n"], "", [0]),
        (["print(3)\n", MAIN], "", [1]),
        ([MAIN, MAIN.replace("+", "-")], "", [1]),
        ([F, MAIN.replace("a + b", "add(a, b)")], "", [0, 1]),
        ([MAIN, "import io, sys\nsys.stdin = io.StringIO('1 2')\nprint(1)\n"], "", [0]),
        (["def main():\n    print(sum(map(int, input().split())))\n", "main()\n"], "", [0, 1]),
        (["def f(x):\n    return x\nprint(f(int(input())))\n", "print(f(5))\n"], "", [0]),
        (["import sys\nprint(sum(map(int, sys.stdin)))\n", "def explain():\n    pass\n"], "", [0]),
        (["print(1)\n", "print(2)\n"], "", [1]),
        (["def f(): return 1\nprint(f())\n", "x = f()\n"], "", [0]),
    ],
)
def test_which_of_several_blocks(blocks, tests, wanted):
    answer = "First.\n" + "\nThen:\n".join(map(block, blocks))
    assert program(answer, tests) == "\n".join(blocks[i] for i in wanted)
    assert program(answer.replace("```python", "```"), tests) == program(answer, tests)


@pytest.mark.parametrize(
    "answer",
    [
        "`" * 60_000,
        "~" * 60_000 + "`",
        ("`" * 5 + "x") * 12_000,
        "```python\n" + " " * 60_000 + "`",
        " " * 60_000 + "x\n" * 10,
        "\n" * 60_000,
        "```python\n" * 6_000,
        "```python\nx = '''\n```\n" * 3_000,
        "```python\n" + "\\'" * 30_000 + "\n```",
        "> " * 20_000 + "```python\n" + "> " * 20_000,
        block("(" * 20_000) * 2,
        block("x = " + "-" * 20_000 + "1\n") * 2,
        block("x = " + "[{" * 40 + "\n") * 2,
        block("x = " + "lambda: " * 10_000 + "1\n") * 2,
        block("x = " + "1 + " * 10_000 + "1\n") * 2,
        "<think>" * 10_000,
    ],
)
def test_an_answer_that_is_made_to_be_slow_is_not(answer):
    begin = time.process_time()
    program(answer, TESTS)
    program(answer)
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    ("actual", "expected", "equal"),
    [
        ("1\n2\n", "1\n2", True),
        ("1  \n 2\r\n", "1\n2  ", True),
        ("\n\n1\n\n", "1", True),
        ("1\n\n2", "1\n2", False),
        ("1 2", "12", False),
        ("1 2", "1\n2", False),
        ("1 2 3", "1 2", False),
        ("1", "1 2", False),
        ("", "1", False),
        ("yes", "Yes", False),
        ("1.50", "1.5", True),
        ("3.0", "3", True),
        ("3", "3.0", True),
        ("1e3", "1000", True),
        ("-0", "0", True),
        ("+5", "5", True),
        (".5", "0.5", True),
        ("0011", "11", False),
        ("0011", "0011", True),
        ("1_000", "1000", False),
        ("\u0661\u0661", "11", False),
        ("\uff11", "1", False),
        ("\u00bd", "0.5", False),
        ("1,000", "1000", False),
        ("0x10", "16", False),
        ("nan", "NaN", False),
        ("nan", "nan", True),
        ("inf", "Infinity", False),
        ("1e999999999", "1e999999999.0", False),
        ("1" * 200, "1" * 200 + ".0", False),
        ("12345678901234567890123", "12345678901234567890124", False),
        ("2.9999999", "3", False),
        ("0.3333333333333333", "0.333333", True),
        ("0.333333", "0.3333333333333333", True),
        ("0.30000000000000004", "0.3", True),
        ("0.34", "0.333333", False),
        ("0.33334", "0.333333", False),
        ("1000000.0", "1000000.5", False),
        ("123456789.12345679", "123456789.123456789", True),
        ("1.0000000001e20", "1e20", True),
        ("0.5", "1/2", False),
        ("0", "0.0000004", False),
        ("0", "1e-7", False),
        ("0", "0.0000001234", False),
        ("0.0000004", "0", False),
        ("1.0000001", "1.0", True),
        ("1.00001", "1.0", False),
        ("1000000000000001", "1000000000000000.0", False),
        ("1000000000000000", "1000000000000000.0", True),
        ("1e21", "1" + "0" * 21, False),
        ("12345678901234568", "12345678901234567.0", False),
        ("9007199254740992", "9007199254740993.0", False),
        ("12345678901234567", "12345678901234567.0", True),
        ("12345678901234568.9", "12345678901234567.5", False),
        ("123456789012345678.94", "123456789012345678.9", True),
        ("0.0", "5e-324", False),
        ("0", "1e-400", False),
        ("-1e-400", "1e-400", False),
        ("1e-400", "1e-0400", False),
        ("1e-400", "0.1e-399", True),
        ("1e999", "-1e-999", False),
        ("1\x1c2", "1 2", False),
        ("1\x0b2", "1 2", False),
        ("1\u00a02", "1 2", False),
        ("1 \t 2\r\n", "1 2", True),
    ],
)
def test_equality_of_outputs(actual, expected, equal):
    assert same_output(actual, expected, tolerance=1e-6) is equal


def test_numbers_that_are_made_to_be_slow_are_not():
    long, small = "9" * 94 + "e999 ", "0." + "9" * 90 + "e-999 "
    begin = time.process_time()
    assert not same_output(long * 3_000, small * 3_000, 1e-6)
    assert same_output("1.0e999 " * 3_000, "1.00e999 " * 3_000, 1e-6)
    assert time.process_time() - begin < 2


def test_the_tolerance_is_a_setting():
    assert not same_output("0.3333333333333333", "0.333333")
    assert same_output("0.50", "0.5") and not same_output("0.5000000001", "0.5")
    assert same_output("3.14159", "3.1415926", tolerance=1e-5) and not same_output(
        "3.14159", "3.1415926", tolerance=1e-6
    )
    assert not same_output("4", "3", tolerance=2.0)  # integers are exact
