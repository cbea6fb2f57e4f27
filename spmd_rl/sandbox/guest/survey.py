"""Decides from the text of tests, before any answer, whether they can be judged by plain values, and if not, why.

The reason begins with what it is about: `process` (what only a process shared with the program could show), `values`
(what is not plain, or is looked at as a reference) or `objects` (more than methods and attributes of an object).
"""

import ast
import builtins
import importlib

from spmd_rl.sandbox.guest.flow import CHANGE, Flow, key_of, name_of


def _words(text):
    return frozenset(text.split())


MODULES = _words(
    """
__future__ abc base64 binascii bisect cmath collections contextlib copy dataclasses decimal enum fractions functools
hashlib heapq itertools json math numbers operator pprint pytest random re secrets solution spmd_rl statistics string
struct sys textwrap time timeit typing unicodedata unittest warnings zlib
"""
)
"""Modules that work alike when the program is in another process, and make plain values."""
NAMES = _words(
    "__file__ __import__ breakpoint callable compile delattr dir eval exec globals help id input locals memoryview open"
    " vars ExceptionGroup BaseExceptionGroup"
)
ATTRIBUTES = _words(
    "mock patch catch_warnings warns deprecated_call redirect_stdout redirect_stderr seed getstate setstate getcontext"
    " setcontext localcontext modules stdout stderr stdin path settrace setrecursionlimit skip skipif skipUnless skipIf"
    " xfail importorskip SkipTest skipTest expectedFailure assertWarns assertWarnsRegex assertLogs assertNoLogs is_ is_not"
)
FIXTURES = _words(
    "cache caplog capsys capfd capsysbinary capfdbinary doctest_namespace monkeypatch pytestconfig pytester"
    " record_property recwarn request testdir tmp_path tmp_path_factory tmpdir tmpdir_factory mocker"
)
"""Builtin functions, attributes of modules and fixtures that reach into the process of the program, or its identity."""
ASKING = _words("hasattr getattr setattr assertIsNone assertIsNotNone assertTrue assertFalse raises append isinstance")
PLAIN = frozenset(name for kind in (str, list, dict, set, tuple, int, float, bytes) for name in dir(kind))
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
FOR_PYTEST = _words("fixture pytestmark setup_module setup_function yield")
"""Words without which test functions that have no arguments and no decorators need nothing but to be called."""


TEXT = "values: the tests want more of an exception of the program than its name"


class BadTests(Exception):
    """Raised for a mistake of the tests, which the program has no part in."""


