"""Answers to code rows with the verdicts that they must get, as plain text that a reader can read and add to.

A file is a list of records. `=== ID key=value ...` begins one, `--- NAME` a section of it, taken word for word.

**Tables.** `problems.txt` has problems with right programs, `shapes.txt` shapes of tests, `cheats.txt` programs that
solve nothing, in which `NAME` stands for the function that is asked for. A right answer is a problem in a shape; a
cheat is a program in a shape, of a problem that its turn gives it. To add cheats, add records to `cheats.txt`: their
`family` is what they try.

**Rows.** In the other files a record is a row with an answer:

| section | what it is |
|---|---|
| `test`, `prompt` | `extra["test"]` and `extra["prompt"]` |
| `assert` | one of `extra["test_cases"]`; there may be several |
| `in`, `out` | the input and the output of a test case; there may be several pairs |
| `code` | the answer's program, which is put in a fence |
| `answer` | the whole answer, in place of `code` |
| `make` | Python that changes `extra`, for rows too long to be written here |

Keys: `entry` (the entry point), `function` (of functional calls), `type` (`case_type`), `expect` (1, 0, error,
unsupported; several are separated by `|`), `crlf` (the answer's line ends are those of Windows), `name`: the record is
a row with an honest answer, and `row=ID` makes of a record without a row an answer to that row.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_rl.types import AnswerInfo, Prompt

FOLDER = Path(__file__).parent
INFO = AnswerInfo(1, "stop")
FEW = 40
"""Families with fewer answers are one line of a table."""
STDIN = "\nimport json, sys\nprint(json.dumps([{name}(*json.loads(line)) for line in sys.stdin]))\n"


@dataclass(frozen=True)
class Case:
    """One answer to one row, and the verdicts that it may get: scores as text, or statuses. `kind`: the shape of the
    tests and the family of the answer."""

    id: str
    extra: dict[str, Any]
    answer: str
    expect: tuple[str, ...]
    kind: tuple[str, str] = ("", "")

    def judge(self, reward: Any) -> tuple[str, str]:
        """Score the answer, and return the verdict in a word with why it is so."""
        try:
            found = reward.score(Prompt(self.id, (), "code", "", self.extra), self.answer, INFO)
        except (RuntimeError, ValueError, KeyError) as error:  # the sidecar's worker makes it an `error`
            return "error", f"{type(error).__name__}: {error}"
        return (f"{found.score:g}" if found.scored else found.status), found.detail


@dataclass(frozen=True)
class Record:
    """One record of a file, as it is written there."""

    id: str
    keys: dict[str, str]
    sections: list[tuple[str, str]]

    def texts(self, name: str) -> list[str]:
        """Return the texts of all sections of that name."""
        return [text for section, text in self.sections if section == name]

    def text(self, name: str) -> str:
        """Return the text of a section; empty if there is none."""
        return "".join(self.texts(name))

    def extra(self) -> dict[str, Any]:
        """Return the row's `extra`; empty if the record has no row of its own."""
        found: dict[str, Any] = {name: texts[0] for name in ("test", "prompt") if (texts := self.texts(name))}
        known = {"entry": "entry_point", "type": "case_type", "function": "test_case_function"}
        found |= {name: self.keys[key] for key, name in known.items() if key in self.keys}
        if asserts := self.texts("assert"):
            found = {"case_type": "assert", "test_cases": [{"assert_code": text} for text in asserts]} | found
        elif pairs := list(zip(self.texts("in"), self.texts("out"), strict=True)):
            found["test_cases"] = [{"input": given, "output": wanted} for given, wanted in pairs]
        for text in self.texts("make"):
            exec(text, {"extra": found})
        return found

    def answer(self, name: str = "") -> str:
        """Return the whole answer, with `NAME` replaced."""
        code = self.texts("code")
        text = fenced(code[0]) if code else self.texts("answer")[0]
        text = re.sub(r"\bNAME\b", name, text) if name else text
        return text.replace("\n", "\r\n") if "crlf" in self.keys else text


def fenced(code: str) -> str:
    """Return an answer with this program."""
    return f"Here is my solution:\n```python\n{code}```"


def read(name: str) -> list[Record]:
    """Read the records of a file."""
    found = []
    for block in re.split(r"^=== ", (FOLDER / f"{name.removesuffix('.txt')}.txt").read_text(), flags=re.MULTILINE)[1:]:
        head, _, rest = block.partition("\n")
        title, *keys = head.split()
        parts = re.split(r"^--- (\w+)\n", rest.rstrip("\n") + "\n", flags=re.MULTILINE)
        sections = list(zip(parts[1::2], parts[2::2], strict=True))
        found.append(Record(title, dict(key.split("=", 1) for key in keys), sections))
    assert len({record.id for record in found}) == len(found), f"{name}: two records have one id"
    return found


