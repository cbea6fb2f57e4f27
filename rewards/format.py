"""The form of an answer, as a term of a reward: 1.0 if a pattern matches the whole answer, else 0.0.

reward.math.target=rewards.composite:CompositeReward
reward.math.args.parts.form={target: rewards.format:FormatReward, args: {form: think_answer}, weight: 0.2}
"""

import re
from collections.abc import Iterator

from spmd_rl.types import AnswerInfo, Message, Prompt, Verdict

TEXT = r"(?:(?!</?think>|</?answer>).)*"
"""Pattern of anything but another tag."""
FORMS = {
    "boxed": r".*\\boxed\s*\{.+\}.*",
    "think": rf"\s*<think>{TEXT}</think>\s*\S{TEXT}",
    "think_boxed": rf"\s*<think>{TEXT}</think>{TEXT}\\boxed\s*\{{.+\}}{TEXT}",
    "think_answer": rf"\s*<think>{TEXT}</think>\s*<answer>{TEXT}</answer>\s*",
    "answer": rf"{TEXT}<answer>{TEXT}</answer>\s*",
}


BLANK = re.compile(r"<answer>\s*</answer>|\\boxed\s*\{\s*\}")


class FormatReward:
    """A rewarder with 1.0 or 0.0. The status is `ok` for both, since only the form is judged."""

    def __init__(self, form: str = "think_answer", pattern: str | None = None) -> None:
        """Choose a pattern: by name in `FORMS`, or a regular expression whose `.` matches any character."""
        if pattern is None and form not in FORMS:
            raise ValueError(f"form={form}: known are {', '.join(FORMS)}")
        self._pattern = re.compile(FORMS[form] if pattern is None else pattern, re.DOTALL)

    def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Match the whole answer with the pattern."""
        score = float(self._pattern.fullmatch(answer) is not None)
        return Verdict("ok", score, {"well_formed": score})

    def cheats(self, prompt: Prompt) -> Iterator[tuple[str, str]]:
        """Yield answers with the usual marks and nothing in them."""
        yield "empty tags", "<think></think><answer></answer>"
        yield "blank tags", "<think>\n</think>\n<answer> </answer>\n"
        yield "an empty box", "<think> </think>\\boxed{}"
        yield "a blank box", "<think> </think>\\boxed{ }"

    def suspect(self, prompt: Prompt, answer: str) -> str:
        """Return the sign of a cheat in a passing answer: nothing within the marks."""
        return "nothing in an answer tag or a box" if BLANK.search(answer) else ""

    @classmethod
    def examples(cls) -> Iterator[tuple[Prompt, str, float]]:
        """Yield gold and wrong answers with their scores."""
        for answer, score in (
            ("<think>2 + 2</think>\n<answer>4</answer>", 1.0),
            ("<think>2 + 2</think>4", 0.0),
            ("<answer>4</answer>", 0.0),
            ("<think><think>2 + 2</think><answer>4</answer>", 0.0),
        ):
            yield Prompt("0" * 32, (Message("user", "?"),), "format", ""), answer, score
