"""The decision from the text of tests if plain values are enough to judge them.

The reason begins with its subject: `process` (effects that only a process shared with the program shows), `values` (of
no plain type, or identity) or `objects` (more than methods and attributes of an object).
"""

import ast
import builtins
import importlib


def _words(text):
    return frozenset(text.split())


MODULES = _words(
    """
__future__ abc base64 binascii bisect cmath collections contextlib copy dataclasses decimal enum fractions functools
hashlib heapq itertools json math numbers operator pprint pytest random re secrets spmd_rl statistics string struct sys
textwrap time timeit typing unicodedata unittest warnings zlib
"""
)
"""Modules that tests may import: they work alike if the program is in another process, and make plain values."""
NAMES = _words(
    "__file__ __import__ breakpoint callable compile delattr dir eval exec globals help id input locals memoryview open"
    " vars ExceptionGroup BaseExceptionGroup"
)
ATTRIBUTES = _words(
    "mock patch catch_warnings warns deprecated_call redirect_stdout redirect_stderr seed getstate setstate getcontext"
    " setcontext localcontext modules stdout stderr stdin path settrace setrecursionlimit skip skipif skipUnless skipIf"
    " xfail importorskip SkipTest skipTest expectedFailure assertWarns assertWarnsRegex assertLogs assertNoLogs is_"
    " is_not"
)
FIXTURES = _words(
    "cache caplog capsys capfd capsysbinary capfdbinary doctest_namespace monkeypatch pytestconfig pytester"
    " record_property recwarn request testdir tmp_path tmp_path_factory tmpdir tmpdir_factory mocker"
)
"""Builtin functions, attributes of modules and fixtures that reach into the program's process, or its identity."""
OF_OBJECTS = _words("hasattr getattr setattr assertIsNone assertIsNotNone")
"""Functions that take an object."""
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
PASSED_ON = ast.Attribute, ast.Assign, ast.Return, ast.Yield, ast.Expr, ast.List, ast.Tuple, ast.Dict, ast.keyword
TEXT = "values: the tests want more of an exception of the program than its name"
ONE = "values: the tests ask whether two are one"


class BadTests(Exception):
    """Error for a mistake of the tests in which the program has no part."""


