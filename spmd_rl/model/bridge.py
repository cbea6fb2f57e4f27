"""The bridge between two turns: what a chat template puts between an answer of the model and its next one.

The history of a conversation is never rendered again: a model continues the very tokens that it sampled. So the text
that stands between turns is found by rendering a short conversation of our own, with a known answer in it:

    ... <|im_start|>assistant
    ANSWER <-- here --> <|im_end|>
    <|im_start|>user
    the message<|im_end|>
    <|im_start|>assistant

What follows the answer is the bridge, and what precedes it shows whether the template is append-only: whether it
renders the messages before as the model has seen it.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from spmd_rl.types import Message

QUESTION, ANSWER, THOUGHT = "a-question-of-ours", "an-answer-of-the-model", "a-thought-of-the-model"
"""Words that no template has, and none changes."""


class Bridge(NamedTuple):
    """What stands between an answer and the next one."""

    token_ids: array  # 'i': what ends the answer, the messages in between, and what begins the next answer
    append_only: bool
    """The template renders the conversation so far as it was rendered for the answer, followed by the answer."""
    keeps_thoughts: bool
    """It also leaves an answer's `<think>...</think>` where it is."""


def find_bridge(
    chat_text: Callable[[Sequence[Message]], str], encode: Callable[[str], array], messages: Sequence[Message]
) -> Bridge:
    """Return the bridge that puts `messages` after an answer.

    chat_text: a conversation under the template, up to where the next answer begins. UserError for a template that
    leaves messages out.
    """
    question = Message("user", QUESTION)
    asked = chat_text([question])
    before, _, after = chat_text([question, Message("assistant", ANSWER), *messages]).partition(ANSWER)
    thinking = f"{THOUGHT}\n</think>\n\n{ANSWER}"
    told = chat_text([question, Message("assistant", f"<think>\n{thinking}"), *messages])
    if asked.rstrip().endswith("<think>"):  # the template has begun the thought, so that every answer has one
        before = told.partition(THOUGHT)[0]
    # a model samples the space that some templates put in front of an answer
    return Bridge(encode(after), before.rstrip() == asked.rstrip(), thinking in told)
