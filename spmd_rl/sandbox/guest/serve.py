"""The code's side of a check: it executes the code as the module `solution` and answers the questions of its tests.

A question is [verb, references, names, nodes, gone], the references being to the target and what it is given, `gone`
the numbers of containers that the tests no longer have:

| verb | what is asked |
|---|---|
| call | call the target with the rest; the last of it are keyword arguments, by `names` |
| get | the attribute `names[0]` of the target |
| set | set that attribute |
| value | the target, which may have a plain form |
| type | the class of the target |
| next, send, throw, close | the next item of an iterator; what generators have beside |
| isinstance, issubclass | whether the target is among the classes of the other |
| len, iter, getitem, setitem, delitem, str, repr, format | that of the target |
| copy, deepcopy, replace | a copy of the target, with other fields by `names` |

An answer is [sort, references, texts, nodes, printed]. `sort`: `=` a value; `!` an exception and its arguments, as
`CodeServer.described` says; `~=` and `~!` the same of a
coroutine; `end` the end of an iterator; `refused` why there is no answer. `printed`: to standard output, and to
standard error. The nodes of both have the `shared` containers that have changed too.

Before it answers, the code may have the tests call what they have `handed` it: [`?`, references to the arguments,
[number, `call` or `send`, names], nodes, ...]. The reply to that has the form of a question, `returns` or `raises`,
or `ended`, if the test has failed meanwhile, and what the tests' function has printed for names. Before it replies, the
tests' side may ask other questions.

Before the first question it says `ready`, and of the classes of the code which are exceptions, and which have objects
that are nothing but their fields.
"""

import collections
import copy
import dataclasses
import enum
import functools
import importlib
import io
import operator
import sys
import threading
import types
from contextlib import redirect_stderr, redirect_stdout, suppress

from spmd_rl.sandbox.guest import values
from spmd_rl.sandbox.guest.classes import (
    compared,
    fields_of,
    is_generated,
    keeps_fields,
    operators_of,
    plain_of,
    same_code,
    traits,
)
from spmd_rl.sandbox.guest.common import execute
from spmd_rl.sandbox.guest.handed import FRAMES, Stubs
from spmd_rl.sandbox.guest.link import Gone, Link
from spmd_rl.sandbox.guest.shared import Shared

_Missing = type("_Missing", (Exception,), {})
MAX_TEXT = 100_000  # characters of what an exception says
STREAM = "next", "send", "throw", "close"
VERBS = {name: getattr(operator, name) for name in ("getitem", "setitem", "delitem")}
VERBS.update({kind.__name__: kind for kind in (len, iter, next, str, repr, format, type)})
VERBS.update(get=getattr, set=setattr, value=lambda it: it)
VERBS.update({name: getattr(types.GeneratorType, name) for name in STREAM[1:]})
VERBS.update(copy=copy.copy, deepcopy=copy.deepcopy, replace=lambda it, *said: dataclasses.replace(it, **_pairs(said)))
VERBS.update(isinstance=lambda kind, it: kind in type(it).__mro__, issubclass=lambda kind, it: kind in it.__mro__)


