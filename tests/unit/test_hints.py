"""Hints in a teacher's prompt: line breaks of the template, and answers as they are."""

from array import array
from types import SimpleNamespace

import torch

from spmd_rl.learn.hints import Hints
from spmd_rl.types import Group, Message, Prompt


def test_a_line_break_is_the_templates_and_not_the_answers() -> None:
    shown = []

    def render(messages) -> array:
        shown.append(messages[-1])
        return array("i", [1])

    prompt = Prompt("a", (Message("user", "Solve it."),), "math", r"x \neq 0")
    hints = Hints({"": r"The answer:\n{answer}"}, render)
    hints(SimpleNamespace(keys=torch.tensor([[0, 0]])), [Group(prompt, 0, ())])
    assert shown[0].content[-1].text == "\n\nThe answer:\n" + r"x \neq 0"
