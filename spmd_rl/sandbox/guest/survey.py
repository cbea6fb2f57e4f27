"""What a source of tests needs, read from its text: the names that must be the code's, and what no plain value can do.

Tests that only compare plain values are judged with the code in another process. Those that reach into the interpreter
which they believe to share with the code (its modules, files, threads, input) would be judged wrongly there: rows with
such tests are unsupported, whatever the answer.
"""

import ast
import builtins
import importlib

from spmd_rl.sandbox.guest.common import WORD


def _words(text):
    return frozenset(text.split())


MODULES = _words(
    """
__future__ abc array asyncio base64 binascii bisect calendar cmath collections contextlib copy dataclasses datetime
decimal enum fractions functools hashlib heapq io itertools json math numbers numpy operator pprint pytest random re
secrets solution spmd_rl statistics string struct sys textwrap time timeit types typing unicodedata unittest uuid
warnings zlib
"""
)
"""Modules that work alike when the code is elsewhere."""
NAMES = _words(
    "__file__ __import__ breakpoint compile delattr dir eval exec globals help id input locals memoryview open vars"
    " ExceptionGroup BaseExceptionGroup"
)
"""Builtins that do not."""
ATTRIBUTES = _words(
    "patch mock catch_warnings warns deprecated_call gather create_task ensure_future wait_for wait timeout TaskGroup"
    " Queue Lock Event Semaphore to_thread run_in_executor as_completed shield getsource getsourcelines signature"
    " seed getstate setstate get_state set_state getcontext setcontext localcontext geterr seterr errstate"
    " get_printoptions set_printoptions printoptions"
)
"""Those of modules that do not, state of a process among them, and assertions."""
ASSERTIONS = _words("assertWarns assertWarnsRegex assertLogs assertNoLogs")
FIXTURES = _words(
    "cache caplog doctest_namespace monkeypatch pytestconfig pytester record_property recwarn testdir tmp_path"
    " tmp_path_factory tmpdir tmpdir_factory mocker"
)
"""Fixtures that reach into the process of the code, or its files."""
PLAIN_ATTRIBUTES = {"sys": _words("maxsize float_info version version_info platform path stdout stderr byteorder exit")}
TYPE_OF = "type_of_"
"""What `type` of one thing is called instead: of what stands for an object of the code it says nothing."""
OWN = "of_own_"
"""Called of the right side where objects that the tests make are compared, or members of a class: what the code's class
defines may be tested there."""
SAME = "is_same_"
"""Called in the place of `is`: equal texts and numbers may be one object over there, or several."""
FOR_PYTEST = _words("async fixture skip xfail yield pytestmark setup_module setup_function")
"""Words without which test functions that have no arguments and no decorators need nothing but to be called."""
DUNDERS = _words("__init__ __name__ __doc__ __class__")


class BadTests(Exception):
    """Raised for a mistake of the tests, which the code has no part in."""


