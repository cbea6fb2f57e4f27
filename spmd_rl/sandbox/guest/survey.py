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


class Survey:
    """What a source needs. `reason` says why it cannot be judged by plain values; it is empty if it may be."""

    def __init__(self, source):
        """BadTests if the source does not compile, or imports what is not here."""
        tree = _read(lambda: ast.parse(source))
        self.reason = ""
        self.words = frozenset(WORD.findall(source))
        nodes = [node for node in ast.walk(tree) if type(node) in _LOOKED_AT]
        calls = [node for node in nodes if type(node) is ast.Call and type(node.func) is ast.Name]
        functions = [node for node in nodes if type(node) in (ast.FunctionDef, ast.AsyncFunctionDef)]
        self.imported = {name for node in nodes if _is_import_of_code(node) for name in _bound(node)}
        self.bound = {name for node in nodes for name in _bound(node)} - self.imported
        self.loaded = {node.id for node in nodes if type(node) is ast.Name and type(node.ctx) is ast.Load}
        self.called = {node.func.id for node in calls}
        made = [node for node in nodes if type(node) is ast.Assign and _is_construction(node.value)]
        made = [ast.unparse(node.targets[0]) for node in made if self.is_code(node.value.func.id)]
        self._made = set(made) if hasattr(ast, "unparse") else set()
        given = [node for node in nodes if type(node) is ast.Assign and type(node.value) is ast.Constant]
        texts = [node.targets[0] for node in given if isinstance(node.value.value, (str, bytes))]
        self._texts = {target.id for target in texts if type(target) is ast.Name}
        self._from_code = set()
        for node in nodes:  # in the order of the text, more or less
            if type(node) is ast.Assign and self._is_from_code(node.value):
                self._from_code.update(
                    each.id
                    for each in ast.walk(node.targets[0])
                    if type(getattr(each, "ctx", 0)) is ast.Store and type(each) is ast.Name
                )
        self._modules = {name for node in nodes if type(node) is ast.Import for name in _bound(node)}
        classes = {node.name for node in nodes if type(node) is ast.ClassDef}
        defined = classes | {node.name for node in functions}
        self.is_file_of_tests = "TestCase" in self.words or any(name.lower().startswith("test") for name in defined)
        named = [node for node in functions if node.name.startswith("test")]
        calm = [
            node
            for node in named
            if not (node.decorator_list or node.args.args or node.args.posonlyargs or node.args.kwonlyargs)
        ]
        plain = [node.name for node in tree.body if node in calm]
        is_plain = len({*plain}) == len(named) and not (classes or self.words & FOR_PYTEST)
        self.plain_tests = plain if is_plain else []
        for node in calls:
            if node.func.id == "type" and len(node.args) == 1:
                node.func.id = TYPE_OF
        for node in nodes:
            if (
                type(node) is ast.Call
                and getattr(node.func, "attr", "") in ("assertIs", "assertIsNot")
                and len(node.args) > 1
            ):
                node.func.attr = {"assertIs": "assertTrue", "assertIsNot": "assertFalse"}[node.func.attr]
                node.args[:2] = [_call(SAME, *node.args[:2])]
        tried = {id(child) for node in nodes if type(node) is ast.Try for child in ast.walk(node)}
        for node in nodes:
            check = _CHECKS.get(type(node))
            self.reason = self.reason or (check(self, node, id(node) in tried) if check else "")
        ast.fix_missing_locations(tree)
        self.code = _read(lambda: compile(tree, "<tests>", "exec"))

    def is_code(self, name):
        """Return whether a name that the tests use is the code's, as far as the text tells."""
        return name in self.imported or not (name in self.bound or hasattr(builtins, name))

    def _import(self, node, tried):
        return next(filter(None, (_import_reason(alias.name, tried) for alias in node.names)), "")

    def _importfrom(self, node, tried):
        if _is_import_of_code(node):
            return "the import of the code may fail" if tried else ""
        names = [alias.name for alias in node.names]
        if node.module in PLAIN_ATTRIBUTES and not set(names) <= PLAIN_ATTRIBUTES[node.module]:
            return f"the tests import {', '.join(names)} of {node.module}"
        found = (self.words if names == ["*"] else set(names)) & ATTRIBUTES
        return f"the tests import {min(found)}" if found else _import_reason(node.module or "", tried)

    def _name(self, node, tried):
        if node.id in NAMES and node.id not in self.bound | self.imported:
            return f"the tests use {node.id}"
        return ""

    def _attribute(self, node, tried):
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        name = node.attr
        if name.startswith("__") and name not in DUNDERS:
            return f"the tests use {name}"
        if owner in PLAIN_ATTRIBUTES and name not in PLAIN_ATTRIBUTES[owner]:
            return f"the tests use {owner}.{name}"
        if not isinstance(node.ctx, ast.Load) and owner in self._modules and (owner, name) != ("sys", "stdout"):
            return f"the tests replace {owner}.{name}"
        root = node.value
        while isinstance(root, ast.Attribute):
            root = root.value
        root = root.id if isinstance(root, ast.Name) else ""
        own = name in ATTRIBUTES and (root in self._modules or (root in MODULES and root not in self.bound))
        return f"the tests use {name}" if own or name in ASSERTIONS else ""

    def _constant(self, node, tried):
        is_special = isinstance(node.value, str) and node.value[:2] == node.value[-2:] == "__" and node.value[2:-2]
        named = is_special and node.value not in DUNDERS and node.value.isidentifier()
        return f"the tests use {node.value}" if named and node.value != "__main__" else ""

    def _operator(self, node, tried):
        """BinOp, UnaryOp, Compare: of objects that the tests make, only equality may be that of plain values, and only
        with what the code returns."""
        if type(node) is ast.Compare:
            odd = (ast.In, ast.NotIn, ast.Lt, ast.Gt, ast.LtE, ast.GtE)
            pairs = list(zip([node.left, *node.comparators], node.ops, node.comparators))  # noqa: B905 - Python 3.8
            same = [getattr(side, "id", "") for a, op, b in pairs if type(op) in (ast.Is, ast.IsNot) for side in (a, b)]
            if any(name in self._texts or type(getattr(builtins, name, None)) is type(len) for name in same):
                return "the tests ask whether a text or a builtin function is another"
            if (
                same
                and len(pairs) == 1
                and not any(
                    getattr(side, "value", 0) in (None, ...) or type(getattr(side, "value", 0)) is bool
                    for side in pairs[0][::2]
                )
            ):
                node.left = ast.copy_location(_call(SAME, node.left, node.comparators[0]), node)
                node.comparators[0] = ast.Constant(True)
            for a, op, b in pairs:
                equal = type(op) in (ast.Eq, ast.NotEq) and self._is_made(a) and self._is_made(b)
                if equal or (type(op) in odd[2:] and self._class_of(a) and self._class_of(a) == self._class_of(b)):
                    i = node.comparators.index(b)
                    node.comparators[i] = ast.copy_location(_call(OWN, b), b)
            sides = [side for a, op, b in pairs if type(op) in odd for side in (a, b)[type(op) in odd[:2] :]]
        else:
            if type(node) is ast.BinOp and self._class_of(node.left) and self._class_of(node.right):
                node.right = ast.copy_location(_call(OWN, node.right), node.right)
            sides = [node.operand] if type(node) is ast.UnaryOp else [node.left, node.right]
            sides = [] if type(getattr(node, "op", None)) is ast.Not else sides
        return "the tests use an operator of what they make" if any(map(self._is_made, sides)) else ""

    def _class_of(self, node):
        """Return the name of the code's class of which an expression seems to be a member."""
        name = getattr(getattr(node, "value", None), "id", "") if type(node) is ast.Attribute else ""
        return name if name[:1].isupper() and self.is_code(name) else ""

    def _is_from_code(self, node):
        """Return whether an expression is what the code returns, as far as the text tells."""
        while isinstance(node, (ast.Call, ast.Attribute)):
            node = node.func if isinstance(node, ast.Call) else node.value
        return isinstance(node, ast.Name) and (node.id in self._from_code or self.is_code(node.id))

    def _is_made(self, node):
        if _is_construction(node):
            return self.is_code(node.func.id)
        return isinstance(node, (ast.Name, ast.Attribute)) and bool(self._made) and ast.unparse(node) in self._made

    def _with(self, node, tried):
        made = [item.context_expr for item in node.items if self._is_from_code(item.context_expr)]
        return f"the tests enter what the code returns: {ast.dump(made[0])[:80]}" if made else ""

    def _delete(self, node, tried):
        names = [target.id for target in node.targets if type(target) is ast.Name and target.id in self._from_code]
        return f"the tests delete {names[0]}, which the code may notice" if names else ""

    def _classdef(self, node, tried):
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        code = [base for base in bases if self.is_code(base) and base in self.imported]
        decorators = [each for part in node.body for each in getattr(part, "decorator_list", ())]
        names = [getattr(each, "func", each) for each in decorators]
        if any(type(name) is ast.Name and self.is_code(name.id) for name in names):
            return "the tests have the code decorate a method"
        return f"the tests inherit from {code[0]}" if code else ""

    def _arg(self, node, tried):
        return f"the tests need the fixture {node.arg}" if node.arg in FIXTURES else ""

    def _special(self, node, tried):
        return f"{type(node).__name__} needs the code's own objects"


