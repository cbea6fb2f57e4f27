"""Names as tests: one class of a name, and no class reads what another file keeps to itself."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from tests.house.sources import FILES, ROOT, rel, tree

PACKAGE = [path for path in FILES if rel(path).startswith("spmd_rl/")]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
NOT_PRIVATE = {"_replace", "_fields", "_asdict", "_make"}
"""Public methods of named tuples, whatever their names suggest."""
NOT_OURS = {"_schema", "_parameters", "_no_split_modules", "_keys_to_ignore_on_load_unexpected"}
"""Fields of objects of torch and transformers without a public twin; a class of ours has a field of the same name."""
MAX_PRIVATE_IN_TESTS = 20


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in NOT_PRIVATE


def _set_on_self(node: ast.AST) -> Iterator[str]:
    """Yield the fields that an assignment gives to `self` or `cls`; `self._n += 1` gives none."""
    targets = {ast.Assign: "targets", ast.AnnAssign: "target", ast.NamedExpr: "target", ast.For: "target"}
    if type(node) in targets:
        found = getattr(node, targets[type(node)])
        for target in found if isinstance(found, list) else [found]:
            for part in ast.walk(target):
                match part:
                    case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                        yield name


@cache
def _defined(node: ast.AST) -> frozenset[str]:
    """Private names that a file or class defines: functions, classes, fields, variables."""
    found: set[str] = set()
    for part in ast.walk(node):
        found.update(_set_on_self(part))
        match part:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(part.name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
    return frozenset(filter(_is_private, found))


def _defined_in(paths: Iterable[Path]) -> set[str]:
    return set().union(*(_defined(tree(path)) for path in paths)) - NOT_OURS


def _libraries(path: Path) -> set[str]:
    """Names in a file that stand for something which is not ours: `_world` of `distributed_c10d` is torch's."""
    found = set()
    for node in ast.walk(tree(path)):
        match node:
            case ast.Import(names=names):
                found |= {(name.asname or name.name).partition(".")[0] for name in names}
            case ast.ImportFrom(module=str(module), names=names, level=0):
                if module.partition(".")[0] not in ("spmd_rl", "rewards", "envs", "launch", "tests"):
                    found |= {name.asname or name.name for name in names}
    return found


def _inherited(path: Path) -> Iterator[tuple[ast.Attribute, frozenset[str]]]:
    """Yield each private field of `self` that a file reads, with what its class and the bases in the file define."""
    classes = {node.name: node for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)}

    def known(node: ast.ClassDef) -> frozenset[str]:
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
        names = [base.id for base in bases if isinstance(base, ast.Name) and base.id != node.name]
        return _defined(node).union(*(known(classes[name]) for name in names if name in classes))

    for node in classes.values():
        for part in ast.walk(node):
            match part:
                case ast.Attribute(value=ast.Name(id="self"), attr=name) if _is_private(name):
                    yield part, known(node)


def _foreign(path: Path, ours: set[str]) -> set[str]:
    """Where a file reads a private name that only other files of ours define."""
    known, libraries, found = _defined(tree(path)), _libraries(path), []
    of_self = {id(node): names for node, names in _inherited(path)}
    for node in ast.walk(tree(path)):
        match node:
            case ast.Attribute(attr=name) if name in ours - of_self.get(id(node), known):
                root = next(part.id for part in ast.walk(node) if isinstance(part, ast.Name))
                if root not in libraries:
                    found.append((node, ast.unparse(node)))
            case ast.ImportFrom(names=names):
                found += [(node, alias.name) for alias in names if alias.name in ours]
    return {f"{rel(path)}:{node.lineno}: {text}" for node, text in found}


def test_class_names_are_unique() -> None:
    places = defaultdict(list)
    for path in PACKAGE:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{rel(path)}:{node.lineno}")
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice, "\n".join(f"{name}: {', '.join(where)}" for name, where in sorted(twice.items()))


def test_no_file_reads_what_another_keeps_to_itself() -> None:
    ours = _defined_in(FILES)
    found = sorted(line for path in FILES for line in _foreign(path, ours))
    assert not found, "\n".join(found)


def test_tests_hardly_read_what_files_keep_to_themselves() -> None:
    ours = _defined_in([*FILES, *TESTS])
    found = sorted(line for path in TESTS for line in _foreign(path, ours))
    assert len(found) <= MAX_PRIVATE_IN_TESTS, "\n".join(found)