class Survey(ast.NodeTransformer):
    """What a source needs. `reason` says why it cannot be judged by plain values; it is empty if it may be. `code` is
    what runs: in it `TYPE_OF`, `OWN` and `SAME` are called where what they stand for is asked."""

    def __init__(self, source):
        """BadTests if the source does not compile, or imports what is not here."""
        tree = _read(lambda: ast.parse(source))
        nodes = list(ast.walk(tree))
        self.words = frozenset(WORD.findall(source))
        functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        assigned = [(node.targets[0], node.value) for node in nodes if isinstance(node, ast.Assign)]
        self.imported = {name for node in nodes if _is_import_of_code(node) for name in _bound(node)}
        self.bound = {name for node in nodes for name in _bound(node)} - self.imported
        self.loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        self.called = {node.func.id for node in nodes if _is_call_of_name(node)}
        self._made, self._from_code = frozenset(), set()
        self._made = {_text(target) for target, value in assigned if self._is_made(value)}
        for target, value in assigned:  # in the order of the text, more or less
            if self._is_from_code(value):
                self._from_code.update(name for node in ast.walk(target) for name in _bound(node))
        self._modules = {name for node in nodes if isinstance(node, ast.Import) for name in _bound(node)}
        self._tried = {id(child) for node in nodes if isinstance(node, ast.Try) for child in ast.walk(node)}
        defined = classes | {node.name for node in functions}
        self.is_file_of_tests = "TestCase" in self.words or any(name.lower().startswith("test") for name in defined)
        named = [node for node in functions if node.name.startswith("test")]
        plain = [node.name for node in named if node in tree.body and not _needs_pytest(node)]
        is_plain = len({*plain}) == len(named) and not (classes or self.words & FOR_PYTEST)
        self.plain_tests = plain if is_plain else []
        self.reason = ""
        for node in nodes:
            check = getattr(self, f"_{type(node).__name__.lower()}", None)
            self.reason = self.reason or (check(node) if check else "")
        tree = ast.fix_missing_locations(self.visit(tree))
        self.code = _read(lambda: compile(tree, "<tests>", "exec"))

    def is_code(self, name):
        """Return whether a name that the tests use is the code's, as far as the text tells."""
        return name in self.imported or not (name in self.bound or hasattr(builtins, name))

    # -- why a node needs more, or an empty text, by the name of its class ------------------------------------------

    def _import(self, node):
        return next(filter(None, (self._import_reason(node, alias.name) for alias in node.names)), "")

    def _importfrom(self, node):
        if _is_import_of_code(node):
            return "the import of the code may fail" if id(node) in self._tried else ""
        names = [alias.name for alias in node.names]
        if node.module in PLAIN_ATTRIBUTES and not set(names) <= PLAIN_ATTRIBUTES[node.module]:
            return f"the tests import {', '.join(names)} of {node.module}"
        found = (self.words if names == ["*"] else set(names)) & ATTRIBUTES
        return f"the tests import {min(found)}" if found else self._import_reason(node, node.module or "")

    def _import_reason(self, node, name):
        """Return why an import needs more than values. BadTests if the module is not here."""
        top = name.split(".")[0]
        if top in MODULES and name != "unittest.mock" and top not in ("numpy", "pytest"):
            return ""
        if id(node) not in self._tried:
            try:
                importlib.import_module(name)
            except ImportError:
                raise BadTests(f"the tests need {name}, which is not here") from None
        return "" if top in ("numpy", "pytest") else f"the tests import {name}"

    def _name(self, node):
        return f"the tests use {node.id}" if node.id in NAMES and node.id not in self.bound | self.imported else ""

    def _attribute(self, node):
        owner, root, name = getattr(node.value, "id", ""), _root(node, ast.Attribute), node.attr
        if name.startswith("__") and name not in DUNDERS:
            return f"the tests use {name}"
        if owner in PLAIN_ATTRIBUTES and name not in PLAIN_ATTRIBUTES[owner]:
            return f"the tests use {owner}.{name}"
        if not isinstance(node.ctx, ast.Load) and owner in self._modules and (owner, name) != ("sys", "stdout"):
            return f"the tests replace {owner}.{name}"
        own = name in ATTRIBUTES and (root in self._modules or (root in MODULES and root not in self.bound))
        return f"the tests use {name}" if own or name in ASSERTIONS else ""

    def _constant(self, node):
        is_special = isinstance(node.value, str) and node.value[:2] == node.value[-2:] == "__" and node.value[2:-2]
        named = is_special and node.value not in DUNDERS and node.value.isidentifier()
        return f"the tests use {node.value}" if named and node.value != "__main__" else ""

    def _compare(self, node):
        """Of objects that the tests make, only equality may be that of plain values."""
        asked = [side for a, op, b in _pairs(node) for side in (a, b)[isinstance(op, _IN) :] if isinstance(op, _ODD)]
        return self._operator(*asked)

    def _binop(self, node):
        return self._operator(node.left, node.right)

    def _unaryop(self, node):
        return "" if isinstance(node.op, ast.Not) else self._operator(node.operand)

    def _operator(self, *sides):
        return "the tests use an operator of what they make" if any(map(self._is_made, sides)) else ""

    def _with(self, node):
        made = [item.context_expr for item in node.items if self._is_from_code(item.context_expr)]
        return f"the tests enter what the code returns: {ast.dump(made[0])[:80]}" if made else ""

    def _delete(self, node):
        names = [target.id for target in node.targets if getattr(target, "id", "") in self._from_code]
        return f"the tests delete {names[0]}, which the code may notice" if names else ""

    def _classdef(self, node):
        code = [base.id for base in node.bases if getattr(base, "id", "") in self.imported]
        decorators = [each for part in node.body for each in getattr(part, "decorator_list", ())]
        names = [getattr(each, "func", each) for each in decorators]
        if any(isinstance(name, ast.Name) and self.is_code(name.id) for name in names):
            return "the tests have the code decorate a method"
        return f"the tests inherit from {code[0]}" if code else ""

    def _arg(self, node):
        return f"the tests need the fixture {node.arg}" if node.arg in FIXTURES else ""

    def _match(self, node):
        return f"{type(node).__name__} needs the code's own objects"

    _trystar = _asyncfor = _asyncwith = _match

    # -- what runs in the place of a node ---------------------------------------------------------------------------

    def visit_Call(self, node):
        """Put `TYPE_OF` for `type`, and `SAME` into assertions of identity."""
        self.generic_visit(node)
        if _is_call_of_name(node) and node.func.id == "type" and len(node.args) == 1:
            node.func.id = TYPE_OF
        truth = {"assertIs": "assertTrue", "assertIsNot": "assertFalse"}.get(getattr(node.func, "attr", ""))
        if truth and len(node.args) > 1:
            node.func.attr, node.args[:2] = truth, [_call(SAME, *node.args[:2])]
        return node

    def visit_Compare(self, node):
        """Put `SAME` for `is`, and `OWN` where two objects that the tests make are compared, or members of a class."""
        self.generic_visit(node)
        for i, (a, op, b) in enumerate(_pairs(node)):
            made = isinstance(op, (ast.Eq, ast.NotEq)) and self._is_made(a) and self._is_made(b)
            if made or (isinstance(op, _ODD) and self._class_of(a) == self._class_of(b) != ""):
                node.comparators[i] = _call(OWN, b)
            fixed = [type(getattr(side, "value", 0)) in (type(None), bool, type(...)) for side in (a, b)]
            if isinstance(op, (ast.Is, ast.IsNot)) and len(node.ops) == 1 and not any(fixed):
                node.left, node.comparators = _call(SAME, a, b), [ast.Constant(True)]
        return node

    def visit_BinOp(self, node):
        """Put `OWN` where members of a class are combined."""
        self.generic_visit(node)
        if self._class_of(node.left) and self._class_of(node.right):
            node.right = _call(OWN, node.right)
        return node

    def _class_of(self, node):
        """Return the name of the code's class of which an expression seems to be a member."""
        name = getattr(node.value, "id", "") if isinstance(node, ast.Attribute) else ""
        return name if name[:1].isupper() and self.is_code(name) else ""

    def _is_from_code(self, node):
        """Return whether an expression is what the code returns, as far as the text tells."""
        root = _root(node, (ast.Call, ast.Attribute))
        return root in self._from_code or (bool(root) and self.is_code(root))

    def _is_made(self, node):
        """Return whether an expression makes an object of the code's, as names are written, or is a name of one."""
        if _is_call_of_name(node):
            return node.func.id[:1].isupper() and self.is_code(node.func.id)
        return isinstance(node, (ast.Name, ast.Attribute)) and _text(node) in self._made


_IN = ast.In, ast.NotIn
_ODD = *_IN, ast.Lt, ast.Gt, ast.LtE, ast.GtE


def _read(read):
    try:
        return read()
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadTests(f"the tests do not compile: {error}") from None


def _is_call_of_name(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def _needs_pytest(function):
    """Return whether a test function has decorators or arguments."""
    return bool(function.decorator_list) or any(isinstance(node, ast.arg) for node in ast.walk(function.args))


def _pairs(compare):
    return list(zip([compare.left, *compare.comparators], compare.ops, compare.comparators))  # noqa: B905 - Python 3.8


def _text(node):
    return ast.dump(node).replace("Store()", "Load()")


def _root(node, through):
    """Return the name with which an expression begins, if there is nothing else before its end."""
    while isinstance(node, through):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "id", "")


def _call(name, *args):
    return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), list(args), []), args[-1])


def _is_import_of_code(node):
    return isinstance(node, ast.ImportFrom) and node.module == "solution"


def _bound(node):
    """Return the names that a node binds."""
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(alias.asname or alias.name).split(".")[0] for alias in node.names]
    if isinstance(node, ast.arg):
        return [node.arg]
    name = "" if isinstance(node, ast.alias) else getattr(node, "name", "")
    return [name] if name else []
