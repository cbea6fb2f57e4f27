"""Documentation of settings from the schema: keys, types, defaults, and docstrings below fields.

    for entry in entries(RlvrConfig, build(RlvrConfig, compose("rlvr"))): print(entry.key, entry.value, entry.doc)

For `tools/docs.py` and `--help`.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from spmd_rl.config.keys import leaves, to_dict, type_name


@dataclass(frozen=True, slots=True)
class SettingEntry:
    """The documentation of one setting."""

    key: str
    type: str
    value: str
    """Value as YAML, or `required`"""
    doc: str


def entries(schema: type, cfg: Any) -> Iterator[SettingEntry]:
    """Yield a pipeline's settings with their values in `cfg`, in order of declaration.

    Defaults are shown as written, without `~` expanded.
    """
    defaults, values = to_dict(schema()), to_dict(cfg)
    for leaf in leaves(schema):
        doc = field_docs(leaf.section).get(leaf.field.name, "")
        value = _at(values, leaf.key)
        shown = _default(leaf.field) if value == _at(defaults, leaf.key) else _yaml(value)
        yield SettingEntry(leaf.key, type_name(leaf.type), shown, doc)


def _at(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name) if tree is not None else None
    return tree


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()


@cache
def field_docs(section: type) -> dict[str, str]:
    """Return each field's docstring of a dataclass and its bases, as one line."""
    docs: dict[str, str] = {}
    # Later bases first, so that earlier ones override them, as in Python's attribute lookup.
    for base in reversed(section.__bases__):
        docs |= field_docs(base) if is_dataclass(base) else {}
    # Python keeps no docstrings of attributes, so they are read from the source.
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
    return _yaml(value)


def options(configs: Path) -> dict[str, dict[str, str]]:
    """Return each config group's options, with their YAML files' first comment."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted(configs.glob("*/*.yaml")):
        comments = [line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#")]
        summary = next((line for line in comments if not line.startswith("@package")), "")
        found.setdefault(path.parent.name, {})[path.stem] = summary
    return found
