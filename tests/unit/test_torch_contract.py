"""Every name of torch and transformers that our sources import exists in the installed versions, which are in the range
that pyproject.toml gives: a version that lacks a name must not be in it."""

import ast
import importlib
import re
from importlib.metadata import version
from inspect import signature
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from spmd_rl.model.attention import ASKS_FOR_GQA

ROOT = Path(__file__).parents[2]
LIBRARIES = ("torch", "transformers")
SOURCES = [ast.parse(path.read_text()) for path in sorted((ROOT / "spmd_rl").rglob("*.py"))]


def imported(library: str) -> list[str]:
    """Return `module:name` of all that our sources import from a library; `module:` for a whole module."""
    found = set()
    for node in (node for tree in SOURCES for node in ast.walk(tree)):
        match node:
            case ast.ImportFrom(module=str(module), names=names, level=0) if module.partition(".")[0] == library:
                found |= {f"{module}:{name.name}" for name in names}
            case ast.Import(names=names):
                found |= {f"{name.name}:" for name in names if name.name.partition(".")[0] == library}
    return sorted(found)


def exists(path: str) -> bool:
    module, _, name = path.partition(":")
    try:
        return (
            not name
            or hasattr(importlib.import_module(module), name)
            or bool(importlib.import_module(f"{module}.{name}"))
        )
    except ImportError:
        return False


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_name_that_we_import_exists(library):
    found = imported(library)
    assert len(found) > 10 and not [path for path in found if not exists(path)]


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_installed_version_is_in_the_tested_range(library):
    (line,) = re.findall(rf'^    "({library}[<>=].*)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version(library) in Requirement(line).specifier


def test_varlen_attention_asks_for_the_flag_that_we_give():
    from torch.nn.attention.varlen import varlen_attn

    assert ("enable_gqa" in signature(varlen_attn).parameters) == ASKS_FOR_GQA
