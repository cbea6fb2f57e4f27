"""Makes examples of records with written answers: conversations, prompts with completions, plain texts.

    {"messages": [{"role": "user", ...}, {"role": "assistant", ...}, ...]}      every answer is trained on
    {"prompt": "2 + 2?", "completion": "4"}                                     texts, or messages on both sides
    {"text": "Once upon a time ..."}                                            trained on without a template

Parsers raise BrokenRow with a description of an invalid row.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

from spmd_rl.config.sections.data import SourcesConfig
from spmd_rl.config.sections.preference import LabelledConfig
from spmd_rl.data.fields import BrokenRow, column_names, kind, opened, parse_messages, take_text, with_tools
from spmd_rl.data.prompts import with_line_breaks
from spmd_rl.types import Conversation, Example, Message

PROMPTS = ("prompt", "question", "problem")
COMPLETIONS = ("completion", "answer", "response", "solution")


def demonstration(record: Any, cfg: SourcesConfig) -> Example:
    """Return the conversation of a row."""
    data, _ = opened(record, cfg.keys)
    completion = first_of(data, COMPLETIONS)
    if "messages" in data:
        return Example((_finished(Conversation(parse_messages(data["messages"], "messages")), data, cfg),))
    if completion:
        return Example((continued(prompt_of(data, cfg), data, completion, cfg),))
    if "text" in data:
        return Example((Conversation((Message("assistant", take_text(data, "text")),), is_plain=True),))
    raise BrokenRow(
        f"needs `messages`, a `prompt` with its `completion`, or `text`; it has {column_names(data)}: "
        "name them with data.keys.prompt=COLUMN data.keys.completion=COLUMN"
    )


def first_of(data: dict[str, Any], names: Sequence[str]) -> str:
    """Return the first name that the record has, or an empty text."""
    return next((name for name in names if name in data), "")


def prompt_of(data: dict[str, Any], cfg: SourcesConfig) -> tuple[Message, ...]:
    """Return a row's prompt: its messages, or its text in `data.format`."""
    name = first_of(data, PROMPTS)
    if not name:
        raise BrokenRow(f"needs a `prompt`; it has {column_names(data)}: set data.keys.prompt=COLUMN")
    if isinstance(data[name], list):
        return parse_messages(data[name], name)
    return (Message("user", with_line_breaks(cfg.format).replace("{question}", take_text(data, name))),)


def continued(prompt: tuple[Message, ...], data: dict[str, Any], name: str, cfg: SourcesConfig) -> Conversation:
    """Return a prompt continued by column `name`: an answer's text, or messages."""
    if isinstance(data[name], list):
        answer = parse_messages(data[name], name)
    else:
        answer = (Message("assistant", take_text(data, name)),)
    return _finished(Conversation((*prompt, *answer), len(prompt)), data, cfg)


def _finished(conversation: Conversation, data: dict[str, Any], cfg: SourcesConfig) -> Conversation:
    """Add the row's `tools`, and `data.system` if there is no system message. BrokenRow if nothing can be
    trained on.
    """
    messages, num_given = conversation.messages, conversation.num_given
    answers = [message for message in messages[num_given:] if message.role == "assistant" and message.is_learnt]
    if not answers:
        raise BrokenRow("has no message of the role `assistant` to learn from")
    if not all(answer.text.strip() or answer.fields for answer in answers):
        raise BrokenRow("has an empty message of the role `assistant`, which is not an answer; `weight: 0` skips it")
    if cfg.system is not None and all(message.role != "system" for message in messages):
        messages, num_given = (Message("system", with_line_breaks(cfg.system)), *messages), num_given + 1
    return Conversation(with_tools(messages, data.get("tools")), num_given)


SIDES = ("chosen", "rejected")


def preference(record: Any, cfg: SourcesConfig) -> Example:
    """Return the chosen and the rejected conversation of a row."""
    data, _ = opened(record, cfg.keys)
    if lacking := [side for side in SIDES if side not in data]:
        raise BrokenRow(f"needs `{lacking[0]}`; it has {column_names(data)}: set data.keys.{lacking[0]}=COLUMN")
    pair = _pair(data, cfg)
    if pair[0] == pair[1]:
        raise BrokenRow("`chosen` and `rejected` are the same")
    return Example(pair)


