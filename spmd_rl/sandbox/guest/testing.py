"""Runs tests in a process without untrusted code: each source, or each pytest-style function of it, is one test.

A stand-in for pytest offers what test rows use: `raises`, `approx`, `fixture`, `mark.parametrize`; other marks are
ignored. `unittest.TestCase` classes work too. Plug-ins and pytest's own fixtures do not.
"""

import builtins
import contextlib
import functools
import importlib
import itertools
import math
import re
import sys
import types

from spmd_rl.sandbox.guest.common import common
from spmd_rl.sandbox.guest.rpc import NotSerializable, RemoteObject


class _BadTests(Exception):
    pass


def run_tests(tests, prelude, entry, peer, exports):
    """Run all tests; return whether each passed, and why the first failed.

    `exports` says by name what kind of object the code defines.
    """
    outside = _Solution(peer, exports)
    sys.modules["solution"] = outside
    sys.modules["pytest"] = _pytest()
    base = {"__name__": "tests", "same": same, **common("\n".join([prelude, *tests]))}
    exec(prelude, base)
    passed, detail = [], ""
    for source in tests:
        for name, outcome in _each(source, dict(base), entry, outside):
            why = outcome() or ("the code is gone" if peer.gone else "")
            passed.append(not why)
            detail = detail or (why and f"{name}: {why}")
    return passed, detail


def same(left, right):
    """Return whether two values are equal. Tuples equal lists, and floats may differ in the ninth digit."""
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    if isinstance(left, float) and isinstance(right, (int, float)) and not isinstance(right, bool):
        return math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-12) or left == right
    return bool(left == right)


class _Solution(types.ModuleType):
    """The module `solution` as the tests see it."""

    def __init__(self, peer, exports):
        super().__init__("solution")
        self._peer, self._exports = peer, exports
        self.__all__ = list(exports)
        for name, (sort, *rest) in exports.items():
            if sort == "error":
                base = getattr(builtins, str(rest[0]), Exception)
                usable = isinstance(base, type) and issubclass(base, Exception)
                peer.errors[name] = type(str(name), (base if usable else Exception,), {})

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._resolve(name)

    def _resolve(self, name):
        if name in self._peer.errors:
            return self._peer.errors[name]
        if self._peer.gone:
            return RemoteObject(self._peer, 0)
        if name not in self._exports:
            raise AttributeError(f"the code defines no {name}")
        sort, *rest = self._exports[name]
        if sort == "module" and rest[0] in sys.builtin_module_names + tuple(sys.modules):
            return importlib.import_module(rest[0])
        return self._peer.unpack(rest[0])


def _each(source, namespace, entry, outside):
    """Yield each test of a source: its name, and a function that returns why it failed."""
    try:
        code = compile(source, "<tests>", "exec")
    except (SyntaxError, ValueError) as error:
        raise _BadTests(f"the tests do not compile: {error}") from None
    for name in sorted(_names(code)):
        if name == entry:
            namespace[name] = _entry(outside, name)
        elif name in outside._exports and name not in namespace and not hasattr(builtins, name):
            namespace[name] = outside._resolve(name)
    why = _why(exec, code, namespace)
    functions = [] if why else list(_functions(namespace, code))
    if not functions:
        yield "test", lambda: why
    for name, call in functions:
        yield name, lambda call=call: _why(call)


def _entry(outside, name):
    """Return the code's own object of that name, even if a builtin or the prelude has the name too."""
    try:
        return outside._resolve(name)
    except AttributeError as error:
        return functools.partial(_raise, NameError(str(error)))


def _raise(error, *args, **kwargs):
    raise error


def _names(code):
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= _names(const)
    return names


def _why(call, *args):
    """Return why a test failed, or an empty string."""
    try:
        call(*args)
    except _BadTests:
        raise
    except ImportError as error:
        if error.name not in (None, "solution"):
            raise _BadTests(f"the tests need {error.name}, which is not here") from None
        return str(error)
    except NotSerializable as error:
        raise _BadTests(str(error)) from None
    except BaseException as error:  # noqa: BLE001 - a test may fail in any way
        return f"{type(error).__name__}: {error}"
    return ""


