"""Mathematics: is the final answer equal to the ground truth? Compared symbolically by the math-verify library.

The final answer is the last `\\boxed{...}` after the last think block, or else the last line (`#### 18`, `so x = 3/4`).
Integers, decimals, fractions, expressions, sets and intervals; units and prose around a number on the last line are
fine. Leaves out partial credit, and ground truths that are not mathematics.

    reward.math.target=rewards.math_verify:MathReward
"""

import logging
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from math_verify import parse, verify

from spmd_rl.types import AnswerInfo, Message, Prompt, Verdict

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off; ours is on


class MathReward:
    """1.0 for an answer equal to the ground truth, else 0.0; `wrong_format` (0.0) if no mathematics is found in it."""

    def __init__(self, seconds: float = 5.0) -> None:
        """`seconds`: limit of one comparison, some of which would never end; beyond it the verdict is `timeout`."""
        self._seconds = seconds
        self._gold = lru_cache(maxsize=4096)(parse_final)  # the answers of a group share theirs

    def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Compare the final answer with `prompt.ground_truth`. An error if that cannot be parsed."""
        final, boxed = final_answer(answer)
        try:
            with time_limit(self._seconds):
                if not (gold := self._gold(prompt.ground_truth, True)):
                    raise ValueError(f"ground truth {prompt.ground_truth!r} is not mathematics")
                parsed = parse_final(final, boxed)
                equal = bool(parsed) and verify(gold, parsed, timeout_seconds=None)
        except TimeUp:
            return Verdict("timeout", detail=f"not compared within {self._seconds:g} s")
        parts = {"correct": float(equal), "boxed": float(boxed)}
        return Verdict("ok" if parsed else "wrong_format", float(equal), parts)

    @classmethod
    def examples(cls) -> Iterator[tuple[Prompt, str, float]]:
        """Gold and wrong answers with their scores."""
        for truth, answer, score in (
            ("18", "She makes 9 * 2 = 18 dollars.\n#### 18", 1.0),
            ("2,125", "The total is $2125", 1.0),
            ("18", "<think>\\boxed{18}</think>It is \\boxed{17}", 0.0),
            ("18", "First \\boxed{17}, no: \\boxed{18}.\nHope that helps!", 1.0),
            ("1/2", "\\boxed{\\frac{2}{4}}", 1.0),
            ("{1, 2, 3}", "\\boxed{\\{3, 1, 2\\}}", 1.0),
            ("(x+1)^2", "$x^2 + 2x + 1$", 1.0),
            ("18", "I do not know", 0.0),
        ):
            yield Prompt("0" * 32, (Message("user", "?"),), "math", truth), answer, score


def final_answer(text: str) -> tuple[str, bool]:
    """The part of an answer that counts, and whether it stood in a box. Empty if thinking or the box never ended."""
    *_, text = text.rpartition("</think>")
    if "<think>" in text:
        return "", False
    *_, after = text.rpartition("\\boxed{")
    if after == text:
        return text.strip().rpartition("\n")[2], False
    depth = 1
    for end, char in enumerate(after):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return after[:end], True
    return "", True


def parse_final(text: str, is_bare: bool) -> list:
    """What math-verify makes of a bare expression (a box's content, a ground truth) or of a line of prose."""
    bare = parse(f"\\boxed{{{text}}}", fallback_mode="no_fallback", parsing_timeout=None) if is_bare else []
    return bare or parse(re.sub(r"^#+\s*", "", text), fallback_mode="no_fallback", parsing_timeout=None)


class TimeUp(BaseException):
    """Not an `Exception`, since the libraries below catch those."""


def _ring(signum: int, frame: object) -> None:
    raise TimeUp


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TimeUp after so many seconds, in the main thread; elsewhere only the sidecar's own deadline holds."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
