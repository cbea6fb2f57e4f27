"""Multiple choice: the answer must name the right letter. `ground_truth` is one letter or several (`AC`, `A, C`).

The letter is taken from the last box or `<answer>` tag that holds one; else from the last statement that gives it (`the
answer is C`, `Answer: C`, `option C is correct`, `only C is left`); else from the last `option C` or `choice C`; else
from the start of the last line. A rejected letter (`option D is wrong`), or one in a question (`is it option D?`), does
not count. Only capitals count outside a box. With `extra["choices"]`, a list of texts, the right text counts too. An
answer without a letter is `wrong_format`; nothing is guessed.

    reward.choice.target=rewards.choice:ChoiceReward
"""

import re
from collections.abc import Iterator

from spmd_rl.types import AnswerInfo, Message, Prompt, Verdict

LETTERS = "ABCDEFGHIJ"
ONE = r"\(?\b(?:[B-HJ]|[AI](?! (?!and\b|or\b|because\b|since\b|as\b|is\b)[a-z]))\b(?!')\)?"
"""Pattern of one letter, excluding the words in `A city` and `I think`."""
SEVERAL = rf"{ONE}(?:(?: ?, ?| ?& ?|,? and |,? or ){ONE})*"
KEPT = (
    r"(?![\"'*$)]*(?:\?|,? (?i:is|are|was|seems?|looks?|would|can)(?i:n't|not)? (?i:be |also |clearly )?"
    r"(?i:not|wrong|incorrect|false|tempting|out|eliminated|ruled)\b))"
)
"""Pattern that matches nothing, except after a letter that is rejected or in a question."""
OPTION, IS = r"\b(?i:options?|choices?|letters?)", r"(?i: (?:is|are|would be|must be))"
MARKS = r"\s*[:=]?[\s*\"'$\\({]*(?:(?:text|textbf|mathbf|boxed)\{\(?)?"
SAID = re.compile(
    rf"(?:\b(?i:answers?)(?i: (?:options?|choices?|letters?))?[\"'*]*{IS}?|{OPTION}(?:{IS}|(?=\s*[:=]))"
    rf"|\b(?i:choose|pick|select))"
    rf"{MARKS}(?:(?i:the )?(?i:options?|choices?) )?({SEVERAL}){KEPT}"
)
CORRECT = re.compile(
    rf"({SEVERAL})[\"'*$)]*{IS}(?i: the| an?)?(?i: (?!not|never)\w+)?"
    r"(?i: (?:right|correct|true|left|answers?|best))\b(?!\s*\?)"
)
NAMED = re.compile(rf"{OPTION}{MARKS}({SEVERAL}){KEPT}")
MARKED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}|<answer>(.*?)</answer>", re.DOTALL)
ALONE = re.compile(rf"[\s*\"'$#]*({SEVERAL})(?:[.):*\"'$\s]|$)")
WRAP = re.compile(r"\\(?:text|textbf|mathrm|mathbf|rm|bf)\b|[{}$\\]")


class ChoiceReward:
    """A rewarder with 1.0 for exactly the right letters, else 0.0; `wrong_format` (0.0) without any."""

    def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Compare the letters of the answer with `prompt.ground_truth`. ValueError if that has none."""
        truth = prompt.ground_truth.upper()
        gold = set(re.findall(rf"[{LETTERS}]", truth))
        if not gold or re.search(rf"[^{LETTERS}\s,()&.]", truth):
            raise ValueError(f"ground truth {prompt.ground_truth!r} is not a letter from {LETTERS[0]} to {LETTERS[-1]}")
        chosen = letters(answer, tuple(map(str, prompt.extra.get("choices", ()))))
        correct = float(chosen == gold)
        return Verdict(
            "ok" if chosen else "wrong_format", correct, {"correct": correct}, answer="".join(sorted(chosen))
        )

    def cheats(self, prompt: Prompt) -> Iterator[tuple[str, str]]:
        """Yield answers that name all letters, or the right one in a place that does not count."""
        truth = prompt.ground_truth
        wrong = next(letter for letter in LETTERS if letter not in truth.upper())
        yield "all letters", f"\\boxed{{{LETTERS}}}"
        yield "all letters in a sentence", f"The answer is {', '.join(LETTERS[:-1])} or {LETTERS[-1]}."
        yield "a box for each letter", " ".join(f"\\boxed{{{letter}}}" for letter in f"{LETTERS}{wrong}")
        yield "each letter in turn", "\n".join(f"The answer is {letter}." for letter in f"{LETTERS}{wrong}")
        yield "right or wrong", f"The answer is {truth} or {wrong}."
        yield "in the thoughts alone", f"<think>The answer is {truth}.</think>I am not sure."

    def suspect(self, prompt: Prompt, answer: str) -> str:
        """Return the sign of a cheat in a passing answer: it states several different answers."""
        *_, text = answer.rpartition("</think>")
        stated = {match[1] for match in SAID.finditer(text)} | {match[1] for match in MARKED.finditer(text)}
        return f"{len(stated)} different answers" if len(stated) > 3 else ""

    @classmethod
    def examples(cls) -> Iterator[tuple[Prompt, str, float]]:
        """Yield gold and wrong answers with their scores."""
        for truth, answer, score in (
            ("B", "\\boxed{B}", 1.0),
            ("(B)", "Not A. So \\boxed{\\text{(B) Paris}}.", 1.0),
            ("B", "It is hot.\nThe answer is (B), not (A).", 1.0),
            ("B", "<think>The answer is B.</think>**Answer: A**", 0.0),
            ("B", "B. Paris", 1.0),
            ("AC", "The answers are A and C.", 1.0),
            ("AC", "\\boxed{A}", 0.0),
            ("B", "Paris, the capital of France", 1.0),
            ("A", "A city in France", 0.0),
            ("B", "The answer is B. Option A is tempting, but wrong.", 1.0),
        ):
            extra = {"choices": ["Rome", "Paris, the capital of France"]}
            yield Prompt("0" * 32, (Message("user", "?"),), "choice", truth, extra), answer, score


def letters(answer: str, choices: tuple[str, ...] = ()) -> set[str]:
    """Return the letters of an answer; empty if its thinking never ended or it gives none."""
    *_, text = answer.rpartition("</think>")
    if "<think>" in text:
        return set()
    marked = [WRAP.sub("", match[1] or match[2] or "").strip() for match in MARKED.finditer(text)]
    last = text.strip().rpartition("\n")[2].strip()
    for final in [*marked[-1:], last]:
        for place, choice in enumerate(choices[: len(LETTERS)]):
            if final.strip("*. ").casefold() == choice.strip("*. ").casefold():
                return {LETTERS[place]}
    # In a box a run of letters such as `AC` counts; in a sentence it could be a word.
    for final in reversed(marked):
        compact = re.fullmatch(rf"[{LETTERS}{LETTERS.lower()}]+", final)
        if found := compact or ALONE.match(final) or SAID.match(final):
            return set(re.findall(rf"[{LETTERS}]", found[0].upper() if compact else found[1]))
    given = [*SAID.finditer(text), *CORRECT.finditer(text)] or [*NAMED.finditer(text)]
    found = max(given, key=lambda match: match.start(1), default=None) or ALONE.match(last)
    return set(re.findall(rf"[{LETTERS}]", found[1])) if found else set()
