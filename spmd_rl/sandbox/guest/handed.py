"""Functions, iterators and exceptions of the tests that the code is handed: each crosses as a number.

The code gets a function with the same parameters, or a generator, whose call or next item is asked of the tests' side
while that waits for its answer: it runs there. So the code can do with it what it can in one process: call it with
plain values and its own objects while the tests call the code. It can name nothing that it was not handed.
"""

import builtins
import functools
import importlib
import types

from spmd_rl.sandbox.guest import values

DEPTH = 250  # calls of the code within calls of the tests within ...
FRAMES = 5000  # all of theirs
COROUTINES = 0x80 | 0x200  # the flags of an `async def`, with and without `yield`
_REACHING = {"getattr", "setattr", "delattr", "type", "super", "vars", "dir", "object"}


class Handed:
    """The tests' side: what was handed over, by number."""

    def __init__(self):
        self._things, self._nodes, self._numbers = [], [], {}

    def node(self, value):
        """Return the node of a function, an iterator or an exception of the tests; None of anything else."""
        key = (id(value.__self__), id(value.__func__)) if type(value) is types.MethodType else id(value)
        if key not in self._numbers and (said := self._described(value)):
            self._numbers[key] = len(self._things)
            self._nodes.append(["handed", len(self._things), *said])
            self._things.append(value)
        return self._nodes[self._numbers[key]] if key in self._numbers else None

    def thing(self, number, *_):
        """Return what was handed over under a number. LookupError if nothing was."""
        if type(number) is not int or number < 0:
            raise LookupError(number)
        return self._things[number]

    def use(self, number, verb, args, names):
        """Do what the code asks: call a function, or go on with an iterator."""
        thing = self.thing(number)
        if self._nodes[number][2] == "error":
            raise LookupError(number)
        if verb in ("next", "copy"):
            return next(thing) if verb == "next" else importlib.import_module("copy").copy(thing)
        if verb == "throw" and not isinstance(args[0], Exception):  # nothing else crosses
            raise SystemExit(f"the code throws {args[0]!r} into a generator of the tests")
        if verb in ("send", "throw", "close"):
            return getattr(thing, verb)(*args)
        split = len(args) - len(names)
        return thing(*args[:split], **dict(zip(map(str, names), args[split:])))  # noqa: B905 - Python 3.8

    def _described(self, value):
        kind = type(value)
        if _is_own(value):
            head, given = _parameters(value)
            name = getattr(value, "__name__", kind.__name__)
            return "function", name, value.__doc__ if kind is not functools.partial else None, head, given
        if hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools"):
            return "iterator", kind is types.GeneratorType
        if isinstance(value, Exception):
            base = next(base for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base)
            plain = values.SCALARS.issuperset(map(type, value.args))
            return "error", kind.__name__, base.__name__, list(value.args) if plain else [str(value)]
        return None


def _parameters(function):
    """Return the parameters of a function as text, and how they are passed on."""
    inspect = importlib.import_module("inspect")
    try:
        parameters, passed = list(inspect.signature(function).parameters.values()), []
    except (TypeError, ValueError):  # of a builtin
        return "(*args, **kwargs)", "*args, **kwargs"
    for i, each in enumerate(parameters):
        if each.default is not each.empty and type(each.default) not in values.SCALARS:
            return "(*args, **kwargs)", "*args, **kwargs"
        passed.append(("{0}", "{0}", "*{0}", "{0}={0}", "**{0}")[each.kind].format(each.name))
        known = getattr(each.annotation, "__module__", "") == "builtins" and type(each.annotation) is type
        parameters[i] = each if known else each.replace(annotation=each.empty)
    return str(inspect.Signature(parameters)), ", ".join(passed)


def _is_own(value):
    """Return whether a value is a function that the tests have written, or a method or partial of one."""
    if type(value) is types.MethodType:
        return _is_own(value.__func__)
    if type(value) is functools.partial:
        known = type(value.func) in (type, type(len)) and getattr(builtins, value.func.__name__, None) is value.func
        return _is_own(value.func) or (known and value.func.__name__ not in _REACHING)
    if type(value) is not types.FunctionType or value.__code__.co_flags & COROUTINES:
        return False
    return value.__globals__.get("__name__", "tests") in ("tests", "__main__")


def _asking(verb):
    def asking(self, *given):
        return self.ask(verb, [it() if verb == "throw" and isinstance(it, type) else it for it in given[:1]])

    return asking


_METHODS = {"__iter__": lambda self: self, "__next__": _asking("next"), "__copy__": _asking("copy")}
_Iterator = type("iterator", (), _METHODS)
"""An iterator of the tests, whose `ask` asks for what is done with it."""
_Generator = type("generator", (_Iterator,), {verb: _asking(verb) for verb in ("send", "throw", "close")})


class Stubs:
    """The code's side: what stands for the tests' things. `ask(number, verb, args, kwargs)` asks the tests' side."""

    def __init__(self, ask, namespace):
        self._ask, self._namespace = ask, namespace
        self._things, self._numbers = {}, {}

    def node(self, value):
        """Return the node of a thing of the tests that goes back to them; None of anything else."""
        number = self._numbers.get(id(value))
        changed = type(value) is types.FunctionType and vars(value)
        return None if number is None or changed else ["handed", number]

    def thing(self, number, sort, *said):
        """Return what stands for a thing of the tests."""
        if number not in self._things:
            made = self._things[number] = getattr(self, f"_{sort}")(number, *said)
            self._numbers[id(made)] = number
        return self._things[number]

    def _function(self, number, name, doc, head, given):
        names = {"inf": float("inf"), "nan": float("nan"), "__name__": "tests"}
        names["_call"] = lambda *args, **kwargs: self._ask(number, "call", args, kwargs)
        exec(f"def stub{head}: return _call({given})", names)
        stub = names["stub"]
        stub.__name__, stub.__qualname__, stub.__doc__ = name, name, doc
        return stub

    def _iterator(self, number, is_generator):
        made = _Generator() if is_generator else _Iterator()
        made.ask = lambda verb, given: self._ask(number, verb, given, {})
        return made

    def _error(self, number, name, base, args):
        known = self._namespace.get(name)
        is_known = isinstance(known, type) and issubclass(known, BaseException)
        kind = known if is_known else type(name, (getattr(builtins, base),), {"__module__": "tests"})
        error = kind.__new__(kind, *args)
        error.args = tuple(args)
        return error
