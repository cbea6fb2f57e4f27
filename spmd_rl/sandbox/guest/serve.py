"""The program's side of a check: it executes the program as the module `solution` and answers questions of its tests.

| question | result |
|---|---|
| name, TEXT | the value of a name of the program |
| get, NUMBER, TEXT | an attribute of an object |
| set, NUMBER, TEXT, VALUE | None |
| call, NUMBER, ARGUMENTS, NAMES | that of a call; the last arguments have these names |

The answer is [`=`, result, [[index, value] of each changed argument]], [`!`, names of an exception's class and bases,
text] or [`?`, reason]. First comes `ready`, with name and bases' names of each exception class.
"""

import sys
from contextlib import suppress

from spmd_rl.sandbox.guest.common import execute
from spmd_rl.sandbox.guest.link import Gone, Link
from spmd_rl.sandbox.guest.values import decode, encode

MAX_TEXT = 100_000  # characters of an exception's text


def serve(job, rpc):
    """Execute the program and answer its tests until they end."""
    link = Link(rpc, job["message_bytes"])
    with suppress(Gone):
        try:
            names = execute(job, "solution")
        except BaseException as error:  # noqa: BLE001 - untrusted code
            link.send(["failed", f"{type(error).__name__}: {error}"[:1000]])
            return
        program = Program(names)
        link.send(["ready", program.errors()])
        while True:
            try:
                link.send(program.answer(*link.receive()))
            except (ValueError, MemoryError, RecursionError) as error:
                link.send(["?", f"{type(error).__name__}: {error}"[:1000]])


class Program:
    """The program, and each object that the tests have a number for."""

    def __init__(self, names):
        self._names, self._objects, self._numbers = names, [], {}
        kinds = {name: kind for name, kind in names.items() if isinstance(kind, type) and issubclass(kind, Exception)}
        self._errors = {kind: name for name, kind in kinds.items() if self._path(kind) is None}

    def errors(self):
        """Return [name, names of its bases] of each exception class of the program, bases first."""
        own = sorted(self._errors.items(), key=lambda it: len(it[0].__mro__))
        return [[name, [self._errors.get(base) or self._path(base) for base in kind.__bases__]] for kind, name in own]

    def answer(self, verb, target, *given):
        """Return the answer to a question. An exception if it cannot be sent."""
        try:
            if verb == "name":
                result = self._names[target]
            else:
                result, args = self._done(verb, self._objects[target], *given)
        except BaseException as error:  # noqa: BLE001 - untrusted code
            return self._raised(error) if verb != "name" else ["?", f"the program has no {target}"]
        after = []
        if verb == "call":
            nodes = [encode(arg, self._number) if type(node) is list else node for arg, node in zip(args, given[0])]  # noqa: B905
            after = [[i, node] for i, node in enumerate(nodes) if node != given[0][i]]
        return ["=", encode(result, self._number), after]

    def _done(self, verb, thing, *given):
        if verb == "get":
            return getattr(thing, given[0]), []
        if verb == "set":
            return setattr(thing, given[0], self._value(given[1])), []
        args, names = list(map(self._value, given[0])), given[1]
        split = len(args) - len(names)
        return thing(*args[:split], **dict(zip(names, args[split:]))), args  # noqa: B905 - Python 3.8

    def _value(self, node):
        return decode(node, self._objects.__getitem__)

    def _number(self, value):
        key = id(value)
        if key not in self._numbers:
            self._numbers[key] = len(self._objects)
            self._objects.append(value)
        return ["o", self._numbers[key]]

    def _raised(self, error):
        names = [self._errors.get(kind) or self._path(kind) for kind in type(error).__mro__]
        args = BaseException.args.__get__(error)
        try:
            text = args[0] if len(args) == 1 and type(args[0]) is str else str(error)
        except BaseException:  # noqa: BLE001 - untrusted code again
            text = "?"
        return ["!", names, text] if len(text) <= MAX_TEXT else ["?", "the text of an exception is too long"]

    @staticmethod
    def _path(kind):
        is_there = getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind
        return f"{kind.__module__}:{kind.__name__}" if is_there and kind.__module__ != "solution" else None
