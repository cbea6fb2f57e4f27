"""The tests' side of a check: what stands for the names of the code, and the questions that it asks.

No object of the code is ever here. A `Remote` stands for a name of the code's or for an object that has no plain form:
tests can call it, read and set its attributes and compare its identity; of one that they have made of a class they can
ask its length, items and texts too, which are plain values. An object of named fields (a dataclass, a named tuple, an
enum's member) brings a record of them along as they were when it was returned, and records are compared here. Nothing
else is asked of an object: no comparison, operator or truth value. Where tests need one, they have failed.
"""

import _thread
import builtins
import importlib
import sys

from spmd_rl.sandbox.guest import values
from spmd_rl.sandbox.guest.link import Gone
from spmd_rl.sandbox.guest.remote import Maker, Pending, Remote, Stream, node_of, set_record, settle
from spmd_rl.sandbox.guest.values import Malformed

ENDS = {"StopIteration", "StopAsyncIteration", "GeneratorExit", "SystemExit", "KeyboardInterrupt", "BaseException"}
"""Exceptions that end something on the tests' side without a failure, if the code raises them."""
STANDARD = "asyncio.exceptions binascii csv dataclasses decimal json.decoder re statistics struct zlib"
"""Modules whose exceptions are the same on both sides."""


class Refused(BaseException):
    """Raised where the code gives no answer, so that the test fails. It is no `Exception`: a test may expect one."""


