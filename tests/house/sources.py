"""The sources of the packages, read and parsed once for all tests of this folder."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from spmd_rl.config.pipelines import PIPELINES

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("spmd_rl", "rewards", "envs", "launch")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
DOORS = [ROOT / "spmd_rl" / f"{name}.py" for name in PIPELINES]

Function = ast.FunctionDef | ast.AsyncFunctionDef


def rel(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def functions(path: Path) -> Iterator[Function]:
    """Yield all functions of a file, with methods and nested ones."""
    return (node for node in ast.walk(tree(path)) if isinstance(node, Function))


def source_of(node: ast.ImportFrom, path: Path) -> str:
    """The module that a `from ... import` of this file names, whole where it is relative."""
    if not node.level:
        return node.module or ""
    package = rel(path.parents[node.level - 1]).replace("/", ".")
    return f"{package}.{node.module}" if node.module else package


def words(node: ast.AST) -> set[str]:
    """Return every name and attribute in an expression."""
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return found | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
