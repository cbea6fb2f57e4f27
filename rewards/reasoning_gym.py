"""reasoning-gym problems, verified by the task's own scorer.

The prompt has the generator's item: `extra = {"task": "chain_sum", "entry": {"question": ..., "answer": ...,
"metadata": ...}}`. Many of those scorers give a little for a wrong answer (a non-empty one, one that contains the right
one): `strict` leaves only the full score, as a reward should; `strict: false` passes partial scores on.

    reward.sums.target=rewards.reasoning_gym:ReasoningGymReward reward.sums.args.extract=last_number
"""

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from reasoning_gym import get_score_answer_fn

from spmd_rl.types import AnswerInfo, Message, Prompt, Verdict

NUMBER = re.compile(r"(?<![\d.])(?:(?<!\w)-)?\d+(?:,\d{3})*(?:\.\d+)?")
ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def whole(answer: str) -> str:
    """Return the answer without the space around it."""
    return answer.strip()


def last_number(answer: str) -> str:
    """Return the last number in the answer, without thousands separators."""
    numbers = NUMBER.findall(answer.replace("\N{MINUS SIGN}", "-"))
    return numbers[-1].replace(",", "") if numbers else ""


def answer_tag(answer: str) -> str:
    """Return the content of the last `<answer>...</answer>`."""
    found = ANSWER_TAG.findall(answer)
    return found[-1].strip() if found else ""


EXTRACT: dict[str, Callable[[str], str]] = {"whole": whole, "last_number": last_number, "answer_tag": answer_tag}


class ReasoningGymReward:
    """A rewarder with the task's own score, 0 to 1; `wrong_format` (0.0) without anything to score."""

    def __init__(self, extract: str = "whole", strict: bool = True) -> None:
        """Choose the part to score, by a name in `EXTRACT`; `strict` gives 1.0 or 0.0 and nothing between."""
        if extract not in EXTRACT:
            raise ValueError(f"extract={extract}: known are {', '.join(EXTRACT)}")
        self._extract = EXTRACT[extract]
        self._strict = strict
        # One scorer per task.
        self._scorer = lru_cache(maxsize=None)(get_score_answer_fn)

    def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Score the extracted part of the answer."""
        extracted = self._extract(answer)
        if not extracted:
            return Verdict("wrong_format", 0.0, {"task_score": 0.0})
        task_score = float(self._scorer(prompt.extra["task"])(extracted, entry=prompt.extra["entry"]))
        score = float(task_score >= 1.0) if self._strict else task_score
        return Verdict("ok", score, {"task_score": task_score}, answer=extracted)

    def cheats(self, prompt: Prompt) -> Iterator[tuple[str, str]]:
        """Yield answers that name many results, or the right one in a place that does not count."""
        wrong = "12345678"
        yield "many numbers", " ".join(map(str, range(1000))) + f" {wrong}"
        yield "right, then wrong", f"{prompt.ground_truth} or {wrong}"
        yield "two tags", f"<answer>{prompt.ground_truth}</answer> or <answer>{wrong}</answer>"
        yield "one of two", f"<answer>{prompt.ground_truth} or {wrong}</answer>"

    def suspect(self, prompt: Prompt, answer: str) -> str:
        """Return the sign of a cheat in a passing answer: it names many numbers."""
        count = len(NUMBER.findall(answer)) - 3 * len(NUMBER.findall(" ".join(m.plain_text for m in prompt.messages)))
        return f"{count} numbers more than a solution needs" if count > 20 else ""

    @classmethod
    def examples(cls) -> Iterator[tuple[Prompt, str, float]]:
        """Yield gold and wrong answers with their scores."""
        for task, question, gold, wrong in [
            ("chain_sum", "State the final answer to the following arithmetic problem: 0 - 4 =", "-4", "4"),
            ("chain_sum", "State the final answer to the following arithmetic problem: 1 + 5 =", "6", "1 + 5 = 6?"),
            ("spell_backward", "Spell this word backward (example: sun -> nus): ore", "ero", "eor"),
        ]:
            entry: dict[str, Any] = {"question": question, "answer": gold, "metadata": {}}
            prompt = Prompt("0" * 32, (Message("user", question),), "sums", gold, {"task": task, "entry": entry})
            yield prompt, gold, 1.0
            yield prompt, wrong, 0.0
            yield prompt, " ", 0.0