def _pairs(said):
    return dict(zip(said[: len(said) // 2], said[len(said) // 2 :]))  # noqa: B905 - Python 3.8


def serve(job, rpc):
    """Execute the code and answer its tests until they hang up."""
    link = Link(rpc, job["message_bytes"])
    with suppress(Gone):
        try:
            namespace = execute(job, "solution")
            server = CodeServer(link, namespace)
            told = classes_of(namespace, server)
            link.send(["ready", *values.encode(told, server.node)])
        except Gone:
            raise
        except BaseException as error:  # noqa: BLE001 - untrusted code
            link.send(["failed", f"{type(error).__name__}: {error}"[:1000]])
            return
        while True:
            server.answer(link.receive())


class CodeServer:
    """Answers questions. It keeps each object that the tests have a number for."""

    def __init__(self, link, namespace):
        self._link, self._namespace = link, namespace
        self._objects, self._numbers, self.errors = [], {}, {}  # of classes of exceptions the names, by id
        self._shared, self._records = Shared(-1), {}  # fields of objects by number, as the tests know them
        self._lock, self._open = threading.RLock(), False  # whether the code may call the tests' functions
        self._stubs = Stubs(self._call_back, namespace)
        self._special = {"handle": self._objects.__getitem__, "name": self._named, "handed": self._stubs.thing}
        self._first = dict(namespace)
        self._special["first"] = lambda name: self._first[name] if name in self._first else self._named(name)
        self._special["builtin"] = lambda module, *names: functools.reduce(
            getattr, names, importlib.import_module(module)
        )

    def answer(self, question):
        """Answer one question. Gone if nobody waits for it."""
        verb, refs, names, nodes, gone = question
        printed, before = [io.StringIO(), io.StringIO()], self._open
        try:
            with self._lock:
                target, *given = self._shared.unpack(refs, nodes, self._special, gone)
                self._open = True
            with redirect_stdout(printed[0]), redirect_stderr(printed[1]):
                reply = self._do(verb, target, given, names)
        except _Missing as error:
            reply = "refused", [], [str(error)]
        except StopIteration as error:
            reply = ("end", [error.value], []) if verb in STREAM else ("!", *self.described(error))
        except BaseException as error:  # noqa: BLE001 - untrusted code
            reply = ("!", *self.described(error))
        with self._lock:
            self._open = False
            try:
                self._tell(*reply, [stream.getvalue() for stream in printed])
            except Gone:
                raise
            except BaseException as error:  # noqa: BLE001 - most likely it is too large
                self._link.send(["refused", [], [f"{type(error).__name__}: {error}"[:1000]], [], []])
            self._open = before

    def _call_back(self, number, verb, args, kwargs):
        """Have the tests' side call one of its functions, and answer what it asks meanwhile."""
        sys.setrecursionlimit(max(sys.getrecursionlimit(), FRAMES))
        with self._lock:
            if not self._open:
                raise RuntimeError("a function of the tests is called after the call in which it may be")
            self._open = False
            try:
                self._tell("?", [*args, *kwargs.values()], [number, verb, *kwargs], [])
                while (message := self._link.receive())[0] not in ("returns", "raises", "ended"):
                    self.answer(message)
                sort, refs, printed, nodes, gone = message
                (value,) = self._shared.unpack(refs, nodes, self._special, gone)
            finally:
                self._open = True
        for text, stream in zip(printed, (sys.stdout, sys.stderr)):  # noqa: B905 - Python 3.8
            if text:
                stream.write(text)
        if sort == "returns":
            return value
        raise value if sort == "raises" else Gone("the test has ended")

    def described(self, error):
        """Return an exception with its attributes and arguments, and its texts: the name of its class, what it says,
        the operators of that in one text, and the `path` of each class of its MRO."""
        kind = type(error)
        try:
            text = str(error)[:MAX_TEXT]
        except Exception:  # noqa: BLE001 - untrusted code again
            text = "?"
        said = [kind.__name__, text, " ".join(operators_of(kind)), *map(self.path, kind.__mro__[:-1])]
        return [error, dict(vars(error)), *BaseException.args.__get__(error)], said

    def path(self, kind):
        """Return where the tests find a class of exceptions, an empty text if nowhere: module and name."""
        if id(kind) in self.errors:
            return f"solution.{self.errors[id(kind)]}"
        is_there = getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind
        return f"{kind.__module__}.{kind.__name__}" * (is_there and kind.__module__ != "solution")

    def _do(self, verb, target, given, names):
        """Return the sort of the answer, its objects and its texts."""
        if verb != "call":
            return "=", [VERBS[verb](target, *names, *given)], []
        split = len(given) - len(names)
        value = target(*given[:split], **dict(zip(names, given[split:])))  # noqa: B905 - Python 3.8
        if type(value) is not types.CoroutineType:
            return "=", [value], []
        try:
            return "~=", [importlib.import_module("asyncio").run(value)], []
        except Exception as error:  # noqa: BLE001 - untrusted code
            return ("~!", *self.described(error))

    def _tell(self, sort, objects, texts, printed):
        changed = [n for n, items in self._records.items() if not values.same_items(_items(self._objects[n]), items)]
        roots = [*objects, *(self._objects[number] for number in changed)]
        refs, nodes = self._shared.pack(roots, self.node, self._record)
        self._link.send([sort, refs[: len(objects)], texts, nodes, printed])
        self._shared.sent()

    def number(self, value):
        """Return the number by which the tests know an object."""
        key = id(value)
        if key not in self._numbers:
            self._numbers[key] = len(self._objects)
            self._objects.append(value)
        return self._numbers[key]

    def node(self, value):
        """Return the node of an object that has no plain form."""
        kind = type(value)
        if node := self._stubs.node(value):
            return node
        if hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools"):
            return ["stream", self.number(value), kind is types.GeneratorType]
        said = traits(kind)
        if isinstance(kind, enum.EnumMeta) and said[1] != "own" and plain_of(value) is not None:
            return ["member", self.number(value), plain_of(value)]
        if isinstance(value, type) and self._namespace.get(value.__name__) is value:
            return ["name", value.__name__, said]
        return ["handle", self.number(value), said]

    def _record(self, value):
        fields = fields_of(type(value))
        if fields is None:
            return None
        items, number = _items(value), self.number(value)
        if not isinstance(value, tuple):
            self._records[number] = items
        known = traits(type(value))
        is_tuple = isinstance(value, tuple) and known[1] == "fields"
        return items, [number, known, self.number(type(value)), fields, is_tuple, compared(type(value))]

    def _named(self, name):
        if callable(self._first.get(name)):  # what imports it, or calls it all the time, has the first
            return self._first[name]
        if name not in self._namespace and "__getattr__" in self._namespace and not name.startswith("__"):
            return self._namespace["__getattr__"](name)
        if name not in self._namespace or name.startswith("__"):
            raise _Missing(f"the code defines no {name}")
        return self._namespace[name]


def _items(value):
    """Return the values of an object's fields."""
    if isinstance(value, tuple):
        return list(tuple.__iter__(value))
    return [getattr(value, name) for name in fields_of(type(value))]


def classes_of(namespace, server):
    """Return what is said of the classes of the code: of one of exceptions (name, `error`, the paths of its bases, its
    operators), or (name, `alias`, its path) if the tests know it; of one with named fields (name, `record` or `named`,
    fields, defaults of the last of them, its number, whether it is a tuple with a tuple's operators, the fields that
    are compared, its traits)."""
    found = []
    for name, kind in namespace.items():
        if isinstance(kind, type) and issubclass(kind, BaseException):
            if path := server.path(kind):
                found.append((name, "alias", path))
            else:
                server.errors[id(kind)] = name
                found.append((name, "error", *map(list, (map(server.path, kind.__mro__[1:-1]), operators_of(kind)))))
        elif isinstance(kind, type) and kind.__module__ == "solution" and (said := _fields_and_defaults(kind)):
            known, sort = traits(kind), "named" if values.is_named(kind) else "record"
            is_tuple = issubclass(kind, tuple) and known[1] == "fields"
            found.append((name, sort, *said, server.number(kind), is_tuple, compared(kind), known))
    return found


def _fields_and_defaults(kind):
    """Return fields and defaults of a class whose objects are made of them and nothing else, else None."""
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        made_so = same_code(kind.__new__, collections.namedtuple("Any", kind._fields).__new__)
        plain = made_so and kind.__init__ is object.__init__
        return (list(kind._fields), list(kind._field_defaults.values())) if plain else None
    own = hasattr(kind, "__post_init__") or kind.__new__ is not object.__new__ or type(kind) is not type
    if "__dataclass_params__" not in vars(kind) or own:
        return None
    fields = dataclasses.fields(kind)
    if not all(field.init and not getattr(field, "kw_only", False) for field in fields):
        return None
    if not is_generated(kind, "__init__") or not keeps_fields(kind):
        return None
    found = [(field.default, field.default_factory) for field in fields]
    defaults = [default for pair in found for default in pair if default is not dataclasses.MISSING]
    if not all(type(each) in values.SCALARS or each in (list, dict, set) for each in defaults):
        return None
    return [field.name for field in fields], defaults
