"""The names, parameters and defaults of a vLLM, read in two ways: by `inspect` where it is installed, by `ast` from the
sources of a wheel that is only unpacked, such as the one for CUDA, which cannot be imported without a GPU's libraries.

A default is spelt alike by both: a literal, `Enum.MEMBER`, `factory`, `required`, or `?` for what is neither.
"""

import ast
import dataclasses
import enum
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

REQUIRED, FACTORY, UNKNOWN = "required", "factory", "?"
WHEELS = Path("~/.cache/spmd_rl/wheels").expanduser()
Parameters = dict[str, str]
"""Name, with `*` or `**` before it where it takes many -> default. `*` alone: what follows is given by name only."""


class Installed:
    """The one of this environment."""

    def parameters(self, path: str) -> Parameters:
        """Of a function, `Class.method`, or a class's constructor, `self` left out. KeyError where there is none."""
        target, is_method = imported(path), "." in path.partition(":")[2]
        found = list(inspect.signature(target).parameters.values())
        if is_method and not inspect.ismethod(target):
            found = found[1:]
        spelt: Parameters = {}
        for p in found:
            if p.kind == p.KEYWORD_ONLY and not any(name.startswith("*") for name in spelt):
                spelt["*"] = REQUIRED
            spelt[_stars(p.kind) + p.name] = _spell(p.default)
        return spelt

    def names(self, path: str) -> set[str]:
        """Attributes of a module or class, those of its instances among them. KeyError where there is none."""
        target = imported(path)
        if not inspect.isclass(target):
            files = (module.name for module in pkgutil.iter_modules(getattr(target, "__path__", ())))
            return {*dir(target), *getattr(target, "MODULE_ATTRS", ()), *getattr(target, "__all__", ()), *files}
        found = set(dir(target))
        for cls in target.__mro__:
            found |= set(vars(cls).get("__annotations__", {}))
            if cls.__module__.partition(".")[0] == "vllm":
                found |= _set_by(cls)
        return found

    def environment(self) -> set[str]:
        """Variables that it reads."""
        return set(imported("vllm.envs:environment_variables"))


