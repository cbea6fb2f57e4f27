"""Lines that meet other ranks stand under no rank-local condition, and each says that it meets them.

These tests see names alone and not what a condition means: `if mine:` around a collective passes here and hangs in
`tests/dist`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.sources import FILES, ROOT, Function, rel, tree, words

VERBS = {
    *("gather", "broadcast", "agree", "reduce", "barrier", "exchange", "mesh", "collective", "process_group"),
}
HOLDERS = {"world", "_world", "layout", "_layout", "_data", "collectives", "_collectives", "group", "_group", "dist"}
"""What the verbs are called on; `logits.gather` is another thing."""
LOCAL = {"rank", "local_rank"}
MARK = re.compile(r"\[(all|train|generate|replica)\]")
"""The ranks that must reach a line; CONTRIBUTING.md defines the marks."""
ALLOWED: dict[str, str] = {
    # file:line of a call -> why all ranks reach it after all
}
SILENT = {
    # files that define the verbs: nearly every line of theirs is one
    "spmd_rl/distributed/collectives.py",
    "spmd_rl/distributed/world.py",
}


def meetings(path: Path) -> Iterator[tuple[ast.Call, list[ast.AST], list[Function]]]:
    """Yield each call of a verb, the conditions under or behind which it stands, and the functions around it."""
    yield from _visit(tree(path), [], [])


def _is_meeting(node: ast.AST) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in VERBS and bool(words(called.value) & HOLDERS)


def _visit(node: ast.AST, tests: list[ast.AST], around: list[Function]):
    if _is_meeting(node):
        yield node, tests, around
    if isinstance(node, Function):
        tests, around = [], [*around, node]  # a function's body runs when it is called
    for name, value in ast.iter_fields(node):
        if not isinstance(value, list):
            under = isinstance(node, ast.IfExp) and name in ("body", "orelse")
            if isinstance(value, ast.AST):
                yield from _visit(value, [*tests, node.test] if under else tests, around)
            continue
        inner = [*tests, node.test] if isinstance(node, ast.If | ast.While) else tests
        for child in value:
            if isinstance(child, ast.AST):
                yield from _visit(child, inner, around)
                if isinstance(child, ast.If) and any(isinstance(last, _LEAVES) for last in child.body):
                    inner = [*inner, child.test]  # what follows is its `else`


_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def test_no_condition_on_a_rank_around_a_meeting() -> None:
    found = [
        f"{rel(path)}:{call.lineno}: {ast.unparse(call.func)} under `{ast.unparse(test)}`"
        for path in FILES
        for call, tests, _ in meetings(path)
        for test in tests
        if words(test) & LOCAL and f"{rel(path)}:{call.lineno}" not in ALLOWED
    ]
    assert not found, "\n".join(found)


def test_each_meeting_says_so() -> None:
    """A mark is on the line, or in the docstring of the function around it."""
    found = []
    for path in FILES:
        lines = path.read_text().splitlines()
        for call, _, around in meetings(path):
            said = any(map(MARK.search, lines[call.lineno - 1 : call.end_lineno]))
            said |= any(MARK.search(ast.get_docstring(function) or "") for function in around)
            if not said and rel(path) not in SILENT:
                found.append(f"{rel(path)}:{call.lineno}: {lines[call.lineno - 1].strip()}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("body", "number"),
    [
        ("if self.rank == 0:\n    world.gather('a', 1)", 1),
        ("if rank:\n    pass\nelse:\n    world.barrier('a')", 1),
        ("if world.rank:\n    return\nworld.barrier('a')", 1),
        ("x = world.gather('a', 1) if rank else None", 1),
        ("while local_rank:\n    if a:\n        self._world.agree('a', 1)", 1),
        ("if rank:\n    def later(): world.barrier('a')", 0),
        ("if size:\n    world.barrier('a')\nlogits.gather(rank)", 0),
        ("x = world.broadcast('a', 1 if rank else 0)\nif rank:\n    return\nprint(x)", 0),
    ],
)
def test_this_test_can_fail(body: str, number: int, tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text("def f():\n" + "".join(f"    {line}\n" for line in body.splitlines()))
    assert sum(bool(words(test) & LOCAL) for _, tests, _ in meetings(path) for test in tests) == number


def test_the_verbs_are_what_the_world_offers() -> None:
    """A method of `World`, its own or inherited, that meets other ranks must be among the verbs."""
    parts = {"World": "world.py", "Collectives": "collectives.py"}
    trees = [tree(ROOT / "spmd_rl/distributed" / file) for file in parts.values()]
    methods = [f for part in trees for n in part.body if getattr(n, "name", "") in parts for f in n.body]
    said = {f.name for f in methods if isinstance(f, Function) and (ast.get_docstring(f) or "").startswith("[all]")}
    assert said - {"open", "_meet"} == VERBS
