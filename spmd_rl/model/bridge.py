"""The bridge: the text that a chat template puts between two answers.

A model continues exactly the tokens that it sampled, so its history is never rendered again. The text between turns is
found by rendering a short artificial conversation:

    ... <|im_start|>assistant
    ANSWER <-- here --> <|im_end|>
    <|im_start|>user
    the message<|im_end|>
    <|im_start|>assistant

The text before the answer shows whether the template is append-only: renders earlier messages as the model saw them.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from spmd_rl.types import Message

QUESTION, ANSWER, THOUGHT = "a-question-of-ours", "an-answer-of-the-model", "a-thought-of-the-model"
"""Words that no template contains or changes"""


class Bridge(NamedTuple):
    """Text between an answer and the next one."""

    token_ids: array  # 'i': what ends the answer, the messages in between, and what begins the next answer
    append_only: bool
    """True if the template renders what the model saw, followed by the answer"""
    keeps_thoughts: bool
    """True if it also keeps `<think>...</think>`"""


def find_bridge(
    chat_text: Callable[[Sequence[Message]], str], encode: Callable[[str], array], messages: Sequence[Message]
) -> Bridge:
    """Return the bridge with `messages` after an answer.

    chat_text: renders a conversation up to the next answer. UserError for a template that drops messages.
    """
    question = Message("user", QUESTION)
    asked = chat_text([question])
    before, _, after = chat_text([question, Message("assistant", ANSWER), *messages]).partition(ANSWER)
    thinking = f"{THOUGHT}\n</think>\n\n{ANSWER}"
    told = chat_text([question, Message("assistant", f"<think>\n{thinking}"), *messages])
    # The template itself begins the thought, so every answer has one.
    if asked.rstrip().endswith("<think>"):
        before = told.partition(THOUGHT)[0]
    # A model samples the space that some templates put in front of an answer.
    return Bridge(encode(after), before.rstrip() == asked.rstrip(), thinking in told)
