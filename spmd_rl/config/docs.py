"""What a user reads about the settings, taken from `schema.py`: defaults, and the docstrings below the fields.

    for entry in entries(RlvrConfig): print(entry.key, entry.default, entry.doc)

Left out: Markdown (`reference.py`) and the command line (`main.py`).
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
    """One setting, in words."""

    key: str
    type: str
    default: str
    """As YAML; `required` where there is none."""
    doc: str


def entries(schema: type) -> Iterator[Entry]:
    """All settings of a pipeline, in order of declaration."""
    for leaf in leaves(schema):
        doc = field_docs(leaf.section).get(leaf.field.name, "")
        yield Entry(leaf.key, type_name(leaf.type), _default(leaf.field), doc)


@cache
def field_docs(section: type) -> dict[str, str]:
    """The docstring below each field of a dataclass, as one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(section)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    docs = {}
    for field, text in pairwise(body):
        said = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and said:
            docs[field.target.id] = " ".join(text.value.value.split())
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
    """Each group's options and the first comment of each file: what `group=option` may say."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted(configs.glob("*/*.yaml")):
        comments = [line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#")]
        said = next((line for line in comments if not line.startswith("@package")), "")
        found.setdefault(path.parent.name, {})[path.stem] = said
    return found
