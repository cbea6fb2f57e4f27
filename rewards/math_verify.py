"""Mathematics: whether the final answer equals the ground truth, compared symbolically by the math-verify library.

The final answer is the last `\\boxed{...}` after the last think block, or else the last line (`#### 18`, `so x = 3/4`).
Integers, decimals, fractions, percentages, expressions, equations, sets, intervals, yes and no. A unit, or a word after
a number, may be missing on one side, but two units must be the same; none is converted. Plain numbers and equal texts
are compared at once, what the library cannot read (`\\mathbb{Z}_8`) as text. There is no partial credit.

    reward.math.target=rewards.math_verify:MathReward
"""

import logging
import re
import signal
import threading
from cmath import isfinite
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Derivative, Expr, Float, Symbol
from sympy.concrete.expr_with_limits import ExprWithLimits
from sympy.core.function import AppliedUndef

from spmd_rl.types import AnswerInfo, Message, Prompt, Verdict

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its own time limits are off; ours is on
# Units are ours to see: the library takes the `m` of m^n - m and the `t` of sec t for some. And of a bare text it must
# read all or nothing: by default it takes any number out of what it cannot read.
PLAIN = NormalizationConfig(True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False)
BARE = (LatexExtractionConfig(boxed_match_priority=0, normalization_config=PLAIN),)

MAX_CHARS = 500
"""A final answer that is longer than this and than twice the truth is not parsed, since that would take too long."""
WORDS = frozenset({"yes", "no", "true", "false"})
NO_UNITS = re.compile(
    r"\b(and|or|if|mod|where|when|for|with|is|to|pi|sin|cos|tan|cot|sec|csc|log|exp|sqrt|choose|times|over|percent|"
    r"dozen|hundred|thousand|million|billion|trillion|half|third|quarter)s?\b"
)
"""Words after a number that change its value or say that it is not all."""
UNITS = {
    "m": "meter metre", "cm": "centimeter centimetre", "mm": "millimeter millimetre", "km": "kilometer kilometre",
    "g": "gram", "kg": "kilogram", "s": "second sec", "h": "hour hr", "min": "minute", "ft": "feet foot",
    "in": "inch inche", "l": "liter litre", "lb": "pound", "^\\circ": "degree",
}  # fmt: skip
SHORT = {long: short for short, names in UNITS.items() for long in names.split()}
WRAP = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|emph)\s*\{([^{}]*)\}")
SPACES = re.compile(r"\\[,;:! ]|~|\\q?quad\b|\s+")
DELIMITERS = re.compile(r"\\[\[\]()]|\\?\$|^\*\*|\*\*$|^#+|\\displaystyle|\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])")
NUMBER = r"[-+]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})"
SIMPLE = re.compile(rf"({NUMBER}|[-+]?\d{{1,40}}/\d{{1,40}})|([-+]?)\\frac\{{(-?\d{{1,40}})\}}\{{(\d{{1,40}})\}}")
VALUE = re.compile(rf"[-+]?\d{{1,40}}/\d{{1,40}}|[-+]?\\frac\{{-?\d{{1,40}}\}}\{{\d{{1,40}}\}}|{NUMBER}")
WORD_UNIT = re.compile(rf"(?P<core>{NUMBER}) (?P<unit>[A-Za-z]{{2,}}(?: [A-Za-z]+)*)(?P<power>\^\S+)?")
TEXT_UNIT = re.compile(
    r"(?P<core>.*[\w})])\\(?:text|mathrm|textrm|mbox)\{\s*(?P<unit>[A-Za-z]+(?:[ /.][A-Za-z]+)*)\s*\}(?P<power>\^\S+)?"
)
PROSE = re.compile(r"[A-Za-z]{2,} [A-Za-z]")
ASSIGNED = re.compile(r"\\?[A-Za-z]\w*(?:\([a-z]\))?=([^=]+)")
LEAD = re.compile(r".*\banswer\b.*?(?:\bis\b|\bare\b|:)[\s:*]*(?=\S)", re.IGNORECASE)
DISPLAY = re.compile(r"(?:\\\[|\$\$)((?:(?!\\\[|\$\$).)+?)(?:\\\]|\$\$)\.?\s*\Z", re.DOTALL)


