"""The tests' side of a check: what stands for the names of the code, and the questions that it asks.

No object of the code is ever here. A `Remote` stands for a name of the code's or for an object that has no plain form:
tests can call it, read and set its attributes, compare its identity and ask for its text; of one that they have made of
a class they can ask its length and items too, which are plain values. An object of named fields (a dataclass, a named
tuple, an enum's member) brings a record of them along, and records are compared here. Nothing else is asked of an
object: no comparison, operator or truth value of its own. Where tests need one, they have failed; if they need it of
what they have made themselves, or hand over what has no plain form, they are not supported.
"""

import _thread
import importlib
import io
import sys
import types
import weakref
from contextlib import redirect_stderr, redirect_stdout

from spmd_rl.sandbox.guest import values
from spmd_rl.sandbox.guest.handed import DEPTH, FRAMES, Handed
from spmd_rl.sandbox.guest.link import Gone
from spmd_rl.sandbox.guest.remote import (
    ASKED,
    REFUSED,
    TEXTS,
    Maker,
    Pending,
    Remote,
    maker_of,
    member,
    node_of,
    set_record,
    set_traits,
    settle,
)
from spmd_rl.sandbox.guest.shared import Shared

ENDS = {"StopIteration", "StopAsyncIteration", "GeneratorExit", "SystemExit", "KeyboardInterrupt", "BaseException"}
"""Exceptions that end something on the tests' side without a failure, if the code raises them."""
STANDARD = "builtins asyncio.exceptions binascii csv dataclasses decimal json.decoder re statistics struct zlib"
"""Modules whose exceptions are the same on both sides."""

