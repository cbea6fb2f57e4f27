"""The house rules as tests: floors, sizes, circles, late imports, what no line may say."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("spmd_rl", "rewards", "envs", "launch")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
DOORS = [ROOT / "spmd_rl" / f"{name}.py" for name in ("rlvr",)]
MAX_FILE, MAX_DOOR, MAX_FUNCTION, MAX_PROTOCOL = 400, 150, 60, 10
LONG = {
    # file or file:function -> lines allowed, with the reason
    "spmd_rl/train/base.py:TrainBackend": (10, "counters and load_counters ride with the eight verbs"),
}
BROAD_EXCEPT = {"spmd_rl/sidecar/worker.py", "spmd_rl/config/main.py"}
"""The two boundaries that record what they caught: the sidecar worker and the rank's main."""


def rel(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def functions(path: Path) -> list[tuple[str, int]]:
    return [
        (node.name, (node.end_lineno or 0) - node.lineno + 1)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_sizes() -> None:
    long = [f"{rel(p)}: {n} lines" for p in FILES if (n := len(p.read_text().splitlines())) > MAX_FILE]
    long += [f"{rel(p)}:{f}: {n} lines" for p in FILES for f, n in functions(p) if n > MAX_FUNCTION]
    long += [f"{rel(p)}: door of {n} lines" for p in DOORS if (n := len(p.read_text().splitlines())) > MAX_DOOR]
    assert not long, "\n".join(long)


def test_protocols_are_narrow() -> None:
    wide = []
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef) and any(getattr(b, "id", "") == "Protocol" for b in node.bases):
                methods = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
                if len(methods) > LONG.get(f"{rel(path)}:{node.name}", (MAX_PROTOCOL,))[0]:
                    wide.append(f"{rel(path)}:{node.name}: {len(methods)} methods")
    assert not wide, "\n".join(wide)


def _own_imports(node: ast.AST) -> list[str]:
    names = []
    for child in ast.walk(node):
        if isinstance(child, ast.ImportFrom) and child.module and child.level == 0:
            names.append(child.module)
        elif isinstance(child, ast.Import):
            names += [alias.name for alias in child.names]
    return [name for name in names if name.split(".")[0] in PACKAGES]


def test_own_imports_stand_at_the_top_except_in_run_and_build() -> None:
    late = []
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _own_imports(node):
                allowed = (path in DOORS and node.name == "run") or node.name.startswith("build")
                if not allowed:
                    late.append(f"{rel(path)}:{node.name} imports {_own_imports(node)}")
    assert not late, "\n".join(late)


def test_no_import_circles() -> None:
    modules = {rel(p)[:-3].replace("/", ".").removesuffix(".__init__"): p for p in FILES}
    edges: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = set()
        for node in tree(path).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    found.add(full if full in modules else node.module)
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        edges[name] = {f for f in found if f in modules and f != name}

    state: dict[str, int] = {}
    circles: list[str] = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        state[name] = 1
        for target in sorted(edges[name]):
            if state.get(target) == 1:
                circles.append(" -> ".join((*path[path.index(target) :], target)))
            elif target not in state:
                visit(target, (*path, target))
        state[name] = 2

    for name in modules:
        if name not in state:
            visit(name, (name,))
    assert not circles, "\n".join(circles)


@pytest.mark.parametrize(
    ("pattern", "why", "allowed"),
    [
        (r"\bimport pickle\b|\bfrom pickle\b|send_pyobj|recv_pyobj|cloudpickle", "no pickle on any wire", set()),
        (r"\b\w+_object(_list)?\(", "no pickling collectives", {"to_object("}),
        (r"\btorch\.cuda\b", "device-neutral: torch.accelerator", set()),
        (r"\bimport ray\b|\bfrom ray\b", "no controller", set()),
        (r"trust_remote_code\s*=\s*True", "remote code only when asked", set()),
        (r"\bhash\(", "Python's hash is salted", set()),
        (r"weights_only\s*=\s*False", "nothing unpickled unvouched", set()),
    ],
)
def test_no_line_says(pattern: str, why: str, allowed: set[str]) -> None:
    found = []
    for path in FILES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.split("#")[0]
            if any(match.group(0) not in allowed for match in re.finditer(pattern, code)):
                found.append(f"{rel(path)}:{number}: {line.strip()} ({why})")
    assert not found, "\n".join(found)


def test_broad_excepts_only_at_the_two_boundaries() -> None:
    found = []
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ExceptHandler):
                names = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"bare"}
                if names & {"bare", "Exception", "BaseException"} and rel(path) not in BROAD_EXCEPT:
                    found.append(f"{rel(path)}:{node.lineno}")
    assert not found, "\n".join(found)


def test_sources_are_ascii_and_open_with_a_docstring() -> None:
    bad = [f"{rel(p)}: not ASCII" for p in FILES if not p.read_text().isascii()]
    bad += [f"{rel(p)}: no docstring" for p in FILES if p.read_text().strip() and not ast.get_docstring(tree(p))]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    "module",
    ["spmd_rl.types", "spmd_rl.config", "spmd_rl.wire", "spmd_rl.sidecar", "spmd_rl.sidecar.worker", "spmd_rl.rlvr"]
    + [f"rewards.{p.stem}" for p in sorted((ROOT / "rewards").glob("*.py")) if p.stem != "__init__"],
)
def test_torch_free(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0, f"{module} imports torch"


def test_floors() -> None:
    done = subprocess.run([Path(sys.executable).with_name("lint-imports")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff() -> None:
    ruff = Path(sys.executable).with_name("ruff")
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([ruff, *command, "."], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