class MathReward:
    """1.0 for an answer equal to the ground truth, else 0.0; `wrong_format` (0.0) if no mathematics is found in it."""

    def __init__(self, seconds: float = 5.0) -> None:
        """`seconds` of CPU time limit a comparison, since some would never end; beyond it the verdict is `timeout`."""
        self._seconds = seconds
        self._read = lru_cache(maxsize=4096)(read)  # the answers of a group share their truth, and often more

    def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Compare the final answer with `prompt.ground_truth`. ValueError if that holds no mathematics."""
        truth = prompt.ground_truth
        if not re.search(r"\w|\\", truth):
            raise ValueError(f"ground truth {truth!r} is not mathematics")
        final, boxed = final_answer(answer)
        equal = quick(truth, final)
        if equal is None:
            if len(final) > max(MAX_CHARS, 2 * len(truth)):
                return Verdict("wrong_format", 0.0, {"correct": 0.0, "boxed": float(boxed)})
            try:
                with time_limit(self._seconds):
                    equal = self._compare(truth, final, boxed)
            except TimeUp:
                return Verdict("timeout", detail=f"not compared within {self._seconds:g} s of CPU time")
        parts = {"correct": float(equal or False), "boxed": float(boxed)}
        if equal is None:
            return Verdict("wrong_format", 0.0, parts)
        return Verdict("ok", parts["correct"], parts, answer=result(truth if equal else final))

    def _compare(self, truth: str, final: str, boxed: bool) -> bool | None:
        """Compare with the library; None if there is no mathematics in the answer."""
        (truth, unit), (bare, other) = split_unit(tidy(truth)), split_unit(tidy(final))
        gold = self._read(truth, True)
        mine = gold and (boxed or not PROSE.search(bare)) and self._read(bare, True)
        if gold and not mine and not boxed:
            mine, other = self._read(final, False), ""
        if not final or (gold and not mine):
            return None
        if not mine or not fit(unit, other) or differ(gold[0], mine[0]):
            return False
        return verify(gold, mine, allow_set_relation_comp=True, timeout_seconds=None)

    def cheats(self, prompt: Prompt) -> Iterator[tuple[str, str]]:
        """Yield answers that name many results, or the right one where it does not count."""
        truth, wrong = prompt.ground_truth, "12345.678"
        yield "several boxes", f"\\boxed{{{truth}}} or \\boxed{{{wrong}}}"
        yield "two results in a box", f"\\boxed{{{truth} \\text{{ or }} {wrong}}}"
        yield "two results after a comma", f"\\boxed{{{truth}, {wrong}}}"
        yield "in the thoughts alone", f"<think>\\boxed{{{truth}}}</think>I do not know."
        yield "thoughts without an end", f"<think>\\boxed{{{truth}}}"
        yield "many numbers", " ".join(map(str, range(-100, 1000))) + f" {wrong}"
        yield "a variable", "\\boxed{x}"

    def suspect(self, prompt: Prompt, answer: str) -> str:
        """Return what makes a passing answer look like a cheat: many boxes, or a last line of many numbers."""
        *_, text = answer.rpartition("</think>")
        if (boxes := len(set(re.findall(r"\\boxed\{([^{}]*)", text)))) > 3:
            return f"{boxes} different boxes"
        final, _ = final_answer(answer)
        extra = len(re.findall(NUMBER, final)) - len(re.findall(NUMBER, prompt.ground_truth))
        return f"{extra} numbers more than the truth has" if extra > 10 else ""

    @classmethod
    def examples(cls) -> Iterator[tuple[Prompt, str, float]]:
        """Yield gold and wrong answers with their scores."""
        for truth, answer, score in (
            ("18", "She makes 9 * 2 = 18 dollars.\n#### 18", 1.0),
            ("2,125", "The total is $2125", 1.0),
            ("18", "<think>\\boxed{18}</think>It is \\boxed{17}", 0.0),
            ("18", "First \\boxed{17}, no: \\boxed{18}.\nHope that helps!", 1.0),
            ("1/2", "\\boxed{\\frac{2}{4}}", 1.0),
            ("{1, 2, 3}", "\\boxed{\\{3, 1, 2\\}}", 1.0),
            ("(0, 1]", "\\boxed{[0, 1]}", 0.0),
            ("(x+1)^2", "$x^2 + 2x + 1$", 1.0),
            ("5 \\text{ km}", "\\boxed{5}", 1.0),
            ("5 \\text{ km}", "\\boxed{5 \\text{ m}}", 0.0),
            ("Yes", "\\boxed{\\text{yes}}", 1.0),
            ("\\mathbb{Z}_8", "\\boxed{ \\mathbb{Z}_{8} }", 1.0),
            ("18", "I do not know", 0.0),
        ):
            yield Prompt("0" * 32, (Message("user", "?"),), "math", truth), answer, score


def final_answer(text: str) -> tuple[str, bool]:
    """Return the final answer and whether it stood in a box. Empty if the thinking or the box never ended."""
    *_, text = text.rpartition("</think>")
    if "<think>" in text:
        return "", False
    *_, after = text.rpartition("\\boxed{")
    if after == text:
        display = DISPLAY.search(text[-2 * MAX_CHARS :])
        last = display[1] if display else text.strip().rpartition("\n")[2]
        last = re.sub(r"\.?\s*I hope (?:it|this) is correct\.?$", "", last)
        return (last if len(last) > 2 * MAX_CHARS else LEAD.sub("", last)).strip(), False
    depth = 1
    for end, char in enumerate(after):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return after[:end], True
    return "", True


def quick(truth: str, final: str) -> bool | None:
    """Compare equal texts, yes and no, and plain numbers without the library; None if it takes mathematics."""
    truth, final = tidy(truth), tidy(final)
    if not final:
        return None
    if truth == final or unwrapped(truth) == unwrapped(final):
        return True
    if unwrapped(truth).lower() in WORDS:
        said = [word.lower() for word in re.findall(r"^[A-Za-z]+|[A-Za-z]+$", unwrapped(final))]
        return next((word == unwrapped(truth).lower() for word in said if word in WORDS), False)
    (truth, unit), (final, other) = split_unit(truth), split_unit(final)
    if ("=" in truth) != ("=" in final):  # x = 5 is 5; but x = 5 is not y = 5
        truth, final = (match[1] if (match := ASSIGNED.fullmatch(text)) else text for text in (truth, final))
    gold, mine = number(truth), number(final)
    if gold is None or mine is None:
        return None
    if not fit(unit, other):
        return False
    if "%" in (unit, other) and unit != other:  # 25% is 0.25 as well as 25
        share, plain = (gold, mine) if unit == "%" else (mine, gold)
        return plain in (share, share / 100)
    if gold.denominator == mine.denominator == 1 or gold == mine:
        return gold == mine
    # One may be the other rounded: the library's to say.
    return None if abs(gold - mine) < max(abs(gold), abs(mine), 1) / 100 else False


def differ(gold: Any, mine: Any) -> bool:
    """Return whether two expressions differ in value at a point, which is cheaper than failing to simplify them."""
    for part in (gold, mine):
        if not isinstance(part, Expr) or isinstance(part, Symbol) or part.has(AppliedUndef, ExprWithLimits, Derivative):
            return False
    names = sorted({symbol.name for symbol in gold.free_symbols | mine.free_symbols})
    point = {name: Float(0.6180339887 + 0.1414213562 * place) for place, name in enumerate(names)}
    try:
        x, y = (complex(e.subs([(s, point[s.name]) for s in e.free_symbols]).doit().evalf(15)) for e in (gold, mine))
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return False
    return isfinite(x) and isfinite(y) and abs(x - y) > 1e-4 * max(abs(x), abs(y))


def number(text: str) -> Fraction | None:
    """Return the value of an integer, decimal or simple fraction; None for any other text."""
    if not (match := SIMPLE.fullmatch(text)):
        return None
    plain, sign, above, below = match.groups()
    try:
        value = Fraction(plain) if plain else Fraction(int(above), int(below))
    except ZeroDivisionError:
        return None
    return -value if sign == "-" else value


def result(final: str) -> str:
    """Return a final answer in one spelling: numbers of one value have one, of prose the last number counts, and other
    mathematics has that of its text."""
    text, _ = split_unit(tidy(final))
    found = VALUE.findall(text) if PROSE.search(text) else []
    value = number(found[-1] if found else text)
    return unwrapped(tidy(final)) if value is None else str(value)


def split_unit(text: str) -> tuple[str, str]:
    """Return a tidy text without its unit, and the unit in one spelling ("" if there is none)."""
    if text.endswith("%"):
        return text[:-1], "%"
    match = WORD_UNIT.fullmatch(text) or TEXT_UNIT.fullmatch(text)
    if not match or NO_UNITS.search(match["unit"].lower()):
        return text, ""
    unit = match["unit"] if match["unit"] in UNITS else match["unit"].lower().rstrip("s")
    return match["core"], SHORT.get(unit, unit) + (match["power"] or "").replace("{", "").replace("}", "")


def fit(unit: str, other: str) -> bool:
    """Return whether one of the units is missing or both are the same."""
    return not unit or not other or unit == other


def tidy(text: str) -> str:
    """Return the same mathematics in one spelling, without delimiters, spaces and commas that mean nothing."""
    text = DELIMITERS.sub("", text.strip().replace("\N{MINUS SIGN}", "-"))
    text = re.sub(r"\\[dt]frac(?![a-zA-Z])", r"\\frac", text).replace("{,}", ",").replace("\\%", "%")
    text = re.sub(r"([\^_])\{(\w|\\circ)\}", r"\1\2", SPACES.sub(" ", text))
    text = re.sub(r"(?<!\w) | (?!\w)", "", text)
    text = re.sub(r"(?<![\d,])\d{1,3}(?:,\d{3})+(?![\d,])", lambda m: m[0].replace(",", ""), text)
    return text.rstrip(".,;") if text.strip(".,;") else text


def unwrapped(text: str) -> str:
    """Return a tidy text without `\\text{...}` and the like."""
    return " ".join(WRAP.sub(r" \1 ", text).split())


def read(text: str, bare: bool) -> list:
    """Parse a bare expression (a box's content, a ground truth) or a line of prose with math-verify."""
    text = re.sub(r"(?<=\d)i\b", " i", text)  # else 2i is twice a variable, and 2 i imaginary
    if bare:
        return parse(f"\\boxed{{{text}}}", BARE, fallback_mode="no_fallback", parsing_timeout=None)
    return parse(re.sub(r"^#+\s*", "", text), fallback_mode="no_fallback", parsing_timeout=None)


class TimeUp(BaseException):
    """Raised when the time is up. It is no `Exception`, since the libraries below catch those."""


def _on_alarm(signum: int, frame: object) -> None:
    raise TimeUp


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeUp after `seconds` of CPU time in the main thread; in others, only the sidecar's own deadline holds.

    CPU time of the process, not the clock's: a verdict does not depend on who else uses the machine.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, _on_alarm)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
