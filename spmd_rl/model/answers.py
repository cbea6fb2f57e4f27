"""Where the answers of a whole conversation stand in what a chat template makes of it.

    header, ends = header_of(chat_text), ["<|im_end|>"]
    text, spans = answer_spans(chat_text, messages, 0, header, ends, answer_end(chat_text, ends))

A template changes what it is given: it trims answers, drops the thoughts of earlier ones, puts an empty thought before
the last one. So each answer is found by rendering the conversation once more with a known word in its place: what
stands before and after that word stands before and after the answer. A span begins where a prompt for the answer would
end, so an empty thought that the template writes is learnt; it ends with the token that ends a turn. That may be the
header of the next speaker (GLM): then the last answer ends with the header that a question would have.
"""

from collections.abc import Callable, Sequence

from spmd_rl.base.errors import UserError
from spmd_rl.model.bridge import ANSWER, QUESTION
from spmd_rl.types import Message

MOST_CHANGED = 100
"""The most characters right before an answer that may depend on it."""
ChatText = Callable[[Sequence[Message], bool], str]
"""A conversation under the template; True: up to where the next answer begins."""


def answer_spans(
    chat_text: ChatText, messages: Sequence[Message], num_given: int, header: str, ends: Sequence[str], last_end: str
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation, and where each of its answers that are learnt begins and ends, the first
    `num_given` messages left out.

    header: what stands before an answer in a prompt. ends: the texts of the tokens that end an answer. last_end: what
    ends an answer that the template leaves open. UserError for a template in which answers cannot be told from the
    rest.
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
            raise UserError(f"the model's chat template hides where the answer in message {number + 1} stands")
        closing = _closing(after, ends)
        if not (closing or after.strip()):
            text, closing = text[:end] + last_end, last_end
        end += len(closing)
        spans.append((begin, end))
        last = end
    return text, spans


def answer_end(chat_text: ChatText, ends: Sequence[str]) -> str:
    """Return what stands between an answer and a question, up to and with one of `ends`; empty without one."""
    question = Message("user", QUESTION)
    return _closing(chat_text([question, Message("assistant", ANSWER), question], False).partition(ANSWER)[2], ends)


def _closing(after: str, ends: Sequence[str]) -> str:
    ending = after.lstrip()
    token = next((token for token in ends if ending.startswith(token)), "")
    return after[: len(after) - len(ending) + len(token)] if token else ""


def _after_header(before: str, header: str, ends: Sequence[str]) -> int:
    """Where the header of the answer that follows `before` ends; at its end, if the template wrote another one."""
    begin = before.rfind(header) + len(header) if header in before else len(before)
    return len(before) if any(token in before[begin:] for token in ends) else begin


def header_of(chat_text: ChatText) -> str:
    """What the template puts before an answer in a prompt."""
    asked = [Message("user", ANSWER)]
    told = chat_text(asked, False)
    prompt = chat_text(asked, True)
    return prompt.removeprefix(told) if prompt.startswith(told) else ""
