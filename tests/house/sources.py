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


def rooms_imported_by() -> dict[str, set[str]]:
    """The other rooms that each room of the package imports; a room is a folder or file at its top."""
    found: dict[str, set[str]] = {}
    for path in (path for path in FILES if path.parts[len(ROOT.parts)] == "spmd_rl"):
        room = path.relative_to(ROOT / "spmd_rl").parts[0].removesuffix(".py")
        if room.startswith("__"):
            continue
        sources = found.setdefault(room, set())
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom):
                module = source_of(node, path)
                names = [f"{module}.{alias.name}" for alias in node.names] if module == "spmd_rl" else [module]
            else:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            sources |= {name.split(".")[1] for name in names if name.startswith("spmd_rl.")} - {room}
    return found
