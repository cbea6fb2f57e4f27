"""Mathematics: the final answer must equal the ground truth.

The final answer is the last of these after the last think block: a `\\boxed{...}`, an `<answer>` tag, a line `#### 18`;
else the last line, or the last one with `answer is` if no mathematics follows it. In a sentence its last mathematics
counts. Answer and truth are read (`mathematics/`) and compared by value: numbers, expressions, equations, lists,
points, sets, intervals, yes and no. A unit may be missing on one side, but two units must be the same; none is
converted. Expressions outside of that grammar (integrals, matrices) are compared symbolically by the math-verify
library, and those that neither can read (`\\mathbb{Z}_8`) as text. There is no partial credit.
Where the truth is a number, a calculation that the question itself has (`29 + 9`) is not paid for its value.

    reward.math.target=rewards.math_verify:MathReward
"""

import logging
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from spmd_rl.types import AnswerInfo, Message, Prompt, Verdict

from .mathematics.reading import Reading, equal, readings, vote
from .mathematics.tex import NAMES, WORDS, respelled, same_text

# The library warns that its own time limits are off; this module sets one.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)
# The library must read a bare text completely or not at all: by default it takes any number out of unreadable text.
PLAIN = NormalizationConfig(True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False)
BARE = (LatexExtractionConfig(boxed_match_priority=0, normalization_config=PLAIN),)

MAX_CHARS = 500
"""Length from which a final answer, if it is also twice as long as the truth, is not read, since that
takes too long.
"""
BOX = re.compile(r"\\f?boxed\s*\{")
MARKED = re.compile(rf"<answer>(?P<tag>[\s\S]*?)</answer>|^\s*####[ \t]*(?P<line>\S.*)$|{BOX.pattern}", re.MULTILINE)
LEAD = re.compile(r".*\banswer\b.*?(?:\bis\b|\bare\b|:)[\s:*]*(?=\S)", re.IGNORECASE)
DISPLAY = re.compile(r"(?:\\\[|\$\$)((?:(?!\\\[|\$\$).)+?)(?:\\\]|\$\$)\.?\s*\Z", re.DOTALL)
SPAN = re.compile(
    r"\$(?=[^\s$])([^$\n]*[^$\s\\])\$(?!\d)|\\\((.+?)\\\)|(\\[A-Za-z]+)|([^\W\d_]{2,}|\b[aAI]\b(?=\s+\w))|([^$\\]|\\.?|\$)"
)
"""Pattern of mathematics between marks, a command, a word, or any other character."""
MARKS = re.compile(r"[\s$]|\\[()\[\],;!]")
NUMBER = re.compile(r"-?[\d.,]+")
OPERATION = re.compile(r"[\w)}!%][-+*/^\u00d7\u00f7\u00b7\u2212]|\\(?:times|cdot|div|[dt]?frac|sqrt|binom)")
MATHEMATICAL = NAMES | {"percent", "and", "or"}