class Survey:
    """The `reason` why a source of tests needs more than plain values, empty if it does not, and what it takes to run
    it: its `code`, the `names` that are the program's, the names that it has `bound`, and its `plain_tests`."""

    def __init__(self, source, known=frozenset(), entry=""):
        """`known`: the names of what runs before it. `entry`: one of the program's that it may hide. BadTests if the
        source does not compile, imports what is not here, or checks nothing."""
        try:
            tree = ast.parse(source)
            self.code = compile(tree, "<tests>", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise BadTests(f"the tests do not compile: {error}") from None
        self.nodes = nodes = list(ast.walk(tree))
        functions = [node for node in nodes if isinstance(node, FUNCTIONS)]
        loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        imported = {name for node in nodes if is_import_of_program(node) for name in bound(node)}
        self.bound = {name for node in nodes for name in bound(node)} - imported
        hidden = {name for name in (self.bound | known) - {entry} if name not in imported}
        self.names = (loaded & {entry}) | imported | {name for name in loaded - hidden if not hasattr(builtins, name)}
        called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        if not self.names and len(called - hidden) == 1:
            self.names = called - hidden  # the program's function has the name of a builtin
        self._lent = self.names & MODULES
        self.own = self.names | {node.args.args[0].arg for node in functions if node.name == "check" and node.args.args}
        own_tests = [node for node in functions if node.name.startswith("test")]
        classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        self.is_file = bool(own_tests) or any(name.startswith("Test") for name in classes)
        words = {word for node in nodes for word in (getattr(node, "attr", ""), getattr(node, "id", ""))}
        needs_pytest = classes or words & FOR_PYTEST or any(node.decorator_list or _params(node) for node in own_tests)
        is_plain = not needs_pytest and all(node in tree.body for node in own_tests)
        given = [param for node in functions for param in _parametrized(node)]
        self.flat = {name for name, values in given if all(map(is_constant, values))}
        self._fixed = {name for name, values in given if all(map(_is_fixed, values))}
        compared = {id(side) for node in nodes if isinstance(node, ast.Compare) for side in _compared(node)}
        calls = [node for node in nodes if isinstance(node, ast.Call) and name_of(node.func) in self.own]
        self._classes = {name_of(node.func) for node in calls if id(node) not in compared}
        self._classes = {name for name in self._classes if name.lstrip("_")[:1].isupper()}
        self.plain_tests = [node.name for node in own_tests] * is_plain
        self.made = self._made(nodes, functions)
        self.reason = next(filter(None, map(self._reason, nodes)), "") or Flow(self, tree, functions).reason

    def root(self, node):
        """Return the name with which a chain of calls and attributes begins, if that is the program's or an object."""
        while isinstance(node, (ast.Call, ast.Attribute)) and key_of(node) not in self.made:
            node = node.func if isinstance(node, ast.Call) else node.value
        return isinstance(node, ast.Name) and node.id in self.own or key_of(node) in self.made

    def makes(self, node):
        """Return whether an expression makes an object of a class of the program, or names one."""
        return (isinstance(node, ast.Call) and name_of(node.func) in self._classes) or key_of(node) in self.made

    def _made(self, nodes, functions):
        """Return the keys of the names and attributes that seem to be objects of the program."""
        self.made, odd = set(), {name_of(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr not in PLAIN}
        odd |= {name_of(node.func) for node in nodes if isinstance(node, ast.Call)} - {""}
        given = {arg.arg for node in functions for arg in _params(node)} - {"self", "cls"}
        found = odd & given - FIXTURES
        found |= {name for node in functions for name, values in _parametrized(node) if any(map(self.makes, values))}
        for _ in range(2):
            for node in nodes:
                pairs = []
                if isinstance(node, ast.Assign):
                    pairs = [(target, node.value) for target in node.targets]
                    if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                        pairs = zip(node.targets[0].elts, node.value.elts)  # noqa: B905 - Python 3.8
                elif isinstance(node, FUNCTIONS) and node.decorator_list:  # a fixture
                    ends = [each.value for each in ast.walk(node) if isinstance(each, (ast.Return, ast.Yield))]
                    pairs = [(ast.Name(node.name, ast.Load()), end) for end in ends if end]
                for target, value in pairs:
                    is_odd = name_of(target) in odd and isinstance(value, ast.Call) and self.root(value)
                    if key_of(target) and (self.makes(value) or is_odd):
                        found.add(key_of(target))
            self.made = found
        return found

    def _reason(self, node):
        check = getattr(self, f"_{type(node).__name__.lower()}", None)
        return check(node) if check else ""

    def _import(self, node):
        names = [alias.name for alias in node.names]
        return "values: the tests have the program as a module" if "solution" in names else self._modules(names)

    def _importfrom(self, node):
        names = {alias.name for alias in node.names}
        if found := names & (ATTRIBUTES | {"*"}):
            return f"process: the tests import {min(found)} of {node.module}"
        return "" if is_import_of_program(node) else self._modules([node.module or ""])

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
        return f"process: the tests use {node.id}" if node.id in NAMES and node.id not in self.bound | self.names else ""

    def _attribute(self, node):
        if node.attr[:2] == "__":
            return f"objects: the tests use {node.attr}"
        if name_of(node.value) in self._lent:
            return f"process: the tests use {node.value.id} without an import"
        module = not isinstance(node.ctx, ast.Load) and name_of(node.value) in MODULES & self.bound
        if node.attr in ATTRIBUTES and not self.root(node.value) or module:
            return f"process: the tests use {node.attr}"
        return ""

    def _arg(self, node):
        return f"process: the tests need the fixture {node.arg}" if node.arg in FIXTURES else ""

    def _try(self, node):
        return "process: the import of the program may fail" if any(map(is_import_of_program, ast.walk(node))) else ""

    def _await(self, node):
        return "values: the tests await"

    _asyncfunctiondef = _asyncfor = _asyncwith = _await

    def _compare(self, node):
        sides = [node.left, *node.comparators]
        if any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            return "" if any(_is_fixed(side) or name_of(side) in self._fixed for side in sides) else "values: the tests ask whether two are one"
        tested = sides[1:] if isinstance(node.ops[0], (ast.In, ast.NotIn)) and len(sides) == 2 else sides
        return self._operand("compare", *tested, *(sides[:1] if self.makes(sides[0]) else []))

    def _operand(self, what, *nodes):
        return f"objects: the tests {what} one" if any(map(self.makes, nodes)) else ""

    def _binop(self, node):
        return self._operand("calculate with", node.left, node.right)

    def _unaryop(self, node):
        return self._operand("calculate with", node.operand)

    def _subscript(self, node):
        if isinstance(node.ctx, ast.Load):
            return self._operand("index", node.value)
        inner = isinstance(node.value, (ast.Attribute, ast.Call)) and key_of(node.value) not in self.made and self.root(node.value)
        return "values: the tests change what the program has" if inner else self._operand("index", node.value)

    def _for(self, node):
        return self._operand("iterate over", node.iter)

    _comprehension = _for

    def _if(self, node):
        return self._operand("test the truth of", node.test)

    _while = _assert = _ifexp = _if

    def _boolop(self, node):
        return self._operand("test the truth of", *node.values)

    def _formattedvalue(self, node):
        return self._operand("format", node.value)

    def _starred(self, node):
        return self._operand("iterate over", node.value)

    def _withitem(self, node):
        call = node.context_expr
        if node.optional_vars and isinstance(call, ast.Call) and any(map(self._is_own, call.args)):
            return TEXT
        return "objects: the tests enter one" if self.root(call) else ""

    def _excepthandler(self, node):
        return TEXT if node.name and node.type and self._is_own(node.type) else ""

    def _is_own(self, node):
        return any(name_of(each) in self.own for each in ast.walk(node))

    def _delete(self, node):
        return self._operand("delete", *node.targets)

    def _classdef(self, node):
        found = any(map(self.root, (*node.bases, *(each for part in ast.walk(node) for each in getattr(part, "decorator_list", ())))))
        return "values: the tests inherit from the program, or have it decorate" if found else ""

    def _functiondef(self, node):
        return "values: the tests have the program decorate" if any(map(self.root, node.decorator_list)) else ""

    def _call(self, node):
        name = name_of(node.func) or getattr(node.func, "attr", "")
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if self.root(node.func):
            local = {each.name for each in self.nodes if isinstance(each, (*FUNCTIONS, ast.ClassDef))}
            local -= {each.arg for each in self.nodes if isinstance(each, ast.arg)}  # a fixture
            odd = [arg for arg in given if isinstance(arg, (ast.Lambda, ast.GeneratorExp)) or name_of(arg) in local]
            types = [arg for arg in given if hasattr(builtins, name_of(arg)) and name_of(arg) not in self.bound | self.own]
            return "values: the tests pass a function or a class" if odd or types else ""
        if name in ("assertIs", "assertIsNot"):
            return "" if any(map(_is_fixed, given)) else "values: the tests ask whether two are one"
        if name == "type" and len(given) != 1:
            return "process: the tests make a class"
        if name in ("raises", "assertRaisesRegex", "assertRaises") and len(given) > 1 and name_of(given[0]) in self.own:
            if name == "assertRaisesRegex" or any(each.arg == "match" for each in node.keywords):
                return TEXT
        if name in ("isinstance", "issubclass") and any(name_of(each) in self.own for each in ast.walk(node.args[-1])):
            return "objects: the tests ask for the class of one"
        if getattr(node.func, "attr", "") in CHANGE and not name_of(node.func.value) and key_of(node.func.value) not in self.made and self.root(node.func.value):
            return "values: the tests change what the program has"
        helper = name in self.bound or getattr(getattr(node.func, "value", None), "id", "") == "self" and name[:6] != "assert"
        return "" if helper or name in ASKING else self._operand(f"call {name} of", *given)


def _is_fixed(node):
    """Return whether an expression is None, True, False, a builtin type or what `type` returns."""
    of_type = isinstance(node, ast.Call) and name_of(node.func) == "type"
    kind = isinstance(getattr(builtins, name_of(node), None), type)
    return of_type or kind or (isinstance(node, ast.Constant) and type(node.value) in (type(None), bool))


def is_constant(node):
    """Return whether an expression is a number, a text, a truth or None, or a tuple of such."""
    if isinstance(node, ast.UnaryOp):
        return is_constant(node.operand)
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Tuple) and all(map(is_constant, node.elts)))


