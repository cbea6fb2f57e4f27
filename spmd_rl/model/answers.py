"""Spans of answers in a conversation's templated text.

Templates trim answers, drop earlier thoughts, add an empty thought before the last one. So each answer is located by
rendering again with a known word in its place. A span begins where a prompt for the answer would end, so a template's
empty thought is learnt; it ends with the token that ends a turn. If that is the next speaker's header (GLM), the last
answer ends with a question's.
"""

from collections.abc import Callable, Sequence

from spmd_rl.base.errors import UserError
from spmd_rl.model.bridge import ANSWER, QUESTION
from spmd_rl.types import Message

MOST_CHANGED = 100
"""Most characters directly before an answer that may depend on it"""
ChatText = Callable[[Sequence[Message], bool], str]
"""Function from a conversation to its templated text; True: up to where the next answer begins"""


def answer_spans(
    chat_text: ChatText, messages: Sequence[Message], num_given: int, header: str, ends: Sequence[str], last_end: str
) -> tuple[str, list[tuple[int, int]]]:
    """Return a conversation's text, and the spans of learnt answers after the first `num_given` messages.

    header: text before an answer in a prompt. ends: texts of tokens that end an answer. last_end: end of an answer left
    open. UserError for a template in which answers cannot be located.
    """
    text, spans, last = chat_text(messages, False), [], 0
    for number, message in enumerate(messages):
        if number < num_given or message.role != "assistant" or not message.is_learnt:
            continue
        marked = [*messages[:number], message.saying(ANSWER), *messages[number + 1 :]]
        before, _, after = chat_text(marked, False).partition(ANSWER)
        begin = _after_header(before, header, ends)
        begin = next((b for b in range(begin, max(-1, begin - MOST_CHANGED), -1) if text.startswith(before[:b])), -1)
        end = len(text) - len(after)
        if not last <= begin <= end or not text.endswith(after):
            raise UserError(
                f"the answer in message {number + 1} cannot be located in the text of the model's chat template"
            )
        closing = _closing(after, ends)
        if not (closing or after.strip()):
            text, closing = text[:end] + last_end, last_end
        end += len(closing)
        spans.append((begin, end))
        last = end
    return text, spans


def answer_end(chat_text: ChatText, ends: Sequence[str]) -> str:
    """Return the text between an answer and a question, up to one of `ends`; empty without one."""
    question = Message("user", QUESTION)
    return _closing(chat_text([question, Message("assistant", ANSWER), question], False).partition(ANSWER)[2], ends)


def _closing(after: str, ends: Sequence[str]) -> str:
    ending = after.lstrip()
    token = next((token for token in ends if ending.startswith(token)), "")
    return after[: len(after) - len(ending) + len(token)] if token else ""


def _after_header(before: str, header: str, ends: Sequence[str]) -> int:
    """Return the end of the answer's header after `before`, or its last position after another header."""
    begin = before.rfind(header) + len(header) if header in before else len(before)
    return len(before) if any(token in before[begin:] for token in ends) else begin


def header_of(chat_text: ChatText) -> str:
    """Return the template's text before an answer in a prompt."""
    asked = [Message("user", ANSWER)]
    told = chat_text(asked, False)
    prompt = chat_text(asked, True)
    return prompt.removeprefix(told) if prompt.startswith(told) else ""