class Survey:
    """The `reason` why a source of tests is unsupported, `names` of the program and those that it does not import
    (`lent`), the names that it has `bound`, and its `plain_tests`.
    """

    def __init__(self, source, known=frozenset(), entry=""):
        """known: names of the source before. BadTests if it cannot compile or import."""
        try:
            tree = ast.parse(source)
            self.code = compile(tree, "<tests>", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise BadTests(f"the tests do not compile: {error}") from None
        nodes = list(ast.walk(tree))
        functions = [node for node in nodes if isinstance(node, FUNCTIONS)]
        self._find_names(nodes, functions, known, entry)
        self._find_objects(nodes, functions)
        tests = [node for node in functions if node.name.startswith("test")]
        classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        self.is_file = bool(tests) or any(name.startswith("Test") for name in classes)
        for_pytest = classes or any(node.decorator_list for node in functions) or any(map(_params, tests))
        is_plain = not for_pytest and all(node in tree.body for node in tests) and "pytestmark" not in self.bound
        self.plain_tests = [node.name for node in tests] * is_plain
        args = {node.arg for node in nodes if isinstance(node, ast.arg)}
        self._local = classes | {node.name for node in functions} - args
        parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        reasons = (self._reason(node) or self._misused(node, parents.get(node)) for node in nodes)
        self.reason = next(filter(None, reasons), "")

    def _find_names(self, nodes, functions, known, entry):
        loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        imported = {name for node in nodes if _is_import_of_program(node) for name in _bound(node)} - {"*"}
        self.bound = {name for node in nodes for name in _bound(node)} - imported
        hidden = (self.bound | known) - {entry}
        self.names = (loaded & {entry}) | imported | {name for name in loaded - hidden if not hasattr(builtins, name)}
        called = {name_of(node.func) for node in nodes if isinstance(node, ast.Call)} - hidden - NAMES - {""}
        if not self.names and len(called) == 1:
            # the program's function has the name of a builtin
            self.names = called
        self.lent = self.names - imported
        self.own = self.names | {node.args.args[0].arg for node in functions if node.name == "check" and node.args.args}

    def _find_objects(self, nodes, functions):
        columns = [column for node in functions for column in _parametrized(node)]
        self._fixed = {name for name, values in columns if all(map(_is_fixed, values))}
        compared = {id(side) for node in nodes if isinstance(node, ast.Compare) for side in _compared(node)}
        called = {name_of(node.func) for node in nodes if isinstance(node, ast.Call) and id(node) not in compared}
        self._classes = {name for name in called & self.own if name.lstrip("_")[:1].isupper()}
        self.made = set()
        for target, value in (pair for node in nodes for pair in _assigned(node)):
            self.made |= {key_of(target)} - {""} if self.makes(value) else set()

    def root(self, node):
        """Return True if a chain of calls and attributes begins with a name or an object of the program."""
        while isinstance(node, (ast.Call, ast.Attribute)) and key_of(node) not in self.made:
            node = node.func if isinstance(node, ast.Call) else node.value
        return name_of(node) in self.own or key_of(node) in self.made

    def makes(self, node):
        """Return True if an expression makes an object of a program's class, or names one."""
        return (isinstance(node, ast.Call) and name_of(node.func) in self._classes) or key_of(node) in self.made

    def _misused(self, node, parent):
        if not self.makes(node) or not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            return ""
        if isinstance(parent, ast.Compare):
            return "" if all(map(_is_identity, parent.ops)) else "objects: the tests compare one"
        if isinstance(parent, ast.Call):
            name = name_of(parent.func) or getattr(parent.func, "attr", "")
            asks = (hasattr(builtins, name) or name.startswith("assert")) and name not in OF_OBJECTS | self.bound
            return f"objects: the tests call {name} of one" if asks else ""
        return "" if isinstance(parent, PASSED_ON) else f"objects: the tests have one in a {type(parent).__name__}"

    def _reason(self, node):
        check = getattr(self, f"_{type(node).__name__.lower()}", None)
        return check(node) if check else ""

    def _import(self, node):
        names = [alias.name for alias in node.names]
        return "values: the tests have the program as a module" if "solution" in names else self._modules(names)

    def _importfrom(self, node):
        if _is_import_of_program(node):
            return ""
        if found := {alias.name for alias in node.names} & ATTRIBUTES:
            return f"process: the tests import {min(found)}"
        return self._modules([node.module or ""])

    def _modules(self, names):
        for name in names:
            try:
                importlib.import_module(name)
            except ImportError:
                raise BadTests(f"the tests need {name}, which is not here") from None
            if name.split(".")[0] not in MODULES or name == "unittest.mock":
                return f"process: the tests import {name}"
        return ""

    def _name(self, node):
        return f"process: the tests use {node.id}" if node.id in NAMES - self.bound - self.names else ""

    def _attribute(self, node):
        owner = name_of(node.value)
        if node.attr[:2] == "__":
            return f"objects: the tests use {node.attr}"
        if owner in self.names & MODULES:
            return f"process: the tests use {owner} without an import"
        reaches = node.attr in ATTRIBUTES and not self.root(node.value)
        replaces = not isinstance(node.ctx, ast.Load) and owner in MODULES & self.bound
        return f"process: the tests use {node.attr}" if reaches or replaces else ""

    def _arg(self, node):
        return f"process: the tests need the fixture {node.arg}" if node.arg in FIXTURES else ""

    def _try(self, node):
        return "process: the import of the program may fail" if any(map(_is_import_of_program, ast.walk(node))) else ""

    def _await(self, node):
        return f"values: the tests have a {type(node).__name__}"

    _asyncfunctiondef = _asyncfor = _asyncwith = _match = _trystar = _await

    def _compare(self, node):
        fixed = any(_is_fixed(side) or name_of(side) in self._fixed for side in [node.left, *node.comparators])
        return ONE if any(map(_is_identity, node.ops)) and not fixed else ""

    def _withitem(self, node):
        if node.optional_vars and any(map(self._is_own, getattr(node.context_expr, "args", ()))):
            return TEXT
        return "objects: the tests enter one" if self.root(node.context_expr) else ""

    def _excepthandler(self, node):
        return TEXT if node.name and node.type and self._is_own(node.type) else ""

    def _is_own(self, node):
        return any(name_of(each) in self.own for each in ast.walk(node))

    def _classdef(self, node):
        inherits = any(map(self.root, [*getattr(node, "bases", ()), *node.decorator_list]))
        return "values: the tests inherit from the program, or have it decorate" if inherits else ""

    _functiondef = _classdef

    def _call(self, node):
        name = name_of(node.func) or getattr(node.func, "attr", "")
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if self.root(node.func):
            names = set(map(name_of, given)) - {""}
            types = {each for each in names - self.bound - self.own if hasattr(builtins, each)}
            functions = [arg for arg in given if isinstance(arg, (ast.Lambda, ast.GeneratorExp))]
            return "values: the tests pass a function or a class" if types or functions or names & self._local else ""
        if name in ("assertIs", "assertIsNot") and not any(map(_is_fixed, given)):
            return ONE
        with_text = name == "assertRaisesRegex" or any(each.arg == "match" for each in node.keywords)
        if with_text and given and self._is_own(given[0]):
            return TEXT
        if name in ("isinstance", "issubclass") and self._is_own(node.args[-1]):
            return "objects: the tests ask for the class of one"
        return ""


def name_of(node):
    """Return the name in a node, or an empty text."""
    return node.id if isinstance(node, ast.Name) else ""


def key_of(node):
    """Return the name in a node, or of an attribute of `self`."""
    is_own = isinstance(node, ast.Attribute) and name_of(node.value) == "self"
    return f"self.{node.attr}" if is_own else name_of(node)


def _is_identity(op):
    return isinstance(op, (ast.Is, ast.IsNot))


def _is_fixed(node):
    of_type = isinstance(node, ast.Call) and name_of(node.func) == "type"
    kind = isinstance(getattr(builtins, name_of(node), None), type)
    return of_type or kind or (isinstance(node, ast.Constant) and type(node.value) in (type(None), bool))


def _compared(node):
    sides = [node.left, *node.comparators]
    literal = [all(hasattr(builtins, name_of(each)) for each in ast.walk(side) if name_of(each)) for side in sides]
    return [side for i, side in enumerate(sides) if any(literal[:i] + literal[i + 1 :])]


def _assigned(node):
    if isinstance(node, FUNCTIONS) and node.decorator_list:
        ends = [each.value for each in ast.walk(node) if isinstance(each, (ast.Return, ast.Yield))]
        return [(ast.Name(node.name, ast.Load()), end) for end in ends if end]
    if not isinstance(node, ast.Assign):
        return []
    if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
        return zip(node.targets[0].elts, node.value.elts)  # noqa: B905 - Python 3.8
    return [(target, node.value) for target in node.targets]


def _parametrized(function):
    found = []
    for node in function.decorator_list:
        if getattr(getattr(node, "func", None), "attr", "") == "parametrize" and len(node.args) > 1:
            names, rows = node.args[0], getattr(node.args[1], "elts", [ast.Name("", ast.Load())])
            names = [each.value for each in getattr(names, "elts", [names]) if isinstance(each, ast.Constant)]
            names = [name.strip() for each in names for name in str(each).split(",")]
            rows = [[row] if len(names) == 1 else getattr(row, "elts", []) for row in rows]
            found += [
                (name, [(row + [ast.Name("", ast.Load())] * 9)[i] for row in rows]) for i, name in enumerate(names)
            ]
    return found


def _params(function):
    return [*function.args.args, *function.args.kwonlyargs]


def _is_import_of_program(node):
    return isinstance(node, ast.ImportFrom) and node.module == "solution"


def _bound(node):
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(alias.asname or alias.name).split(".")[0] for alias in node.names]
    if isinstance(node, ast.arg):
        return [node.arg]
    name = "" if isinstance(node, ast.alias) else getattr(node, "name", "")
    return [name] if name else []
