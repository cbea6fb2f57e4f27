"""Rows of JSONL files, for environments with a user's own tasks."""

import json
from pathlib import Path
from typing import Any


def read_rows(path: str) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file. ValueError, which names the file, if it has none or a line is no JSON object."""
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: not an object")
            rows.append(row)
    if not rows:
        raise ValueError(f"{path}: the file has no rows")
    return rows


def split_prompt(prompt: Any) -> tuple[str, str]:
    """Return (system text, the rest) of a row's prompt: a text, chat messages or nothing."""
    if not isinstance(prompt, list):
        return "", str(prompt or "")
    system = [str(message["content"]) for message in prompt if message["role"] == "system"]
    rest = [str(message["content"]) for message in prompt if message["role"] != "system"]
    return "\n\n".join(system), "\n\n".join(rest)