def _functions(namespace, code):
    """Yield name and call of each pytest-style test that a source has defined."""
    for name in code.co_names:
        thing = namespace.get(name)
        if isinstance(thing, types.FunctionType) and name.startswith("test"):
            yield from _calls(name, thing, namespace)
        elif isinstance(thing, type) and thing.__module__ == "tests":
            methods = [key for key in vars(thing) if key.startswith("test")]
            for method in methods:
                if hasattr(thing, "debug"):  # a unittest.TestCase
                    yield f"{name}.{method}", thing(method).debug
                elif name.startswith("Test"):
                    yield from _calls(f"{name}.{method}", getattr(thing, method), namespace, thing)


def _calls(name, function, namespace, owner=None):
    for given in itertools.product(*getattr(function, "_cases", [])):
        values = {key: value for case in given for key, value in case.items()}

        def call(values=values):
            bound, setup = function, None
            if owner is not None:
                instance = owner()
                bound, setup = getattr(instance, function.__name__), getattr(instance, "setup_method", None)
            if setup:
                setup(*[None][: len(_needed(setup))])
            with contextlib.ExitStack() as stack:
                bound(**_arguments(bound, values, namespace, stack, {}))

        yield name + (f"[{', '.join(map(str, values))}]" if values else ""), call


def _arguments(function, values, namespace, stack, made):
    for name in _needed(function):
        if name not in values:
            if name not in made:
                fixture = namespace.get(name)
                if not getattr(fixture, "_is_fixture", False):
                    raise _BadTests(f"the tests need the fixture {name}, which is not here")
                value = fixture(**_arguments(fixture, {}, namespace, stack, made))
                if isinstance(value, types.GeneratorType):
                    generator, value = value, next(value)
                    stack.callback(next, generator, None)
                made[name] = value
            values = {**values, name: made[name]}
    return values


def _needed(function):
    """Return the names of the arguments without a default (`inspect` takes long to import)."""
    code, first = function.__code__, 1 if hasattr(function, "__self__") else 0
    return code.co_varnames[first : code.co_argcount - len(function.__defaults__ or ())]


# -- a stand-in for pytest ------------------------------------------------------------------------------------------


class _Raises:
    def __init__(self, expected, match=None):
        self.expected, self.match, self.value = expected, match, None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if error is None:
            raise AssertionError(f"nothing raised {self.expected}")
        if not isinstance(error, self.expected):
            return False
        if self.match is not None and not re.search(self.match, str(error)):
            raise AssertionError(f"{str(error)!r} does not match {self.match!r}")
        self.value, self.type = error, kind
        return True


def _raises(expected, *args, match=None, **kwargs):
    if not args:
        return _Raises(expected, match)
    with _Raises(expected) as raised:
        args[0](*args[1:], **kwargs)
    return raised


class _Approx:
    __hash__ = None

    def __init__(self, expected, rel=None, abs=None, nan_ok=False):
        self.expected, self.nan_ok = expected, nan_ok
        self.rel = 1e-6 if rel is None and abs is None else rel or 0.0
        self.abs = 1e-12 if abs is None else abs

    def __eq__(self, actual):
        return self._close(actual, self.expected)

    def _close(self, actual, expected):
        if isinstance(expected, (list, tuple)):
            return (
                isinstance(actual, (list, tuple))
                and len(actual) == len(expected)
                and all(map(self._close, actual, expected))
            )
        if isinstance(expected, dict):
            return (
                isinstance(actual, dict)
                and actual.keys() == expected.keys()
                and all(self._close(actual[key], value) for key, value in expected.items())
            )
        if expected is None or not isinstance(actual, (int, float, complex)):
            return actual == expected
        if actual != actual and expected != expected:
            return self.nan_ok
        return actual == expected or abs(actual - expected) <= max(self.rel * abs(expected), self.abs)


class _Marks:
    def __getattr__(self, name):
        def mark(*args, **kwargs):
            return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else lambda function: function

        return mark

    @staticmethod
    def parametrize(names, cases, **_):
        """Stand in for `pytest.mark.parametrize`."""
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

        def mark(function):
            rows = [dict(zip(names, case if len(names) > 1 else [case])) for case in cases]  # noqa: B905 - 3.8
            function._cases = [*getattr(function, "_cases", []), rows]
            return function

        return mark


def _fixture(function=None, **_):
    def mark(function):
        function._is_fixture = True
        return function

    return mark(function) if function else mark


def _fail(reason="", **_):
    raise AssertionError(reason)


def _pytest():
    module = types.ModuleType("pytest")
    module.raises, module.approx, module.fixture, module.fail, module.mark = _raises, _Approx, _fixture, _fail, _Marks()
    module.main = lambda *args, **kwargs: 0
    return module
