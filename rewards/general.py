"""Short open answers: the final answer must be the ground truth, word for word or nearly.

The final answer is the last box, `<answer>` tag or text after the last `answer is`, after the last think block, or else
the last line. `match` is the comparison: `exact`, `normalised` (case, punctuation and articles aside, `4.0` is `4`),
`f1` (of words) or `rouge_l` (longest common subsequence of words, F measure). `grade` is the value of a match:

    | grade    | right, marked               | right | marked | neither |
    |----------|-----------------------------|-------|--------|---------|
    | `match`  | 0 to 1, as the match has it |       |        |         |
    | `loose`  | 1                           | 1     | -1     | -1      |
    | `soft`   | 1                           | 0.5   | -0.5   | -1      |
    | `strict` | 1                           | -1    | -1     | -1      |

Right is a match of at least `threshold`, marked an answer in a box, a tag or after `answer is`. Normalisation and F1:
Rajpurkar et al. 2016 (SQuAD), section 6.1; ROUGE-L: Lin 2004, section 3.1; grades in the manner of CrossThink. Meaning
is not compared; `judge` does that.

    reward.general.target=rewards.general:GeneralReward reward.general.args.match=f1
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from unicodedata import normalize

from spmd_rl.types import AnswerInfo, Message, Prompt, Verdict

MAX_WORDS = 500
"""Number of words at the end of a text that are compared."""
MARKED = re.compile(
    r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}|<answer>(.*?)</answer>|\banswer\s*(?:is|:)[\s:*]*([^\n]+)",
    re.DOTALL | re.IGNORECASE,
)
WORD = re.compile(
    r"(?<![\w.(\[{])-?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?(?![\w,])|(?:(?<![\w.)])-)?\d+\.\d+(?!\w)|(?:(?<![\w.)])-)?\w+"
)
"""Pattern of a number, with its sign, or a word; a bracket's `(1,100)` is two."""
GRADES = {"loose": (1.0, 1.0, -1.0, -1.0), "soft": (1.0, 0.5, -0.5, -1.0), "strict": (1.0, -1.0, -1.0, -1.0)}


class GeneralReward:
    """A rewarder of the final answer's match with the ground truth; `wrong_format` without a final answer."""

    def __init__(self, match: str = "normalised", grade: str = "match", threshold: float = 1.0) -> None:
        """Take a name in `MATCHES`, `match` or a name in `GRADES`, and the least match that is right."""
        if match not in MATCHES:
            raise ValueError(f"match={match}: known are {', '.join(MATCHES)}")
        if grade != "match" and grade not in GRADES:
            raise ValueError(f"grade={grade}: known are match, {', '.join(GRADES)}")
        self._match, self._grade, self._threshold = MATCHES[match], grade, threshold

    def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Compare the final answer with `prompt.ground_truth`."""
        final, marked = final_answer(answer)
        match = self._match(prompt.ground_truth, final) if final else 0.0
        score = match
        if self._grade != "match":
            score = GRADES[self._grade][2 * (match < self._threshold) + (not marked)]
        return Verdict("ok" if final else "wrong_format", score, {"match": match, "marked": float(marked)})

    def cheats(self, prompt: Prompt) -> Iterator[tuple[str, str]]:
        """Yield answers that hold the truth among much else, or in a place that does not count."""
        filler = " ".join(f"word{number}" for number in range(100))
        yield "among many words", f"The answer is {prompt.ground_truth} {filler}"
        yield "before another", f"<answer>{prompt.ground_truth}</answer><answer>{filler}</answer>"
        yield "in the thoughts alone", f"<think>The answer is {prompt.ground_truth}</think>I do not know."
        yield "the question's words", f"The answer is: {' '.join(message.plain_text for message in prompt.messages)}"

    def suspect(self, prompt: Prompt, answer: str) -> str:
        """Return the sign of a cheat in a passing answer: several marked answers, or a very long one."""
        final, _ = final_answer(answer)
        if (marked := len({match[0] for match in MARKED.finditer(answer.rpartition("</think>")[2])})) > 3:
            return f"{marked} different answers"
        longer = len(words(final)) - 5 * len(words(prompt.ground_truth))
        return f"an answer of {len(words(final))} words" if longer > 20 else ""

    @classmethod
    def examples(cls) -> Iterator[tuple[Prompt, str, float]]:
        """Yield gold and wrong answers with their scores."""
        for truth, answer, score in (
            ("Western blot", "Therefore, the answer is the western blot.", 1.0),
            ("Western blot", "<think>Western blot?</think> \\boxed{ELISA}", 0.0),
            ("Thin client / Fat server", "<answer>thin client, fat server</answer>", 1.0),
            ("Bishop", "It moves diagonally.\nbishop", 1.0),
            ("Bishop", "<think>bishop", 0.0),
        ):
            yield Prompt("0" * 32, (Message("user", "?"),), "general", truth), answer, score


def final_answer(answer: str) -> tuple[str, bool]:
    """Return the final answer and True if it was marked. It is empty if the thinking never ended."""
    *_, text = answer.rpartition("</think>")
    if "<think>" in text:
        return "", False
    found = [match for match in MARKED.finditer(text) if any(match.groups())]
    if found:
        return next(group for group in found[-1].groups() if group).strip(), True
    return text.strip().rpartition("\n")[2], False


def words(text: str) -> list[str]:
    """Return the lower-case words of a text without LaTeX's text commands, punctuation and articles."""
    # NFC, since the same accented letter has several encodings.
    text = normalize("NFC", re.sub(r"\\(?:text|textbf|mathrm)\b", " ", text).casefold())
    found = [number(word) for word in WORD.findall(text)]
    return [word for word in found if word not in ("a", "an", "the")][-MAX_WORDS:] or found[-MAX_WORDS:]


def number(word: str) -> str:
    """Return a number without separators of thousands and trailing zeros, any other word unchanged."""
    plain = word.replace(",", "")
    return (plain.rstrip("0").rstrip(".") if "." in plain else plain) if plain.lstrip("-")[:1].isdigit() else word


def exact(truth: str, final: str) -> float:
    """Return 1.0 for the same text, up to the space around it."""
    return float(normalize("NFC", truth.strip()) == normalize("NFC", final.strip()))


def normalised(truth: str, final: str) -> float:
    """Return 1.0 for the same words, or for the same text if it has none."""
    return float(words(truth) == words(final)) if words(truth) else exact(truth, final)


def f1(truth: str, final: str) -> float:
    """Return the harmonic mean of precision and recall of the words."""
    gold, mine = words(truth), words(final)
    return _harmonic(sum((Counter(gold) & Counter(mine)).values()), len(gold), len(mine))


def rouge_l(truth: str, final: str) -> float:
    """Return the harmonic mean of precision and recall of the longest common subsequence of words."""
    gold, mine = words(truth), words(final)
    # One row of the table at a time: memory grows with one text, not with the product of both.
    lengths = [0] * (len(mine) + 1)
    for word in gold:
        before = 0
        for place, other in enumerate(mine, 1):
            before, lengths[place] = (
                lengths[place],
                before + 1 if word == other else max(lengths[place - 1 : place + 1]),
            )
    return _harmonic(lengths[-1], len(gold), len(mine))


def _harmonic(common: int, num_gold: int, num_mine: int) -> float:
    return 2 * common / (num_gold + num_mine) if common else 0.0


MATCHES: dict[str, Callable[[str, str], float]] = {
    "exact": exact,
    "normalised": normalised,
    "f1": f1,
    "rouge_l": rouge_l,
}