class MathReward:
    """A rewarder with 1.0 for an answer equal to the ground truth, else 0.0; `wrong_format` (0.0)
    without mathematics.
    """

    def __init__(self, seconds: float = 5.0) -> None:
        """Limit a comparison to `seconds` of CPU time, since some would never end; beyond it the verdict
        is `timeout`.
        """
        self._seconds = seconds
        # The answers of a group share their truth, and often more.
        self._read = lru_cache(maxsize=4096)(read)

    def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Compare the final answer with `prompt.ground_truth`. ValueError if that holds no mathematics."""
        truth = prompt.ground_truth
        if not re.search(r"\w|\\", truth):
            raise ValueError(f"ground truth {truth!r} is not mathematics")
        final, boxed = final_answer(answer)
        equal, spelling = None, ""
        if final and len(final) <= max(MAX_CHARS, 2 * len(truth)):
            try:
                with time_limit(self._seconds):
                    equal, spelling = self._compare(truth, final, boxed, prompt.messages[-1].plain_text)
            except TimeUp:
                return Verdict("timeout", detail=f"not compared within {self._seconds:g} s of CPU time")
        parts = {"correct": float(equal or False), "boxed": float(boxed)}
        return Verdict("wrong_format" if equal is None else "ok", parts["correct"], parts, answer=spelling)

    def _compare(self, truth: str, final: str, boxed: bool, asked: str) -> tuple[bool | None, str]:
        """Return True if the answer equals the truth, None if it has no mathematics, and the spelling that votes."""
        gold, text = readings(truth), same_text(truth)
        if text.casefold() in WORDS:
            said = [
                word for pair in re.findall(r"^\W*([a-z]+)|([a-z]+)\W*$", same_text(final).casefold()) for word in pair
            ]
            said = next((word for word in said if word in WORDS), "")
            return said == text.casefold(), said or same_text(final)
        mine = () if not boxed and prose(final) else readings(final)
        found = same_text(final) == text or any(equal(one, other) for one in gold for other in mine)
        if not mine and not boxed and not found:
            final, mine = last_mathematics(final)
            found = any(equal(one, other) for one in gold for other in mine)
            if not final:
                return None, ""
        if not found and (not gold or not mine or "union" in (gold[0].kind, mine[0].kind)):
            known, other = self._read(truth), self._read(final)
            if known and not other and not mine:
                return None, ""
            found = bool(known and other) and verify(known, other, allow_set_relation_comp=True, timeout_seconds=None)
        if found and left_undone(truth, final, asked):
            return False, same_text(final)
        return found, vote(gold, gold if found and gold else mine) or same_text(truth if found else final)

    def cheats(self, prompt: Prompt) -> Iterator[tuple[str, str]]:
        """Yield answers that name many results, or the right one in a place that does not count."""
        truth, wrong = prompt.ground_truth, "12345.678"
        yield "several boxes", f"\\boxed{{{truth}}} or \\boxed{{{wrong}}}"
        yield "two results in a box", f"\\boxed{{{truth} \\text{{ or }} {wrong}}}"
        yield "two results after a comma", f"\\boxed{{{truth}, {wrong}}}"
        yield "in the thoughts alone", f"<think>\\boxed{{{truth}}}</think>I do not know."
        yield "thoughts without an end", f"<think>\\boxed{{{truth}}}"
        yield "many numbers", " ".join(map(str, range(-100, 1000))) + f" {wrong}"
        yield "a variable", "\\boxed{x}"

    def suspect(self, prompt: Prompt, answer: str) -> str:
        """Return the sign of a cheat in a passing answer: many boxes, or a last line of many numbers."""
        *_, text = answer.rpartition("</think>")
        if (boxes := len(set(re.findall(r"\\boxed\{([^{}]*)", text)))) > 3:
            return f"{boxes} different boxes"
        final, _ = final_answer(answer)
        extra = len(re.findall(r"\d+", final)) - len(re.findall(r"\d+", prompt.ground_truth))
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
    """Return the final answer and True if it was boxed. Empty if the thinking or the box never ended."""
    *_, text = text.rpartition("</think>")
    if "<think>" in text:
        return "", False
    *_, mark = [None, *MARKED.finditer(text)]
    if mark and mark.lastgroup:
        inner = mark[mark.lastgroup]
        return final_answer(inner) if BOX.search(inner) else (LEAD.sub("", inner).strip(), False)
    if mark:
        depth = 1
        for end in range(mark.end(), len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return text[mark.end() : end].strip(), True
        return "", True
    if display := DISPLAY.search(text[-2 * MAX_CHARS :]):
        return display[1].strip(), False
    lines = text.strip().splitlines()[-20:] or [""]
    said = [line for line in lines if len(line) <= 2 * MAX_CHARS and LEAD.match(line)]
    last = (
        lines[-1] if re.search(r"[\d\\$]|\b(yes|no|true|false)\b", lines[-1], re.IGNORECASE) else [lines[-1], *said][-1]
    )
    last = re.sub(r"\.?\s*I hope (?:it|this) is correct\.?$", "", last)
    return (last if len(last) > 2 * MAX_CHARS else LEAD.sub("", last)).strip(), False


def left_undone(truth: str, final: str, asked: str) -> bool:
    """Return True if the truth is a number, and the answer a calculation that the question itself has."""
    said, asked = (MARKS.sub("", text) for text in (final, asked))
    # Of `29 + 9 = 29 + 9` the right side counts.
    shown = said.rpartition("=")[2].rstrip(".,;:!?")
    return bool(NUMBER.fullmatch(truth.strip()) and OPERATION.search(shown)) and shown in asked


def prose(text: str) -> bool:
    """Return True if a text has words that are not mathematics."""
    return any(match[4] and match[4].lower() not in MATHEMATICAL for match in SPAN.finditer(text))


def last_mathematics(text: str) -> tuple[str, Sequence[Reading]]:
    """Return the last readable part of a sentence, and its readings; empty without one."""
    parts = [""]
    for match in SPAN.finditer(text):
        if match[1] or match[2]:
            parts += [match[1] or match[2], ""]
        elif match[4] and match[4].lower() not in MATHEMATICAL:
            parts.append("")
        else:
            parts[-1] += match[0]
    for part in reversed(parts):
        part = re.sub(r"(?<=[*\s])!+$|[-:(?\s]+$", "", part.strip())
        if re.search(r"\d|\\[A-Za-z]", part) and (found := readings(part)):
            return part, found
    return "", ()


def read(text: str) -> list:
    """Parse a bare expression with math-verify."""
    # Otherwise 2i is twice a variable; 2 i is imaginary.
    text = re.sub(r"(?<=\d)i\b", " i", respelled(text))
    return parse(f"\\boxed{{{text}}}", BARE, fallback_mode="no_fallback", parsing_timeout=None)


class TimeUp(BaseException):
    """The end of the time limit. No `Exception`, since the libraries called here catch those."""


def _on_alarm(signum: int, frame: object) -> None:
    raise TimeUp


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeUp after `seconds` of CPU time in the main thread; in others, only the sidecar's own deadline holds.

    CPU time of the process instead of wall time, so that a verdict does not depend on the machine's load.
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
