"""Comparison of model directories' vocabularies, without tokenizer libraries."""

import hashlib
import json
from pathlib import Path
from typing import Any


def difference(one: Path, other: Path) -> str:
    """Return text on tokens in which two models differ; empty if they agree, or are unreadable."""
    files = [folder / "tokenizer.json" for folder in (one, other)]
    if one == other or not all(file.is_file() for file in files):
        return _sizes(one, other)
    texts = [file.read_bytes() for file in files]
    # Equal files need no parsing.
    mine, theirs = ({}, {}) if texts[0] == texts[1] else map(_tokens, texts)
    odd = sorted(number for number in mine.keys() | theirs.keys() if mine.get(number) != theirs.get(number))
    if not odd:
        return ""
    shown = ["no token" if (token := some.get(odd[0])) is None else repr(token) for some in (theirs, mine)]
    return f"id {odd[0]} is {shown[0]} there and {shown[1]} here ({len(odd)} ids differ)"


def digest(folder: Path) -> str:
    """Return 16 hexadecimal digits over a model's tokens by id, or, if unreadable, their number."""
    file = folder / "tokenizer.json"
    known = sorted(_tokens(file.read_bytes()).items()) if file.is_file() else vocabulary_size(folder)
    return hashlib.blake2b(json.dumps(known).encode(), digest_size=8).hexdigest()


def _tokens(text: bytes) -> dict[int, str]:
    tree: dict[str, Any] = json.loads(text)
    found = tree["model"]["vocab"]
    pairs = found.items() if isinstance(found, dict) else ((token, number) for number, (token, *_) in enumerate(found))
    return {number: token for token, number in pairs} | {one["id"]: one["content"] for one in tree["added_tokens"]}


def _sizes(one: Path, other: Path) -> str:
    try:
        sizes = [vocabulary_size(folder) for folder in (other, one)]
    except (OSError, ValueError):
        return ""  # `check_model` reports this
    return "" if sizes[0] == sizes[1] else f"it has {sizes[0]} ids there and {sizes[1]} here"


def vocabulary_size(folder: Path) -> int | None:
    """Return the number of token ids in `config.json`."""
    config = json.loads((folder / "config.json").read_text())
    return (config.get("text_config") or config).get("vocab_size")
