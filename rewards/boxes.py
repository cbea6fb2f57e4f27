"""Boxes around things in a picture: the answer's boxes must overlap those of the ground truth.

A box is four numbers, left, top, right, bottom, in the coordinates of the ground truth; or an object with these under
`bbox_2d`, `bbox`, `box` or `position`, and perhaps a `label`, which must then be the same. Answer and ground truth are
a box or a list of boxes, as JSON or as a Python literal: the last one after the thoughts, in a fenced block or in the
text. Boxes are paired by their overlap (intersection over union), the largest first. The score is the mean overlap over
the boxes of the side that has more of them, so missing and needless boxes cost alike. With `thresholds` an overlap
counts as the share of these that it reaches, as in ROLL's detection reward.

    reward.boxes.target=rewards.boxes:BoxReward
    reward.boxes.args={thresholds: [0.5, 0.6, 0.7, 0.8, 0.9]}
"""

import ast
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from spmd_rl.types import AnswerInfo, Message, Prompt, Verdict

KEYS = ("bbox_2d", "bbox", "box", "position")
FENCE = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL)
LISTS = re.compile(r"\[(?:[^\[\]]|\[(?:[^\[\]]|\[[^\[\]]*\])*\])*\]|\{[^{}]*\}")
"""Lists of up to three levels, and objects"""
MAX_CHARS = 20_000
MAX_BOXES = 200
"""Largest number of boxes of an answer that are compared"""

Box = tuple[float, float, float, float]
Labelled = tuple[Box, str]


class BoxReward:
    """A rewarder with the mean overlap of the boxes, 0 to 1; `wrong_format` (0.0) for an answer without boxes."""

    def __init__(self, thresholds: Sequence[float] = ()) -> None:
        """Take `thresholds`, overlaps from 0 to 1 of which an answer's must reach many; default: the overlap itself."""
        if not all(0 < one <= 1 for one in thresholds):
            raise ValueError(f"thresholds={list(thresholds)}: each is above 0 and at most 1")
        self._thresholds = tuple(thresholds)

    def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Compare the answer's boxes with `prompt.ground_truth`. ValueError if that has none."""
        if not (truth := boxes(prompt.ground_truth)):
            raise ValueError(f"ground truth {prompt.ground_truth!r:.100} holds no box")
        found = boxes(answer.rpartition("</think>")[2])
        if not found or len(found) > MAX_BOXES:
            return Verdict("wrong_format", 0.0, {"iou": 0.0})
        overlaps = paired(truth, found)
        count = max(len(truth), len(found))
        parts = {"iou": sum(overlaps) / count, "boxes": float(len(found))}
        return Verdict("ok", sum(map(self._worth, overlaps)) / count, parts)

    def _worth(self, overlap: float) -> float:
        reached = [overlap >= one for one in self._thresholds]
        return sum(reached) / len(reached) if reached else overlap

    def cheats(self, prompt: Prompt) -> Iterator[tuple[str, str]]:
        """Yield answers that cover everything, or give many boxes."""
        yield "everything", "[[0, 0, 100000, 100000]]"
        yield "a point", "[[1, 1, 1, 1]]"
        yield "many boxes", json.dumps([[x, y, x + 50, y + 50] for x in range(0, 500, 50) for y in range(0, 500, 50)])
        yield "not a number", "[[NaN, NaN, Infinity, Infinity]]"

    @classmethod
    def examples(cls) -> Iterator[tuple[Prompt, str, float]]:
        """Yield gold and wrong answers with their scores."""
        cat = '[{"bbox_2d": [10, 10, 30, 30], "label": "cat"}]'
        for truth, answer, score in (
            ("[10, 10, 30, 30]", "It is at [10, 10, 30, 30].", 1.0),
            ("[10, 10, 30, 30]", "<think>[10, 10, 30, 30]</think>[10, 10, 30, 20]", 0.5),
            (cat, f"```json\n{cat}\n```", 1.0),
            (cat, cat.replace("cat", "dog"), 0.0),
            ("[[0, 0, 2, 2], [4, 4, 6, 6]]", "[[4, 4, 6, 6]]", 0.5),
            ("[0, 0, 2, 2]", "[[0, 0, 2, 2], [4, 4, 6, 6]]", 0.5),
            ("[0, 0, 2, 2]", "in the middle", 0.0),
        ):
            yield Prompt("0" * 32, (Message("user", "Where is it?"),), "boxes", truth), answer, score


def boxes(text: str) -> list[Labelled]:
    """Return the boxes of the last list or object in a text that has some; empty without any."""
    text = text[-MAX_CHARS:]
    for piece in reversed([*LISTS.findall(text), *FENCE.findall(text)]):
        if found := _boxes_of(_value(piece)):
            return found
    return []


def _value(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return None


def _boxes_of(value: Any) -> list[Labelled]:
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list | tuple):
        return []
    if one := _box(value):
        return [(one, "")]
    found = []
    for item in value:
        label = str(item.get("label", "")) if isinstance(item, dict) else ""
        corners = next((item[key] for key in KEYS if key in item), None) if isinstance(item, dict) else item
        if one := _box(corners):
            found.append((one, label.strip().lower()))
    return found


def _box(corners: Any) -> Box | None:
    if not isinstance(corners, list | tuple) or len(corners) != 4:
        return None
    numbers = [float(one) for one in corners if isinstance(one, int | float) and abs(one) < 1e9]
    return tuple(numbers) if len(numbers) == 4 and all(map(math.isfinite, numbers)) else None


def paired(truth: Sequence[Labelled], found: Sequence[Labelled]) -> list[float]:
    """Return the overlaps of pairs of boxes with equal labels, each box in at most one; the largest overlap first."""
    every = sorted(
        ((overlap(one, other), i, j) for i, (one, name) in enumerate(truth) for j, (other, said) in enumerate(found)
         if not name or name == said),
        reverse=True,
    )  # fmt: skip
    mine, theirs, out = set(), set(), []
    for value, i, j in every:
        if value > 0 and i not in mine and j not in theirs:
            mine.add(i)
            theirs.add(j)
            out.append(value)
    return out


def overlap(one: Box, other: Box) -> float:
    """Return the intersection over union of two boxes."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(width, 0.0) * max(height, 0.0)
    union = _area(one) + _area(other) - shared
    return shared / union if union > 0 else 0.0


def _area(box: Box) -> float:
    return max(box[2] - box[0], 0.0) * max(box[3] - box[1], 0.0)