FAULTS = (ArithmeticError, AttributeError, ImportError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
"""What a message raises that does not say what a message can say."""
_FUNCTIONS = type(len), type(str.upper), type(int.__add__), type(dict.fromkeys)
_OWNERS = {"builtins", "math", "_operator", *values.TYPES} - {"object"}


class Refused(BaseException):
    """Raised where the code gives no answer, so that the test fails. It is no `Exception`: a test may expect one."""


class State:
    """How tests stand. `refused` says why one failed, even if it caught what was raised; `beyond`, where it wanted more
    of an object than plain values; `unsupported`, why the tests need more whatever the code is; `own`, why an operator
    of the code's own was needed; `collects`, whether pytest collects tests, of which none runs meanwhile."""

    asked, refused, beyond, gone, unsupported, own, collects = 0, "", "", "", "", "", False


class Client(State):
    """Asks questions. `of_own`: with what an operator may be the code's own."""

    def __init__(self, link, first):
        """`first` is called before the first question."""
        self.of_own = self  # nothing that tests can have
        self._link, self._first = link, first
        self._thread = _thread.get_ident()
        self.remotes, self._names, self._members, self._shared = {}, {}, {}, Shared(1)
        self._streams, self._raised = {}, {}  # by id: what iterators stand for; of an object, the exception for it
        self._handed, self._depth = Handed(), 0
        self._special = {
            "handle": self._handle,
            "record": self._record,
            "stream": self._stream,
            "member": self._member,
            "name": self._named,
            "handed": self._handed.thing,
        }

    def greet(self):
        """Wait until the code is loaded, and learn which classes it defines."""
        try:
            kind, *rest = self._link.receive()
            if kind != "ready":
                self.gone = str(rest[0])[:1000]
                return
            for name, sort, *said in values.decode(*rest, self._special):
                self._names[str(name)] = self._learnt(str(name), sort, *said)
            self._names = {name: thing for name, thing in self._names.items() if thing is not None}
        except (Gone, *FAULTS):
            self.gone = "the code ended before its tests began"

    def _learnt(self, name, sort, *said):
        if sort == "alias":
            return self._known(said[0])
        if sort == "error":
            bases = tuple(base for base in self._least(said[0]) if issubclass(base, Exception))
            return error_class(self, name, bases or (Exception,), said[1])
        fields, defaults, number, is_tuple, compared, traits = said
        kind, fields = number if type(number) is int else -1, tuple(map(str, fields))
        maker = Maker(kind, fields, tuple(defaults), is_tuple, tuple(map(str, compared)), _traits(*traits))
        is_named = sort == "named"
        return values.named(name, maker.fields, maker.defaults) if is_named else Remote(self, ["name", name], maker)

    def name(self, name, first=False):
        """Return what stands for a name of the code's: for what it has there now, or for the first that it had."""
        return self._names[name] if name in self._names else self._remote("first" if first else "name", name)

    def _named(self, name, traits):
        found = self.name(str(name), first=("first", name) in self.remotes)
        if type(found) is Remote and not maker_of(found):
            set_traits(found, _traits(*traits))
        return found

    def named(self, names):
        """Return what stands for these names of the code's, by name."""
        return {name: self.name(name) for name in names}

    def want(self, why, *others, always=False):
        """End the test: it wants more than plain values; `always`: whatever the code is. `others`: the operands."""
        if any(other is self.of_own for other in others):
            why = self.own = f"{why}, made by themselves"
        self.beyond = self.beyond or why
        self.unsupported = self.unsupported or (why if always else "")
        self.refuse(why)

    def refuse(self, why):
        """End the test: it has failed."""
        self.refused = self.refused or why
        raise Refused(why)

    def ask(self, verb, remote, given=(), names=()):
        """Return the code's answer, or raise its exception."""
        if self.gone or self.refused:
            self.refuse(self.gone or "an answer was refused before")
        if _thread.get_ident() != self._thread:
            self.want("the tests ask in a thread of their own", always=True)
        self.asked += 1
        if self._first:
            self._first = self._first()
        try:
            self._send(verb, [remote, *given], list(names))
            while (message := self._link.receive())[0] == "?":
                self._called(*message[1:4])
            answer, printed = self._understood(verb, *message)
        except Gone as error:
            self.gone = str(error)
        except FAULTS as error:
            self.gone = f"an answer that is none: {type(error).__name__}"
        if self.gone or self.refused:
            self.refuse(self.gone or self.refused)
        for text, output in zip(printed, (sys.stdout, sys.stderr)):  # noqa: B905 - Python 3.8
            if text:
                output.write(text)
        return answer()

    def slept(self):
        """Learn what threads of the code have changed while the tests slept."""
        if self.asked and _thread.get_ident() == self._thread:
            self.ask("value", None)

    def _called(self, refs, texts, nodes):
        """Call a function of the tests for the code, which waits for the reply."""
        number, verb, *names = texts
        args, printed = self._shared.unpack(refs, nodes, self._special), [io.StringIO(), io.StringIO()]
        self._handed.thing(number)
        reply = "ended", None
        self._depth += 1
        sys.setrecursionlimit(FRAMES)
        try:
            if self._depth > DEPTH:
                raise RecursionError("maximum recursion depth exceeded")
            if not self.refused:
                with redirect_stdout(printed[0]), redirect_stderr(printed[1]):
                    reply = "returns", self._handed.use(number, verb, args, names)
        except Exception as error:  # noqa: BLE001 - the code sees what it is, as in one process
            reply = "raises", (_said(error) or [error])[0]
        except BaseException as error:  # noqa: BLE001 - an end of the test
            self.refused = self.refused or f"{type(error).__name__}: {error}"
        self._depth -= 1
        if self.gone:
            self.refuse(self.gone)
        try:
            self._send(reply[0], [reply[1]], [stream.getvalue() for stream in printed])
        except Refused:
            if self.gone:
                raise
            self._send("ended", [None], [])

    def _send(self, verb, targets, names):
        while True:
            try:
                refs, nodes = self._shared.pack(targets, self._packed, release=True)
                self._link.send([verb, refs, names, nodes, self._shared.gone])
                return self._shared.sent()
            except (MemoryError, ValueError) as error:
                self.want(f"the tests hand over {error}")
            except Pending as pending:
                settle(pending.args[0])

    def _understood(self, verb, sort, refs, texts, nodes, printed):
        """Return a function that returns or raises what an answer says, and what was printed."""
        found = self._shared.unpack(refs, nodes, self._special)
        sort, printed, texts = str(sort), list(map(str, printed)), list(map(str, texts))
        if sort == "refused":
            return lambda: self.refuse(texts[0][:1000]), printed
        value = found[0] if sort.endswith("=") else None
        error = self._error(*found[:2], found[2:], *texts) if sort.endswith("!") else None
        if sort == "end" and verb in ("next", "send", "throw"):
            error = StopIteration(*found)

        def answer():
            if isinstance(error, str):
                self.refuse(error)
            if error is not None:
                raise error
            return value

        async def awaited():
            return answer()

        return (awaited if sort.startswith("~") else answer), printed

    def _error(self, remote, own, args, name, text, operators, *paths):
        """Return the exception that stands for one of the code's; if there can be none, the reason as a text."""
        if issubclass(type(remote), Exception) and type(remote).__name__ not in ENDS:
            remote.__dict__.update(own)
            return remote  # a plain one, or that of a function of the tests
        least = self._least(paths)
        if any(not issubclass(kind, Exception) or kind.__name__ in ENDS for kind in (*least, least[0])):
            return f"the code raised {name}: {text}"[:1000]
        if id(remote) not in self._raised:
            made = self._known(paths[0]) or error_class(self, name, tuple(least), operators.split())
            self._raised[id(remote)] = made.__new__(made, *args)
        error = self._raised[id(remote)]
        if type(error).__module__ != "solution":
            error.__dict__.update(own)
        error.args, error.__dict__["_said"] = args, (remote, text)
        return error

    def _known(self, path):
        """Return the class of exceptions that a path names; None if it is not among those that the tests know."""
        module, _, name = path.rpartition(".")
        if module == "solution":
            return self._names[name]
        return getattr(importlib.import_module(module), name) if module in STANDARD.split() else None

    def _least(self, paths):
        """Return those of the classes that are the base of no other."""
        kinds = list(filter(None, map(self._known, map(str, paths))))
        return [one for one in kinds if not any(two is not one and issubclass(two, one) for two in kinds)]

    def _handle(self, number, traits=(True, "own", "own", False)):
        if type(number) is not int or number < 0:
            raise ValueError(number)
        remote = self._remote("handle", number)
        set_traits(remote, _traits(*traits))
        return remote

    def _stream(self, number, is_generator):
        remote = self._handle(number)
        made = stream(self, remote)
        if is_generator is not True:
            made = map(lambda item: item, made)  # noqa: C417 - it shall be no generator
        key, held = id(made), made if is_generator is not True else weakref.ref(made, lambda _: self._streams.pop(key))
        self._streams[key] = held, remote  # a generator is closed when the tests have it no more
        return made

    def _member(self, number, plain):
        if type(plain) not in (int, str, float):
            raise ValueError(plain)
        remote = self._handle(number)
        return self._members.setdefault(number, member(remote, plain))

    def _record(self, remote, found, kind, names, is_tuple, compared):
        if type(kind) is not int or len(names) != len(found):
            raise ValueError(kind)
        set_record(remote, (kind, tuple(map(str, names)), tuple(found), bool(is_tuple), tuple(map(str, compared)), ()))

    def _remote(self, *node):
        if node not in self.remotes:
            self.remotes[node] = Remote(self, list(node))
        return self.remotes[node]

    def _packed(self, value):
        """Return the node of an object that has no plain form."""
        _, value = self._streams.get(id(value), (None, value))
        value = getattr(type(value), "remote_of", lambda value: value)(value)
        if type(value) in _FUNCTIONS:
            owner = getattr(value, "__objclass__", None) or value.__self__
            if type(owner) in (type, types.ModuleType) and owner.__name__ in _OWNERS:
                return ["builtin", *([] if type(owner) is not type else ["builtins"]), owner.__name__, value.__name__]
        for name, known in self._names.items():
            if known is value:
                return ["name", name]
        if type(value) is not Remote and (node := self._handed.node(value)):
            return node
        if type(value) is not Remote:
            self.want(f"the tests hand a {type(value).__name__} to the code", always=True)
        if node_of(value) is None:
            raise Pending(value)
        return node_of(value)


def _traits(truth, equal, hashed, ordered):
    return truth is not False, str(equal), str(hashed), ordered is True


def stream(client, remote):
    """Yield what an iterator of the code's gives, one plain value after the other."""
    verb, given = "next", []
    while True:
        try:
            item = client.ask(verb, remote, given)
        except StopIteration as end:
            return end.value
        try:
            sent = yield item
            verb, given = ("next", []) if sent is None else ("send", [sent])
        except GeneratorExit:
            client.ask("close", remote)
            raise
        except Exception as error:  # noqa: BLE001 - of the tests, for the code to handle
            verb, given = "throw", [error]


def error_class(client, name, bases, operators):
    """Return the class that stands for one of the code's exceptions, which has these operators of its own."""

    def special(verb):
        def asked(error, *given):
            if (said := _said(error)) and verb in (*ASKED, "format"):
                return client.ask(verb, said[0], given)
            if verb in TEXTS:
                return getattr(_builtin(error), f"__{verb}__")(error, *given)
            return client.want(f"the tests use __{verb}__ of an exception of the code's")

        return asked

    known = {*ASKED, *REFUSED.split(), "eq", "ne", "hash", "getattribute"}.intersection(map(str, operators))
    return type(name, bases, {**_ERROR, **{f"__{each}__": special(each) for each in ("repr", "format", *known)}})


def _said(error):
    """Return what stands for an exception that the code has raised, and what it says; None of one of the tests."""
    return object.__getattribute__(error, "__dict__").get("_said")


def _builtin(error):
    return next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")


def _text_of(error):
    return _said(error)[1] if _said(error) else _builtin(error).__str__(error)


def _attribute_of(error, name):
    is_here = name.startswith("__") or name in ("with_traceback", "add_note") or not (said := _said(error))
    if is_here or name in object.__getattribute__(error, "__dict__"):
        return object.__getattribute__(error, name)
    return getattr(said[0], name)


_ERROR = {"__module__": "solution", "__str__": _text_of, "__getattribute__": _attribute_of}
