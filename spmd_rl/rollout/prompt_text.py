"""Messages of an agent's turn, from the settings and replies of its environment."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain, cycle, zip_longest
from typing import Any

from spmd_rl.config.sections.env import ACTION_FORMATS, EnvConfig
from spmd_rl.data.prompts import with_line_breaks
from spmd_rl.types import PICTURE, EnvReply, ImagePart, Message, TextPart

Past = Sequence[tuple[EnvReply, str]]


def first_messages(env: EnvConfig, start: EnvReply, numbers: Mapping[str, int]) -> list[Message]:
    """Return the first system and user message. start: the reply to the environment's reset."""
    return [*_system(env, start), _filled(env.template, env, start, start, (), numbers)]


def fresh_messages(
    env: EnvConfig, start: EnvReply, reply: EnvReply, past: Past, numbers: Mapping[str, int]
) -> list[Message]:
    """Return a fresh prompt with the last `env.<tag>.history` turns."""
    shown = past[len(past) - min(env.history or 0, len(past)) :]
    return [*_system(env, start), _filled(env.template, env, start, reply, shown, numbers)]


def next_messages(env: EnvConfig, start: EnvReply, reply: EnvReply, numbers: Mapping[str, int]) -> list[Message]:
    """Return a conversation's next message, from a tool if there are tools, else from the role in `info`."""
    role = reply.info.get("role", "tool" if start.info.get("tools") else "user")
    if role != "user" or start.info.get("tools"):
        return [_with_pictures(role, *_marked(reply, ()))]
    return [_filled(env.next_template, env, start, reply, (), numbers)]


def _system(env: EnvConfig, start: EnvReply) -> list[Message]:
    text = with_line_breaks(env.system)
    if tools := start.info.get("tools"):
        listed = "\n".join(json.dumps(tool) for tool in tools)
        told = f"Tools that you may call:\n{listed}\n{ACTION_FORMATS['tool'].reminder}"
        text = "\n\n".join(filter(None, [text, told]))
    return [Message("system", text)] if text else []


def _filled(
    template: str, env: EnvConfig, start: EnvReply, reply: EnvReply, past: Past, numbers: Mapping[str, int]
) -> Message:
    first, named = not past and reply is start, ACTION_FORMATS.get(env.pattern_for(False))
    pictures: Sequence[bytes] = ()
    turns = []
    for before, answer in past:
        seen, pictures = _marked(before, pictures)
        turns.append(f"You saw:\n{seen}\nYou answered: {answer}")
    observation, pictures = _marked(reply, pictures)
    fields: dict[str, Any] = {
        "instruction": start.info.get("instruction", ""),
        "history": "\n".join(turns),
        "suffix": start.info.get("suffix", "") if first else "",
        "reminder": "" if start.info.get("tools") or named is None else named.reminder,
        **numbers,
        "observation": observation,
    }
    # `str.format` would fail on braces, which observations and templates may be full of.
    lines = []
    for line in with_line_breaks(template).split("\n"):
        filled = re.sub(r"\{(\w+)\}", lambda found: str(fields.get(found[1], found[0])), line)
        if filled or not line:
            lines.append(filled)
    return _with_pictures("user", "\n".join(lines), pictures)


def _marked(reply: EnvReply, before: Sequence[bytes]) -> tuple[str, Sequence[bytes]]:
    if not reply.pictures:
        return reply.observation, before
    marks = [f"\0{number}\0" for number in range(len(before), len(before) + len(reply.pictures))]
    pieces = reply.observation.split(PICTURE)
    if len(pieces) != len(marks) + 1:
        pieces = [*[""] * len(marks), reply.observation]
    return "".join(chain.from_iterable(zip_longest(pieces, marks, fillvalue=""))), (*before, *reply.pictures)


def _with_pictures(role: str, text: str, pictures: Sequence[bytes]) -> Message:
    if not pictures:
        return Message(role, text)
    parts = [
        ImagePart.of(pictures[int(piece)]) if odd else TextPart(piece)
        for piece, odd in zip(re.split(f"\0({'|'.join(map(str, range(len(pictures))))})\0", text), cycle([False, True]))
        if piece
    ]
    return Message(role, tuple(parts))
