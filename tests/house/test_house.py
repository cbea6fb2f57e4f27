"""The rules of the code as tests: floors, sizes, import circles, late imports, and what no line may say."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.sources import DOORS, FILES, PACKAGES, ROOT, Function, functions, rel, source_of, tree

MAX_FILE, MAX_DOOR, MAX_FUNCTION, MAX_PROTOCOL = 600, 60, 60, 10
BROAD_EXCEPT = {
    "spmd_rl/sidecar/worker.py": "the sidecar worker",
    "spmd_rl/base/process.py": "work in the background may raise anything: whoever waits for it gets it",
    "spmd_rl/base/targets.py": "a plug-in's import and constructor, which the checks run before the worker does",
    "spmd_rl/config/main.py": "the rank's main",
    "spmd_rl/tools/doctor/runner.py": "a check may fail in any way: it becomes a line of the doctor's table",
    "spmd_rl/rollout/episode.py": "an episode may raise anything: it becomes a verdict of its sample",
    "spmd_rl/sidecar/env_worker.py": "an environment may raise anything: it becomes the end of its session",
    "envs/tool_calls.py": "a tool may raise anything: the model reads it as the tool's reply",
    "spmd_rl/track/tokens.py": "the tokenizers library raises Exception itself: it becomes a line of the page",
    "spmd_rl/sandbox/guest/program.py": "inside the sandbox: untrusted code may raise anything",
    "spmd_rl/sandbox/guest/serve.py": "inside the sandbox: what was raised travels to the other side",
    "spmd_rl/sandbox/guest/suite.py": "inside the sandbox: the text of what a test raised may not be had",
    "spmd_rl/sandbox/guest/testing.py": "inside the sandbox: a test may fail in any way",
}
"""Files that may catch everything, because they record what they caught"""


def test_sizes() -> None:
    long = [f"{rel(p)}: {n} lines" for p in FILES if (n := len(p.read_text().splitlines())) > MAX_FILE]
    long += [
        f"{rel(p)}:{f.name}: {n} lines"
        for p in FILES
        for f in functions(p)
        if (n := f.end_lineno - f.lineno + 1) > MAX_FUNCTION
    ]
    long += [f"{rel(p)}: door of {n} lines" for p in DOORS if (n := len(p.read_text().splitlines())) > MAX_DOOR]
    assert not long, "\n".join(long)


def test_protocols_are_narrow() -> None:
    wide = []
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef) and any(getattr(b, "id", "") == "Protocol" for b in node.bases):
                methods = [n for n in node.body if isinstance(n, Function)]
                if len(methods) > MAX_PROTOCOL:
                    wide.append(f"{rel(path)}:{node.name}: {len(methods)} methods")
    assert not wide, "\n".join(wide)


def _own_imports(node: ast.AST, path: Path) -> list[str]:
    names = []
    for child in ast.walk(node):
        if isinstance(child, ast.ImportFrom):
            names.append(source_of(child, path))
        elif isinstance(child, ast.Import):
            names += [alias.name for alias in child.names]
    return [name for name in names if name.split(".")[0] in PACKAGES]


def test_own_imports_stand_at_the_top_except_in_run_and_build() -> None:
    late = []
    for path in FILES:
        for function in functions(path):
            allowed = (path in DOORS and function.name == "run") or function.name.lstrip("_").startswith("build")
            if not allowed and (imports := _own_imports(function, path)):
                late.append(f"{rel(path)}:{function.name} imports {imports}")
    assert not late, "\n".join(late)


def test_no_import_circles() -> None:
    modules = {rel(p)[:-3].replace("/", ".").removesuffix(".__init__"): p for p in FILES}
    edges: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = set()
        for node in tree(path).body:
            if isinstance(node, ast.ImportFrom):
                module = source_of(node, path)
                for alias in node.names:
                    full = f"{module}.{alias.name}"
                    found.add(full if full in modules else module)
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
    ("pattern", "why", "folder"),
    [
        (
            r"\bimport pickle\b|\bfrom pickle\b|send_pyobj|recv_pyobj|cloudpickle",
            "no pickle on any wire and in no file",
            None,
        ),
        (r"\b(?!to_object\()\w+_object(_list)?\(", "no pickling collectives", None),
        # torch 2.11 has no `torch.accelerator.Graph`.
        (
            r"\btorch\.cuda\b",
            "device-neutral: torch.accelerator",
            ("spmd_rl/train/megatron/", "spmd_rl/engine/native/decode.py"),
        ),
        (r"trust_remote_code\s*=\s*True", "remote code only when asked", None),
        (r"\bhash\(", "Python's hash is salted", None),
        (r"weights_only\s*=\s*False", "nothing unpickled unvouched", None),
    ],
)
def test_no_line_says(pattern: str, why: str, folder: str | tuple[str, ...] | None) -> None:
    """`folder` is the only place where a line may say it, or a tuple of them."""
    found = []
    for path in FILES:
        if folder and rel(path).startswith(folder):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(pattern, line.split("#")[0]):
                found.append(f"{rel(path)}:{number}: {line.strip()} ({why})")
    assert not found, "\n".join(found)


def test_broad_excepts_only_at_the_boundaries() -> None:
    found = []
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ExceptHandler):
                names = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"bare"}
                if names & {"bare", "Exception", "BaseException"} and rel(path) not in BROAD_EXCEPT:
                    found.append(f"{rel(path)}:{node.lineno}")
    assert not found, "\n".join(found)


def test_no_thread_keeps_an_interpreter_from_ending() -> None:
    """Threads are daemons; those of a pool are not, and the interpreter waits for them at its end."""
    found = []
    for path in FILES:
        for call in (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)):
            name, daemon = (
                ast.unparse(call.func).rpartition(".")[2],
                {k.arg: k.value for k in call.keywords}.get("daemon"),
            )
            if name == "ThreadPoolExecutor" or (name == "Thread" and (daemon is None or ast.unparse(daemon) != "True")):
                found.append(f"{rel(path)}:{call.lineno}")
    assert not found, "\n".join(found)


def test_sources_are_ascii_and_open_with_a_docstring() -> None:
    bad = [f"{rel(p)}: not ASCII" for p in FILES if not p.read_text().isascii()]
    bad += [f"{rel(p)}: no docstring" for p in FILES if not ast.get_docstring(tree(p))]
    assert not bad, "\n".join(bad)


def test_what_is_public_has_a_docstring() -> None:
    def silent(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
        for child in node.body:
            if isinstance(child, Function | ast.ClassDef) and not child.name.startswith("_"):
                if not ast.get_docstring(child):
                    yield f"{prefix}{child.name}"
                if isinstance(child, ast.ClassDef):
                    yield from silent(child, f"{prefix}{child.name}.")

    found = [name for path in FILES for name in silent(tree(path), f"{rel(path)}:")]
    assert not found, "\n".join(found)


def test_no_file_speaks_of_work_undone_or_of_a_tracker() -> None:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split() or [rel(path) for path in FILES]  # an unpacked archive has no git
    undone = re.compile(r"\b([T]ODO|[F]IXME|[X]XX|[H]ACK)\b|\bissue #?\d|/(issues|pull)/\d|\(#\d+\)")
    found = []
    for name in names:
        path = ROOT / name
        if path.is_file() and path.suffix not in (".png", ".gif"):
            lines = path.read_text(errors="replace").splitlines()
            found += [f"{name}:{i}: {line.strip()}" for i, line in enumerate(lines, 1) if undone.search(line)]
    assert not found, "\n".join(found)


TORCH_FREE = ["spmd_rl.types", "spmd_rl.config", "spmd_rl.sidecar", "spmd_rl.sidecar.worker"]
PLUGINS = [
    ".".join(p.relative_to(ROOT).with_suffix("").parts)
    for room in ("rewards", "envs")
    for p in sorted((ROOT / room).rglob("*.py"))
]


def test_torch_free() -> None:
    """Each alone: what one imports must not hide what another does."""
    modules = [*TORCH_FREE, "spmd_rl.rlvr", "spmd_rl.agentic", *(name for name in PLUGINS if "__" not in name)]
    code = "\n".join(
        (
            "import os, sys",
            f"for module in {modules}:",
            "    if not os.fork():",
            "        __import__(module)",
            "        os._exit('torch' in sys.modules)",
            "    if os.wait()[1]:",
            "        sys.exit(f'{module} imports torch')",
        )
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_stderr_is_written_to_by_one_function() -> None:
    """`errors.tell`, which lets nothing from outside act on a terminal."""
    found = [rel(path) for path in FILES if re.search(r"print\([^#]*file=sys\.stderr", path.read_text())]
    assert found == ["spmd_rl/sandbox/guest/program.py"], found  # inside the sandbox, where nothing of ours is


def test_floors() -> None:
    done = subprocess.run([Path(sys.executable).with_name("lint-imports")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff() -> None:
    ruff = Path(sys.executable).with_name("ruff")
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([ruff, *command, "."], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
