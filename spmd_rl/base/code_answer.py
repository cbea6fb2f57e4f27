"""Extraction of a program from an answer and equality of outputs, for `rewards.code`. Standard library only.

**The program.** Blocks are fenced by three or more backticks or tildes, as in Markdown. A fence may be indented or
quoted (`>`), which its lines lose; one inside a string of the code does not end it. Text up to the last `</think>` and
after an unclosed `<think>` is ignored. Python blocks count (`python`, `py`, `python3`, `{.python}`, `python title="x"`,
...), without any those that name no language. A last block without an end counts. The program is the last block that
defines a name which the tests mention and do not define, or without tests reads standard input; otherwise the last one
that defines a function or a class; otherwise the last one.

Before it come earlier blocks that define a function, class, import or CONSTANT which it uses and lacks, or other
functions which the tests mention, unless they read standard input. After a program that only defines functions comes
the next block that calls them. (LiveCodeBench takes the last block; verl and DeepCoder the last Python block.)

**Equality of outputs.** They have the same words in each line. Spaces and tabs between words, and empty lines at the
beginning and the end, do not count; capital letters and control characters do. Two words are equal if they are the same
text, or plain decimal numbers (`-1.50`, `.5`, `1e-3`; digits 0 to 9, no leading zeros, no underscores, neither inf nor
nan) of the same value; whole numbers of more than 15 digits as text alone. If the expected number is a fraction or has
an exponent, it may differ by half a unit of its last digit, up to `tolerance` (above 1: times the number); and always
by `tolerance`, or that times the number if less. So 0 is neither `0.0000004` nor `1e-400`. Computed exactly, in
decimals. (LiveCodeBench: `tolerance=0`. APPS: 1e-8 and 1e-5 of it; Codeforces mostly 1e-6.)

    program("```python\\nprint(input())\\n```")    # "print(input())\\n"
    same_output("0.3333333333333333\\n", "0.333333", tolerance=1e-6)
"""

import ast
import builtins
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import cached_property
from itertools import islice, zip_longest

_OPEN = re.compile(r"(?<![`~])(?P<fence>`{3,}(?!`)|~{3,}(?!~))(?P<info>[^`\n]*)$", re.MULTILINE)
_LANGUAGE = re.compile(r"\W*([\w+#.-]*)")
_PYTHON = re.compile(r"(?:python|py|ipython|sage)[\d.]*")
_LIST = re.compile(r"(?:[-*+]|\d+[.)])?")
_STDIN = re.compile(r"\binput *\(|[=,(] *input\b|\bstdin\b|\bopen\( *0\b|\bfileinput\b|\bread\( *0\b")
_NOT_STDIN = re.compile(r"#.*|\bstdin *= *(?:\w+\.)?StringIO\( *[a-z]?[\"'].*")
_DEFINED = re.compile(r"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", re.MULTILINE)
_ASSIGNED = re.compile(r"^(\w+)[ \t]*(?::[^=\n]+)?=(?!=)", re.MULTILINE)
_DEFINITIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
# Each closing fence that is tried costs a parse of the text so far; both limits bound the work on hostile answers.
_MAX_PARSED, _MAX_ENDS = 200_000, 8
_BLANK = " \t\r\n"
_WORD = re.compile(rf"\n|[^{_BLANK}]+")
_NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
_LONG = 15
_EXACT = Context(prec=3000)
"""More digits than a sum of two numbers of 100 characters can have, as exponents have three digits."""


def program(answer: str, tests: str = "") -> str | None:
    """Return the program of an answer, if any.

    tests: their text, with the name that they ask for; empty for a program that reads standard input.
    """
    # A program in the thoughts is a draft, not the answer.
    text = answer.replace("\r\n", "\n").rpartition("</think>")[2]
    text = re.split(r"^[ \t]*<think>", text, maxsplit=1, flags=re.MULTILINE)[0]
    found = list(_blocks(text))
    codes = [code for language, code in found if _PYTHON.fullmatch(language)]
    blocks = [_Block(code) for code in codes or [code for language, code in found if not language]]
    if len(blocks) < 2:
        return blocks[0].code if blocks else None
    wanted = set(re.findall(r"\w+", tests)) - set(_DEFINED.findall(tests) + _ASSIGNED.findall(tests))
    useful = [block for block in blocks if (block.named & wanted if tests else block.reads_stdin)]
    useful = useful or [block for block in blocks if block.assigned & wanted]
    chosen = (useful or [block for block in blocks if block.defines] or blocks)[-1]
    before, after = blocks[: blocks.index(chosen)], blocks[blocks.index(chosen) + 1 :]
    code, missing, named = chosen.code, chosen.missing, set(chosen.named)
    for block in reversed(before):
        if not block.reads_stdin and (block.provides & missing or block.defines & wanted - named):
            code = f"{block.code}\n{code}"
            missing = (missing - block.provides) | block.missing
            named |= block.named
    if not tests and chosen.only_defines:
        code = "\n".join([code, *[block.code for block in after if block.missing & chosen.defines][:1]])
    return code


