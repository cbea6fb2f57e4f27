"""Instruction following as in IFEval: the answer must follow each instruction that a program can check.

`prompt.extra` holds the data set's own `instruction_id_list` (names in `CHECKERS`, or RLVR-IFEval's in
`FUNCTIONS`) and `kwargs`, one mapping an instruction. Zhou et al. 2023, "Instruction-Following Evaluation for Large
Language Models", section 2 and table 1; Lambert et al. 2024, "Tulu 3", for RLVR-IFEval.
`strict` checks the answer itself, `loose` any of eight forms of it (section 2.2): without its first line, its last
line, both or neither, each with or without asterisks. NLTK's part in the paper is done by nupunkt's sentences and a
pattern for words, so counts may differ a little in texts full of abbreviations.

Only the text after a think block is checked.

    pip install 'spmd-rl[ifeval]'
    reward.ifeval.target=rewards.ifeval:IfevalReward
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spmd_rl.types import AnswerInfo, Message, Prompt, Verdict

from .instructions.checks import CHECKERS, FUNCTIONS


class IfevalReward:
    """A rewarder with 1.0 if all instructions are followed, else 0.0, or with `partial` their share."""

    def __init__(self, loose: bool = False, partial: bool = False) -> None:
        """Choose the criterion: under `loose` any of the eight forms of the answer may follow an instruction."""
        self._loose, self._partial = loose, partial

    def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Run each check. ValueError for an unknown instruction, or one that lacks an argument."""
        *_, text = answer.rpartition("</think>")
        # Thoughts without an end leave no answer to check.
        text = "" if "<think>" in text else text
        texts = forms(text) if self._loose else [text]
        followed = [
            any(form.strip() and check(name, form, kwargs) for form in texts)
            for name, kwargs in instructions(prompt.extra)
        ]
        share = sum(followed) / len(followed)
        return Verdict("ok", share if self._partial else float(share == 1.0), {"followed": share})

    def cheats(self, prompt: Prompt) -> Iterator[tuple[str, str]]:
        """Yield empty talk that follows many instructions: requested words, in many forms."""
        asked = [kwargs for _, kwargs in instructions(prompt.extra)]
        stuffed = " ".join(str(word) for kwargs in asked for value in kwargs.values() for word in _flat(value))
        yield "the words asked for", stuffed
        yield "the words asked for, a hundred times", " ".join([stuffed] * 100)
        yield "a word, a thousand times", " ".join(["word"] * 1000)
        yield "every form at once", f'"<<title>>\n* *x*\n* **y**\n[z] [z] [z]\n***\n{stuffed}\n******\nP.S. {stuffed}"'

    def suspect(self, prompt: Prompt, answer: str) -> str:
        """Return the sign of a cheat in a passing answer: few different words among many."""
        words = re.findall(r"\w+", answer.rpartition("</think>")[2].lower())
        return f"{len(set(words))} different words of {len(words)}" if len(words) > 8 * len(set(words)) else ""

    @classmethod
    def examples(cls) -> Iterator[tuple[Prompt, str, float]]:
        """Yield gold and wrong answers with their scores."""
        no_comma = ("punctuation:no_comma", {})
        words = ("length_constraints:number_words", {"relation": "at least", "num_words": 3})
        for asked, answer, score in (
            ([no_comma], "Roses are red and violets blue.", 1.0),
            ([no_comma], "Roses are red, violets blue.", 0.0),
            ([no_comma, words], "<think>one, two, three</think>Roses are red.", 1.0),
            ([no_comma, words], "Red roses.", 0.0),
            ([("detectable_format:json_format", {})], '```json\n{"roses": "red"}\n```', 1.0),
        ):
            names, kwargs = ([pair[i] for pair in asked] for i in (0, 1))
            extra = {"instruction_id_list": names, "kwargs": kwargs}
            yield Prompt("0" * 32, (Message("user", "Write a poem."),), "ifeval", "", extra), answer, score


def instructions(extra: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the checks of a row, each with its arguments; null arguments are left out."""
    names, kwargs = extra.get("instruction_id_list"), extra.get("kwargs")
    if not names or not isinstance(kwargs, Sequence) or len(names) != len(kwargs):
        raise ValueError("needs `instruction_id_list` and `kwargs`, lists of the same length")
    pairs = []
    for name, given in zip(names, kwargs, strict=True):
        if name not in CHECKERS | FUNCTIONS:
            raise ValueError(f"unknown instruction {name!r}")
        pairs.append((name, {key: value for key, value in (given or {}).items() if value is not None}))
    return pairs


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def check(name: str, text: str, kwargs: Mapping[str, Any]) -> bool:
    """Return True if a text follows an instruction. ValueError for missing or wrong `kwargs`."""
    try:
        return bool((CHECKERS | FUNCTIONS)[name](text, **kwargs))
    except (TypeError, KeyError) as error:
        raise ValueError(f"{name}: cannot be checked with {dict(kwargs)}: {error}") from error


def forms(text: str) -> list[str]:
    """Return the eight forms of the loose criterion."""
    lines = text.split("\n")
    cuts = ["\n".join(part).strip() for part in (lines, lines[1:], lines[:-1], lines[1:-1])]
    return [text, *cuts[1:], *(cut.replace("*", "") for cut in cuts)]