def _compared(node):
    """Return the sides of a comparison that are each compared with a literal."""
    sides = [node.left, *node.comparators]
    return [side for side in sides if any(each is not side and _is_literal(each) for each in sides)]


def _is_literal(node):
    return all(hasattr(builtins, each.id) for each in ast.walk(node) if isinstance(each, ast.Name))


def _parametrized(function):
    """Return (parameter, expressions of its values) for what `pytest.mark.parametrize` gives to a function."""
    found = []
    for node in function.decorator_list:
        if getattr(getattr(node, "func", None), "attr", "") == "parametrize" and len(node.args) > 1:
            names, rows = node.args[0], getattr(node.args[1], "elts", [])
            names = [each.value for each in getattr(names, "elts", [names]) if isinstance(each, ast.Constant)]
            names = [name.strip() for each in names for name in str(each).split(",")]
            columns = [[row] for row in rows] if len(names) == 1 else [getattr(row, "elts", []) for row in rows]
            for i, name in enumerate(names):
                found.append((name, [row[i] if i < len(row) else ast.Name("", ast.Load()) for row in columns]))
    return found


def _params(function):
    return [*function.args.args, *function.args.kwonlyargs]


def is_import_of_program(node):
    """Return whether a node imports names of the program."""
    return isinstance(node, ast.ImportFrom) and node.module == "solution"


def bound(node):
    """Return the names that a node binds."""
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(alias.asname or alias.name).split(".")[0] for alias in node.names]
    if isinstance(node, ast.arg):
        return [node.arg]
    name = "" if isinstance(node, ast.alias) else getattr(node, "name", "")
    return [name] if name else []
