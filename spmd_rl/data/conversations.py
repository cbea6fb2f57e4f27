"""Makes examples of records whose answers are written: conversations, prompts with completions, plain texts.

{"messages": [{"role": "user", ...}, {"role": "assistant", ...}, ...]}      every answer is learnt
{"prompt": "2 + 2?", "completion": "4"}                                     texts, or messages on both sides
{"text": "Once upon a time ..."}                                            all of it is learnt, without a template
"""

from collections.abc import Sequence
from typing import Any

from spmd_rl.config.sections.data import SourcesConfig
from spmd_rl.data.fields import BrokenRow, column_names, opened, parse_messages, take_text
from spmd_rl.data.prompts import with_line_breaks
from spmd_rl.types import Conversation, Example, Message

PROMPTS = ("prompt", "question", "problem")
COMPLETIONS = ("completion", "answer", "response", "solution")


def demonstration(record: Any, cfg: SourcesConfig) -> Example:
    """The conversation of a row. BrokenRow says what is wrong with it."""
    data, _ = opened(record, cfg.keys)
    completion = first_of(data, COMPLETIONS)
    if "messages" in data:
        return Example((_with_system(Conversation(parse_messages(data["messages"], "messages")), cfg),))
    if completion:
        return Example((continued(prompt_of(data, cfg), data, completion, cfg),))
    if "text" in data:
        return Example((Conversation((Message("assistant", take_text(data, "text")),), is_plain=True),))
    raise BrokenRow(
        f"needs `messages`, a `prompt` with its `completion`, or `text`; it has {column_names(data)}: "
        "say which is which with data.keys.prompt=COLUMN data.keys.completion=COLUMN"
    )


def first_of(data: dict[str, Any], names: Sequence[str]) -> str:
    """The first of the names that the record has; an empty text without any."""
    return next((name for name in names if name in data), "")


def prompt_of(data: dict[str, Any], cfg: SourcesConfig) -> tuple[Message, ...]:
    """The messages of a row's prompt: its own, or its text put into `data.format`."""
    name = first_of(data, PROMPTS)
    if not name:
        raise BrokenRow(f"needs a `prompt`; it has {column_names(data)}: say data.keys.prompt=COLUMN")
    if isinstance(data[name], list):
        return parse_messages(data[name], name)
    return (Message("user", with_line_breaks(cfg.format).replace("{question}", take_text(data, name))),)


def continued(prompt: tuple[Message, ...], data: dict[str, Any], name: str, cfg: SourcesConfig) -> Conversation:
    """A prompt that goes on with column `name`: the text of an answer, or messages."""
    if isinstance(data[name], list):
        answer = parse_messages(data[name], name)
    else:
        answer = (Message("assistant", take_text(data, name)),)
    return _with_system(Conversation((*prompt, *answer), len(prompt)), cfg)


def _with_system(conversation: Conversation, cfg: SourcesConfig) -> Conversation:
    """The conversation with `data.system` before it, if it has none; BrokenRow if there is nothing to learn from it."""
    messages, num_given = conversation.messages, conversation.num_given
    if all(message.role != "assistant" for message in messages[num_given:]):
        raise BrokenRow("has no message of the role `assistant` to learn from")
    if cfg.system is not None and all(message.role != "system" for message in messages):
        messages, num_given = (Message("system", with_line_breaks(cfg.system)), *messages), num_given + 1
    return Conversation(messages, num_given)


KINDS = {"demonstration": demonstration}
"""What rows are, by the name that the settings of a pipeline have for it (`row_kind`)"""