_CHECKS = {
    ast.Import: Survey._import,
    ast.ImportFrom: Survey._importfrom,
    ast.Name: Survey._name,
    ast.Attribute: Survey._attribute,
    ast.BinOp: Survey._operator,
    ast.Compare: Survey._operator,
    ast.Constant: Survey._constant,
    ast.Delete: Survey._delete,
    ast.UnaryOp: Survey._operator,
    ast.With: Survey._with,
    ast.ClassDef: Survey._classdef,
    ast.arg: Survey._arg,
}
_SPECIAL = "Match", "TryStar", "AsyncFor", "AsyncWith"
_CHECKS.update((getattr(ast, name), Survey._special) for name in _SPECIAL if hasattr(ast, name))
_LOOKED_AT = {*_CHECKS, ast.Assign, ast.Call, ast.FunctionDef, ast.AsyncFunctionDef, ast.ExceptHandler, ast.Try}


def _read(read):
    try:
        return read()
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadTests(f"the tests do not compile: {error}") from None


def _is_construction(node):
    """Return whether an expression makes an object of a class, as names are written."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id[:1].isupper()


def _call(name, *args):
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


def _is_import_of_code(node):
    return type(node) is ast.ImportFrom and node.module == "solution"


def _bound(node):
    """Return the names that a node binds."""
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(alias.asname or alias.name).split(".")[0] for alias in node.names]
    if isinstance(node, ast.arg):
        return [node.arg]
    name = getattr(node, "name", None)
    return [name] if name else []


def _import_reason(name, tried):
    """Return why an import needs more than values, or an empty string. BadTests if the module is not here."""
    top = name.split(".")[0]
    if top in MODULES and name != "unittest.mock" and top not in ("numpy", "pytest"):
        return ""
    if not tried:
        try:
            importlib.import_module(name)
        except ImportError:
            raise BadTests(f"the tests need {name}, which is not here") from None
    return "" if top in ("numpy", "pytest") else f"the tests import {name}"