class Unpacked:
    """The sources in a directory, which has a `vllm`."""

    def __init__(self, root: Path, edit: Callable[[str, str], str] = lambda module, text: text) -> None:
        """`edit`: what is made of a module's text before it is read."""
        self.root, self.edit = root, edit
        self.tree = cache(self._tree)

    def _tree(self, module: str) -> ast.Module:
        path = self.root.joinpath(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not file.is_file():
            raise KeyError(module)
        return _parsed(self.edit(module, file.read_text()))

    def _find(self, module: str, name: str) -> tuple[str, ast.AST]:
        """The module and node that define a name, wherever it is imported from."""
        tree = self.tree(module)
        if name in (bound := _bound(tree)):
            return module, bound[name]
        for node, alias in _imports(tree).get(name, []):
            if origin := self._origin(module, node):
                try:
                    return self._find(origin, alias)
                except KeyError:
                    return f"{origin}.{alias}", self.tree(f"{origin}.{alias}")
        return f"{module}.{name}", self.tree(f"{module}.{name}")  # a file that nobody need import

    def _origin(self, module: str, node: ast.ImportFrom) -> str | None:
        is_package = self.root.joinpath(*module.split("."), "__init__.py").is_file()
        parts = module.split(".")
        up = parts[: len(parts) - node.level + is_package] if node.level else []
        origin = ".".join([*up, node.module] if node.module else up)
        return origin if origin.partition(".")[0] == "vllm" else None

    def _bases(self, module: str, cls: ast.ClassDef) -> list[tuple[str, ast.ClassDef]]:
        """The class and those of vLLM's that it inherits from, nearest first."""
        found = [(module, cls)]
        for base in cls.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(base, ast.Name):
                try:
                    where, node = self._find(module, base.id)
                except KeyError:
                    continue
                if isinstance(node, ast.ClassDef):
                    found += self._bases(where, node)
        return found

    def _target(self, path: str) -> tuple[str, ast.AST]:
        module, _, name = path.partition(":")
        if not name:
            return module, self.tree(module)
        name, _, method = name.partition(".")
        where, node = self._find(module, name)
        if not method:
            return where, node
        for where, cls in self._bases(where, node):
            for child in cls.body:
                if getattr(child, "name", None) == method:
                    return where, child
        raise KeyError(path)

    def parameters(self, path: str) -> Parameters:
        module, node = self._target(path)
        if isinstance(node, ast.ClassDef):
            bases = self._bases(module, node)
            for where, cls in bases:
                for child in cls.body:
                    if getattr(child, "name", None) == "__init__":
                        return self._of_function(where, child, True)
            return {
                name: default for where, cls in reversed(bases) for name, default in self._fields(where, cls).items()
            }
        return self._of_function(module, node, "." in path.partition(":")[2])

    def _of_function(self, module: str, node: ast.FunctionDef, is_method: bool) -> Parameters:
        args = node.args
        plain = [*args.posonlyargs, *args.args]
        defaults = [*[None] * (len(plain) - len(args.defaults)), *args.defaults]
        static = any(getattr(decorator, "id", "") == "staticmethod" for decorator in node.decorator_list)
        found = dict(zip([arg.arg for arg in plain], defaults, strict=True))
        if is_method and not static:
            found.pop(plain[0].arg)
        spelt = {name: self._spell(module, value) for name, value in found.items()}
        if args.vararg or args.kwonlyargs:
            spelt[f"*{args.vararg.arg if args.vararg else ''}"] = REQUIRED
        pairs = zip(args.kwonlyargs, args.kw_defaults, strict=True)
        spelt |= {arg.arg: self._spell(module, value) for arg, value in pairs}
        return spelt | ({f"**{args.kwarg.arg}": REQUIRED} if args.kwarg else {})

    def _fields(self, module: str, cls: ast.ClassDef) -> Parameters:
        """Of a dataclass or struct, but those that no caller may give."""
        fields = [node for node in cls.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
        fields = [node for node in fields if not ast.unparse(node.annotation).startswith("ClassVar")]
        fields = [node for node in fields if node.value is None or "init=False" not in ast.unparse(node.value)]
        return {node.target.id: self._spell(module, node.value) for node in fields}

    def _spell(self, module: str, node: ast.expr | None) -> str:
        if node is None:
            return REQUIRED
        if isinstance(node, ast.Call):
            return self._spell_call(module, node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            try:
                where, cls = self._find(module, node.value.id)
            except KeyError:
                return UNKNOWN
            if not isinstance(cls, ast.ClassDef):
                return UNKNOWN
            if any("Enum" in ast.unparse(base) for base in cls.bases):
                return f"{cls.name}.{node.attr}"
            return self._default(where, cls, node.attr)
        if isinstance(node, ast.Name):
            try:
                where, found = self._find(module, node.id)
            except KeyError:
                return UNKNOWN
            return self._spell(where, found.value) if isinstance(found, ast.Assign | ast.AnnAssign) else UNKNOWN
        try:  # arithmetic of literals too
            return _spell(eval(compile(ast.Expression(node), "", "eval"), {"__builtins__": {}}))
        except (NameError, TypeError):
            return UNKNOWN

    def _default(self, module: str, cls: ast.ClassDef, name: str) -> str:
        for where, base in self._bases(module, cls):
            if name in (fields := self._fields(where, base)):
                return fields[name]
        return UNKNOWN

    def _spell_call(self, module: str, node: ast.Call) -> str:
        """Of `field(default=...)` and its like, or vLLM's `get_field(Class, "name")`."""
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if "default" in given or "default_factory" in given:
            return self._spell(module, given["default"]) if "default" in given else FACTORY
        if getattr(node.func, "id", "") == "get_field":
            where, cls = self._find(module, node.args[0].id)
            return self._default(where, cls, ast.literal_eval(node.args[1]))
        if getattr(node.func, "id", "") == "Field" and node.args:
            return self._spell(module, node.args[0])
        return UNKNOWN

    def names(self, path: str) -> set[str]:
        module, node = self._target(path)
        if isinstance(node, ast.Module):
            return _defined(node) | {p.stem for p in self.root.joinpath(*module.split(".")).glob("*.py")}
        return set().union(*(_defined(cls) | _set_on_self(cls) for _, cls in self._bases(module, node)))

    def environment(self) -> set[str]:
        _, node = self._find("vllm.envs", "environment_variables")
        return {ast.literal_eval(key) for key in node.value.keys if isinstance(key, ast.Constant)}


def unpacked_wheel(version: str) -> Path:
    """The Python files of PyPI's own vLLM, which is the one for CUDA; kept for the next time. Half a gigabyte once.

    OSError where it cannot be fetched.
    """
    place = WHEELS / f"vllm-{version}"
    if not place.is_dir():
        WHEELS.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--platform=manylinux_2_28_x86_64", "--platform=manylinux1_x86_64", f"--dest={WHEELS}"]
        done = subprocess.run([*command, f"vllm=={version}"], capture_output=True, text=True, timeout=1500)
        wheels = list(WHEELS.glob(f"vllm-{version}-*.whl"))
        if done.returncode or not wheels:
            raise OSError(done.stderr.strip().rpartition("\n")[2])
        draft = WHEELS / f"draft-{os.getpid()}"
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(draft, [name for name in wheel.namelist() if name.endswith(".py")])
        draft.rename(place)
        wheels[0].unlink()
    return place


@cache
def _set_by(cls: type) -> set[str]:
    """What its methods set on an instance."""
    return _set_on_self(ast.parse(textwrap.dedent(inspect.getsource(cls))))


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def _bound(tree: ast.Module) -> dict[str, ast.AST]:
    """What a module defines or assigns, by name."""
    found: dict[str, ast.AST] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for name in (getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)):
            found.setdefault(name, node)
    return found


@cache
def _imports(tree: ast.Module) -> dict[str, list[tuple[ast.ImportFrom, str]]]:
    """What it imports from elsewhere, for type checkers and in functions too, by the name that it has here."""
    found: dict[str, list[tuple[ast.ImportFrom, str]]] = {}
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            found.setdefault(alias.asname or alias.name, []).append((node, alias.name))
    return found


def imported(path: str) -> object:
    """`module`, `module:name` or `module:Class.method`. KeyError where there is none."""
    module, _, names = path.partition(":")
    try:
        target = importlib.import_module(module)
        for name in filter(None, names.split(".")):
            target = getattr(target, name) if hasattr(target, name) else importlib.import_module(f"{module}.{name}")
    except ImportError:
        raise KeyError(path) from None
    return target


def _stars(kind: inspect._ParameterKind) -> str:
    return {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(kind, "")


def _spell(value: object) -> str:
    if value is inspect.Parameter.empty:
        return REQUIRED
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is dataclasses.MISSING or "factory" in repr(value):
        return FACTORY
    return repr(value) if value is None or isinstance(value, bool | int | float | str | tuple) else UNKNOWN


def _set_on_self(node: ast.AST) -> set[str]:
    """Names that are assigned to as `self.name`."""
    found = (child for child in ast.walk(node) if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store))
    return {child.attr for child in found if getattr(child.value, "id", "") == "self"}


def _defined(node: ast.Module | ast.ClassDef) -> set[str]:
    """Names that the body binds, inside an `if` or `try` too."""
    found: set[str] = set()
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(child.name)
        elif isinstance(child, ast.If | ast.Try):
            found |= _defined(child)
        else:
            found |= {n.id for n in ast.walk(child) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            if isinstance(child, ast.Import | ast.ImportFrom):
                found |= {alias.asname or alias.name.partition(".")[0] for alias in child.names}
    return found