@dataclass(eq=False)
class _Block:
    code: str

    @cached_property
    def reads_stdin(self) -> bool:
        return _STDIN.search(_NOT_STDIN.sub("", self.code)) is not None

    @cached_property
    def named(self) -> set[str]:
        return set(_DEFINED.findall(self.code))

    @cached_property
    def assigned(self) -> set[str]:
        return set(_ASSIGNED.findall(self.code))

    @cached_property
    def _tree(self) -> ast.Module:
        return _parsed(self.code) or ast.Module([], [])

    @cached_property
    def defines(self) -> set[str]:
        return {node.name for node in self._tree.body if isinstance(node, _DEFINITIONS)}

    @cached_property
    def provides(self) -> set[str]:
        found = set(self.defines)
        for node in self._tree.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                found |= {(name.asname or name.name).partition(".")[0] for name in node.names}
            elif isinstance(node, ast.Assign):
                found |= {name.id for name in node.targets if isinstance(name, ast.Name) and name.id.isupper()}
        return found

    @cached_property
    def only_defines(self) -> bool:
        kinds = (
            ast.FunctionDef,
            ast.AsyncFunctionDef,
            ast.ClassDef,
            ast.Import,
            ast.ImportFrom,
            ast.Assign,
            ast.AnnAssign,
        )
        return all(isinstance(node, kinds) or _is_text(node) for node in self._tree.body)

    @cached_property
    def missing(self) -> set[str]:
        used, known = set(), set(dir(builtins))
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else known).add(node.id)
            elif isinstance(node, ast.arg):
                known.add(node.arg)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                known |= {(name.asname or name.name).partition(".")[0] for name in node.names}
            elif isinstance(node, (*_DEFINITIONS, ast.ExceptHandler)):
                known.add(node.name)
        return used - known


def _parsed(code: str) -> ast.Module | None:
    try:
        return ast.parse(code) if len(code) <= _MAX_PARSED else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while opened := _OPEN.search(text, position):
        language = _LANGUAGE.match(opened["info"])[1].lower().strip(".-")
        before = text[text.rfind("\n", 0, opened.start()) + 1 : opened.start()]
        if not _LIST.fullmatch(before.strip(" \t>")) and not _PYTHON.fullmatch(language):
            # A fence within a sentence opens no block.
            position = opened.end()
            continue
        begin = min(opened.end() + 1, len(text))
        end, position = _end(text, begin, opened["fence"])
        code = _unindented(text[begin:end], before)
        if language in ("markdown", "md"):
            yield from _blocks(code)
        elif code.strip():
            yield language, code


def _end(text: str, begin: int, fence: str) -> tuple[int, int]:
    mark = fence[0]
    closing = re.compile(rf"(?<!{mark}){mark}{{{len(fence)},}}[ \t]*$", re.MULTILINE)
    ends = []
    for found in islice(closing.finditer(text, begin), _MAX_ENDS):
        line = max(text.rfind("\n", 0, found.start()) + 1, begin)
        end = found.start() if text[line : found.start()].strip(" \t>") else line
        ends.append((end, found.end()))
        # A Markdown fence inside a docstring would end the block too early, so later fences are tried until the code
        # parses.
        long_strings = '"""' in text[begin:end] or "'''" in text[begin:end]
        if not long_strings or _parsed(textwrap.dedent(text[begin:end])):
            break
    else:  # none of them leaves code that can be read
        ends = ends[:1]
    return ends[-1] if ends else (len(text), len(text))


def _unindented(code: str, before: str) -> str:
    if quotes := before.count(">"):
        code = re.sub(rf"^[ \t]*(?:>[ \t]?){{1,{quotes}}}", "", code, flags=re.MULTILINE)
    elif width := len(before) - len(before.lstrip(" \t")):
        code = re.sub(rf"^[ \t]{{1,{width}}}", "", code, flags=re.MULTILINE)
    return textwrap.dedent(code) if code[:1] in " \t" else code


def same_output(actual: str, expected: str, tolerance: float = 0.0) -> bool:
    """Return True if two outputs are equal by the rule above."""
    if actual.strip(_BLANK) == expected.strip(_BLANK):
        return True
    # Iterators, not `split`: an answer may print megabytes, and the first difference ends the comparison.
    words = (_WORD.finditer(text.strip(_BLANK)) for text in (actual, expected))
    return all(
        left is not None and right is not None and _same_word(left[0], right[0], tolerance)
        for left, right in zip_longest(*words)
    )


def _same_word(actual: str, expected: str, tolerance: float) -> bool:
    if actual == expected:
        return True
    if max(len(actual), len(expected)) > 100 or not (_NUMBER.fullmatch(actual) and _NUMBER.fullmatch(expected)):
        return False
    digits = expected.lstrip("+-")
    if digits.isdigit() and len(digits) > _LONG:
        return False
    wanted = Decimal(expected)
    difference = _EXACT.abs(_EXACT.subtract(Decimal(actual), wanted))
    if not tolerance or digits.isdigit():
        return not difference
    size, relative = wanted.copy_abs(), Decimal(str(tolerance))
    shown = Decimal((0, (5,), wanted.as_tuple().exponent - 1))
    most, least = (_EXACT.multiply(relative, pick(size, 1)) for pick in (max, min))
    return difference <= max(min(shown, most), least)
