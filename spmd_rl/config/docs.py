"""Documentation of the settings from the schema: keys, types, defaults, and the docstrings below the fields.

    for entry in entries(RlvrConfig): print(entry.key, entry.default, entry.doc)

`markdown.py` makes docs/CONFIG.md of it, and `main.py` the text of `--help`.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from spmd_rl.config.keys import leaves, type_name


@dataclass(frozen=True, slots=True)
class Entry:
    """The documentation of one setting."""

    key: str
    type: str
    default: str
    """The default as YAML; `required` where there is none"""
    doc: str


def entries(schema: type) -> Iterator[Entry]:
    """Yield all settings of a pipeline, in order of declaration."""
    for leaf in leaves(schema):
        doc = field_docs(leaf.section).get(leaf.field.name, "")
        yield Entry(leaf.key, type_name(leaf.type), _default(leaf.field), doc)


@cache
def field_docs(section: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, its own or inherited, as one line."""
    docs = {} if section.__base__ is object else dict(field_docs(section.__base__))
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0].body  # type: ignore[attr-defined]
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            docs[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return docs


def _default(field: Any) -> str:
    if field.default is not MISSING:
        value = field.default
    elif field.default_factory is not MISSING:
        value = field.default_factory()
    else:
        return "required"
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()


def options(configs: Path) -> dict[str, dict[str, str]]:
    """Return the options of each config group with the first comment of their YAML files."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted(configs.glob("*/*.yaml")):
        comments = [line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#")]
        summary = next((line for line in comments if not line.startswith("@package")), "")
        found.setdefault(path.parent.name, {})[path.stem] = summary
    return found