def shaped(shape: Record, problem: Record) -> dict[str, Any]:
    """Return the `extra` of a row that has a problem's tests in a shape."""
    calls = [line.rsplit(" -> ", 1) for line in problem.text("calls").splitlines()]

    def filled(text: str, number: int = 0) -> str:
        args, want = calls[number]
        words = {"NAME": problem.id, "ARGS": args, "WANT": want, "NUMBER": str(number)}
        return re.sub(r"\b(?:NAME|ARGS|WANT)\b|NUMBER", lambda found: words[found[0]], text)

    head, each, tail = (shape.text(name) for name in ("head", "each", "tail"))
    cases, kind = [filled(each, number) for number in range(len(calls))], shape.keys["kind"]
    if kind == "assert":
        return {"case_type": "assert", "test_cases": [{"assert_code": case} for case in cases]}
    if kind in ("call", "stdin"):
        values = [(list(eval(f"({args},)")), eval(want)) for args, want in calls]
        if kind == "stdin":
            given = "".join(json.dumps(args) + "\n" for args, _ in values)
            return {"test_cases": [{"input": given, "output": json.dumps([want for _, want in values])}]}
        pairs = [{"input": "\n".join(map(json.dumps, args)), "output": json.dumps(want)} for args, want in values]
        return {"test_case_function": problem.id, "test_cases": pairs}
    source = filled(head) + "\n".join([*cases, filled(tail)])
    return {"test": source} | ({"entry_point": problem.id} if kind == "check" else {})


def fits(shape: Record, problem: Record) -> bool:
    """Return whether a problem can be tested in a shape."""
    as_json = shape.keys["kind"] in ("call", "stdin")
    return shape.keys.get("only", problem.keys["of"]) == problem.keys["of"] and not (
        as_json and ("inf" in problem.text("calls") or problem.keys["of"] in ("set", "dict"))
    )


def right_answers() -> list[Case]:
    """Return every problem in every shape that fits it."""
    found = []
    for shape in read("shapes"):
        for problem in read("problems"):
            if fits(shape, problem):
                code = problem.text("code") + (STDIN.format(name=problem.id) if shape.keys["kind"] == "stdin" else "")
                name = f"{shape.id}/{problem.id}"
                found.append(Case(name, shaped(shape, problem), fenced(code), ("1",), (shape.id, "right")))
    return found


def cheats(shapes_each: int = 99) -> list[Case]:
    """Return every cheat in so many of the shapes, by turns."""
    shapes, problems, found = read("shapes"), read("problems"), []
    for turn, cheat in enumerate(read("cheats")):
        for i in range(min(shapes_each, len(shapes))):
            shape = shapes[(7 * turn + i) % len(shapes)]  # so that those of a family have many
            fitting = [problem for problem in problems if fits(shape, problem)]
            problem = fitting[(turn + 7 * i) % len(fitting)]
            ask = STDIN.format(name=problem.id) if shape.keys["kind"] == "stdin" else ""
            answer = re.sub(r"\bNAME\b", problem.id, cheat.text("code")) + ask
            kind = shape.id, cheat.keys.get("family", "other")
            found.append(Case(f"{cheat.id}@{shape.id}", shaped(shape, problem), fenced(answer), ("0",), kind))
    return found


def rows(name: str, default: str, gold: bool = False) -> list[Case]:
    """Return the cases of a file of rows. `default` is what is expected of answers that say nothing else. `gold`: the
    rows know their right answers."""
    records, found = read(name), []
    known = {record.id: record for record in records if "name" in record.keys}
    for record in records:
        row, usual = known.get(record.keys.get("row", "")), "1" if record.id in known else default
        expect = tuple(record.keys.get("expect", usual).split("|"))
        known_answer = {"solution": record.text("code")} if gold else {}
        extra = (row or record).extra() | known_answer
        kind = _shape(extra), "right" if expect == ("1",) else record.keys.get("family", name)
        found.append(Case(f"{name}/{record.id}", extra, record.answer(), expect, kind))
    return found


def _shape(extra: dict[str, Any]) -> str:
    """Return which of the shapes that `rewards.code` knows a row has, the files of tests told apart."""
    if "test" not in extra:
        return "calls" if extra.get("test_case_function") else "asserts" if "case_type" in extra else "stdin"
    return "check" if "def check(" in extra["test"] else "unittest" if "unittest" in extra["test"] else "pytest"


def table(found: Iterable[tuple[Case, str]]) -> str:
    """Return how many answers of each family and shape were paid, of how many, in Markdown."""
    asked, paid, size = Counter(), Counter(), Counter()
    found = list(found)
    size.update(case.kind[1] for case, _ in found)
    for case, verdict in found:
        kind = case.kind[1] if size[case.kind[1]] >= FEW else "others", _shape(case.extra)
        asked[kind] += 1
        paid[kind] += verdict == "1"
    families, shapes = (sorted({kind[i] for kind in asked}) for i in (0, 1))
    lines = [["family", *shapes, "all"], ["---"] * (len(shapes) + 2)]
    for family in families:
        counts = [(paid[family, shape], asked[family, shape]) for shape in shapes]
        counts.append((sum(each for each, _ in counts), sum(each for _, each in counts)))
        lines.append([family, *(f"{mine}/{all_}" if all_ else "" for mine, all_ in counts)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