class Client:
    """Asks questions. `refused` says why a test failed, even if it caught the exception; `beyond`, where it wanted more
    of an object than plain values; `collects`, whether pytest collects tests, of which none runs meanwhile."""

    def __init__(self, link, first):
        """`first` is called before the first question."""
        self.asked, self.refused, self.beyond, self.gone, self.collects = 0, "", "", "", False
        self._link, self._first = link, first
        self._thread = _thread.get_ident()
        self._remotes, self._names, self._containers, self._numbers = {}, {}, [], {}
        self._special = {
            "handle": self._handle,
            "record": self._record,
            "stream": lambda number, real: Stream(self, self._handle(number), real),
            "known": self._containers.__getitem__,
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
        except (Gone, Malformed, AttributeError, LookupError, TypeError, ValueError):
            self.gone = "the code ended before its tests began"

    def _learnt(self, name, sort, *said):
        if sort == "error":
            known = (self._names[base] if base in self._names else getattr(builtins, base) for base in said[0])
            bases = tuple(base for base in known if issubclass(base, Exception))
            return type(name, bases or (Exception,), dict(_ERROR))
        fields, defaults, number, is_tuple = said
        maker = Maker(number if type(number) is int else -1, tuple(map(str, fields)), tuple(defaults), is_tuple)
        is_named = sort == "named"
        return values.named(name, maker.fields, maker.defaults) if is_named else Remote(self, ["name", name], maker)

    def start(self):
        """Begin a source of tests."""
        self.asked, self.refused = 0, ""
        if self._containers:
            self._containers.clear()
            self._numbers.clear()
            try:
                self._send("forget", [], [])
            except Gone as error:
                self.gone = str(error)

    def name(self, name):
        """Return what stands for a name of the code's."""
        return self._names[name] if name in self._names else self._remote("name", name)

    def named(self, names):
        """Return what stands for these names of the code's, by name."""
        return {name: self.name(name) for name in names}

    def want(self, why):
        """End the test: it wants more than plain values."""
        self.beyond = self.beyond or why
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
            self.want("the tests ask in a thread of their own")
        self.asked += 1
        if self._first:
            self._first = self._first()
        try:
            self._send(verb, [remote, *given], list(names))
            answer, printed = self._understood(verb, *self._link.receive())
        except Gone as error:
            self.gone = str(error)
        except (Malformed, AttributeError, LookupError, MemoryError, TypeError, ValueError) as error:
            self.gone = f"an answer that is none: {type(error).__name__}"
        if self.gone:
            self.refuse(self.gone)
        for text, stream in zip(printed, (sys.stdout, sys.stderr)):  # noqa: B905 - Python 3.8
            if text:
                stream.write(text)
        return answer()

    def _send(self, verb, targets, names):
        def build(big):
            refs, nodes = values.encode(targets, self._packed, None, self._number, big)
            return [verb, refs, names, nodes]

        while True:
            try:
                return self._link.send(build)
            except MemoryError as error:
                self.want(f"the tests hand over {error}")
            except Pending as pending:
                settle(pending.args[0])

    def _understood(self, verb, sort, refs, texts, changed, nodes, printed):
        """Return a function that returns or raises what an answer says, and what was printed."""
        refs += [[index] for _, index in changed]
        found = values.decode(refs, nodes, self._special)
        first, texts = len(found) - len(changed), list(map(str, texts))
        for (number, _), container in zip(changed, found[first:]):  # noqa: B905 - Python 3.8
            ours = self._containers[number]
            if type(ours) is not type(container):
                raise Malformed
            values.replace(ours, values.parts(container))
        sort, printed = str(sort), list(map(str, printed))
        if sort == "refused":
            return lambda: self.refuse(texts[0][:1000]), printed
        if (sort, verb) == ("end", "next"):
            return lambda: next(iter(())), printed
        value = found[0] if sort.endswith("=") else None
        error = self._error(found[0], found[1:first], *texts) if sort.endswith("!") else None

        def answer():
            if isinstance(error, str):
                self.refuse(error)
            if error is not None:
                raise error
            return value

        async def awaited():
            return answer()

        return (awaited if sort.startswith("~") else answer), printed

    def _error(self, remote, args, module, own, text, *bases):
        """Return the exception that stands for one of the code's; if there can be none, the reason as a text."""
        kinds = [getattr(builtins, base) for base in bases]
        if not issubclass(kinds[0], Exception) or kinds[0].__name__ in ENDS:
            return f"the code raised {own or bases[0]}: {text}"[:1000]
        if not own:
            return kinds[0](*args)
        made = getattr(importlib.import_module(module), own) if module in STANDARD.split() else self._names.get(own)
        if not (isinstance(made, type) and issubclass(made, kinds[0])):
            least = [one for one in kinds if not any(two is not one and issubclass(two, one) for two in kinds)]
            made = type(own, tuple(least), dict(_ERROR))
        error = made.__new__(made, *args)
        error.args, error.__dict__["_said"] = args, (remote, text)
        return error

    def _handle(self, number):
        if type(number) is not int or number < 0:
            raise Malformed
        return self._remote("handle", number)

    def _record(self, remote, found, kind, names, is_tuple):
        if type(kind) is not int or len(names) != len(found):
            raise Malformed
        set_record(remote, (kind, tuple(map(str, names)), tuple(found), bool(is_tuple)))

    def _remote(self, *node):
        if node not in self._remotes:
            self._remotes[node] = Remote(self, list(node))
        return self._remotes[node]

    def _packed(self, value):
        """Return the node of an object that has no plain form."""
        if type(value) is Stream:
            value = value.remote
        if type(value) is not Remote:
            self.want(f"the tests hand a {type(value).__name__} to the code")
        if node_of(value) is None:
            raise Pending(value)
        return node_of(value)

    def _number(self, container):
        """Return the number of a container of ours, which the code may change."""
        key = id(container)
        if key not in self._numbers:
            self._numbers[key] = len(self._containers)
            self._containers.append(container)
        return self._numbers[key]


def _text_of(error):
    return error.__dict__["_said"][1] if "_said" in error.__dict__ else super(type(error), error).__str__()


def _attribute_of(error, name):
    if name.startswith("__") or "_said" not in error.__dict__:
        raise AttributeError(name)
    return getattr(error.__dict__["_said"][0], name)


_ERROR = {"__module__": "solution", "__str__": _text_of, "__getattr__": _attribute_of}
