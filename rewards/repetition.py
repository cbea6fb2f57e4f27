"""Repetition as a term of a reward: 0.0 for an answer that repeats nothing, down to -1.0.

The score is minus the share of n-grams of words that occurred in the answer before: 1 - distinct / all (Yeo et al.
2025, "Demystifying Long Chain-of-Thought Reasoning", section 4.3, has a penalty of this kind). Texts without spaces
count by character.

    reward.math.args.parts.repetition={target: rewards.repetition:RepetitionReward, args: {n: 4}, weight: 0.5}
"""

import re
from collections.abc import Iterator

from spmd_rl.types import AnswerInfo, Message, Prompt, Verdict

UNIT = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")
"""Pattern of a word, or a character of Chinese or Japanese."""


class RepetitionReward:
    """A rewarder with minus the share of repeated n-grams; 0.0 for an answer shorter than one."""

    def __init__(self, n: int = 3) -> None:
        """Set the number of words of an n-gram."""
        if n < 1:
            raise ValueError(f"n={n}: must be at least 1")
        self._n = n

    def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Score the words of the answer, in any case."""
        words = UNIT.findall(answer.casefold())
        grams = [tuple(words[i : i + self._n]) for i in range(len(words) - self._n + 1)]
        repeated = 1 - len(set(grams)) / len(grams) if grams else 0.0
        return Verdict("ok", -repeated, {"repeated": repeated})

    @classmethod
    def examples(cls) -> Iterator[tuple[Prompt, str, float]]:
        """Yield gold and wrong answers with their scores."""
        for answer, score in (
            ("First we add two and two, then we are done.", 0.0),
            ("so it is so it is so it is", -0.5714285714285714),
            ("no no no no", -0.5),
            ("", 0.0),
        ):
            yield Prompt("0" * 32, (Message("user", "?"),), "repetition", ""), answer, score