def ranked(record: Any, cfg: SourcesConfig) -> Example:
    """Return the pair of `preference` with the row's `margin`, by default 0."""
    margin = opened(record, cfg.keys)[0].get("margin", 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise BrokenRow(f"`margin` is {kind(margin)}, not a number")
    return Example(preference(record, cfg).conversations, (float(margin),))


def _pair(data: dict[str, Any], cfg: SourcesConfig) -> tuple[Conversation, Conversation]:
    whole = [isinstance(data[side], list) and _is_whole(data[side]) for side in SIDES]
    if first_of(data, PROMPTS) and not all(whole):
        prompt = prompt_of(data, cfg)
        chosen, rejected = (continued(prompt, data, side, cfg) for side in SIDES)
        return chosen, rejected
    if all(whole):
        chats = [parse_messages(data[side], side) for side in SIDES]
        shared = _shared(*chats)
        chosen, rejected = (_finished(Conversation(chat, shared), data, cfg) for chat in chats)
        return chosen, rejected
    texts = [take_text(data, side) for side in SIDES]
    # Only whole words are shared: a tokenizer may merge letters across a cut within a word.
    shared = len(re.match(r"(?:.*(?=\s))?", texts[0][: _shared(*texts)], re.DOTALL)[0])
    chosen, rejected = (
        Conversation((Message("user", text[:shared]), Message("assistant", text[shared:])), 1, is_plain=True)
        for text in texts
    )
    return chosen, rejected


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    differ = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def _is_whole(chat: list[Any]) -> bool:
    return bool(chat) and isinstance(chat[0], dict) and chat[0].get("role") != "assistant"


def judged(record: Any, cfg: SourcesConfig) -> Example:
    """Return an answer with a `label`, true for a good one; or both of a pair."""
    data, _ = opened(record, cfg.keys)
    if all(side in data for side in SIDES):
        return preference(record, cfg)
    completion = first_of(data, COMPLETIONS)
    if not completion or "label" not in data:
        raise BrokenRow(
            f"needs a `completion` and a `label` (true, false), or `chosen` and `rejected`; it has {column_names(data)}"
        )
    first = int(not _label(data["label"], "`label`"))
    return Example((continued(prompt_of(data, cfg), data, completion, cfg),), first=first)


def _label(value: Any, name: str) -> bool:
    if value not in (0, 1):
        said = value if isinstance(value, int | float) else kind(value)
        raise BrokenRow(f"{name} is {said}, not true or false (or 1 or 0)")
    return bool(value)


def outcome(record: Any, cfg: SourcesConfig) -> Example:
    """Return an answer with a `label`, true for a right one."""
    example = judged(record, cfg)
    if len(example.conversations) > 1:
        raise BrokenRow("is a pair: head=pairwise takes these, head=outcome a `completion` with a `label`")
    return Example(example.conversations, (1.0 - example.first,))


def process(record: Any, cfg: LabelledConfig) -> Example:
    """Return an answer in steps, `completions`, each with one of the `labels`."""
    data, _ = opened(record, cfg.keys)
    steps, labels, separator = data.get("completions"), data.get("labels"), cfg.separator
    if not (isinstance(steps, list) and isinstance(labels, list) and steps and len(steps) == len(labels)):
        raise BrokenRow(
            f"needs a list of `completions`, the steps, and as many `labels`; it has {column_names(data)}: "
            "name them with data.keys.completions=COLUMN data.keys.labels=COLUMN"
        )
    labels = [_label(label, f"`labels[{number}]`") for number, label in enumerate(labels)]
    for number, step in enumerate(steps, 1):
        if not isinstance(step, str) or not step.strip():
            raise BrokenRow(f"step {number} is not text")
        if separator in step:
            raise BrokenRow(f"step {number} contains data.separator, which divides answers into steps")
    prompt, text = prompt_of(data, cfg), separator.join(map(str.strip, steps))
    whole = _finished(Conversation((*prompt, Message("assistant", text)), len(prompt)), data, cfg)
    return Example((whole.in_steps(separator),), tuple(map(float, labels)))


KINDS = {
    "demonstration": demonstration,
    "preference": preference,
    "judged": judged,
    "ranked": ranked,
    "outcome": outcome,
    "process": process,
}
"""Parsers by a pipeline's `row_kind`"""
