"""The program's side of a check: it executes the program as the module `solution` and answers what its tests ask.

| question | what is asked |
|---|---|
| name, TEXT | the value of a name of the program |
| get, NUMBER, TEXT | an attribute of an object |
| set, NUMBER, TEXT, VALUE | sets an attribute |
| call, NUMBER, ARGUMENTS, NAMES | calls an object; the last arguments have these names |

The answer is [`=`, result, [[index, value] of each argument that has changed]], [`!`, names of the class of an
exception and of its bases, text] or [`?`, why there is none]. Before the first question it says `ready`, and of each of
its classes of exceptions the name and the names of the bases. It is believed in nothing: see `remote.py`.
"""

import builtins
from contextlib import suppress

from spmd_rl.sandbox.guest.common import execute
from spmd_rl.sandbox.guest.link import Gone, Link
from spmd_rl.sandbox.guest.values import decode, encode

MAX_TEXT = 100_000
"""Characters of an exception's text."""


def serve(job, rpc):
    """Execute the program and answer its tests until they hang up."""
    link = Link(rpc, job["message_bytes"])
    with suppress(Gone):
        try:
            names = execute(job, "solution")
        except BaseException as error:  # noqa: BLE001 - untrusted code
            link.send(["failed", f"{type(error).__name__}: {error}"[:1000]])
            return
        server = Server(names)
        link.send(["ready", errors_of(names)])
        while True:
            answer = server.answer(link.receive())
            try:
                link.send(answer)
            except (ValueError, MemoryError, RecursionError) as error:
                link.send(["?", f"{type(error).__name__}: {error}"[:1000]])


def errors_of(names):
    """Return [name, names of its bases] of each class of exceptions among the program's names, the bases first."""
    found = {name: kind for name, kind in names.items() if isinstance(kind, type) and issubclass(kind, Exception)}
    own = {name: kind for name, kind in found.items() if getattr(builtins, kind.__name__, None) is not kind}
    own = sorted(own.items(), key=lambda it: len(it[1].__mro__))
    return [[name, [base.__name__ for base in kind.__bases__]] for name, kind in own]


def class_names(kind):
    """Return the names of a class and of its bases, as far as they are exceptions."""
    return [each.__name__ for each in kind.__mro__ if issubclass(each, BaseException)]


class Server:
    """Answers questions. It keeps each object that the tests have a number for."""

    def __init__(self, names):
        self._names, self._objects, self._numbers = names, [], {}

    def answer(self, question):
        """Return the answer to a question."""
        try:
            return self._answer(*question)
        except RecursionError as error:
            return ["!", class_names(type(error)), str(error)]
        except BaseException as error:  # noqa: BLE001 - untrusted code
            return self._raised(error)

    def _answer(self, verb, target, *given):
        if verb == "name":
            if target not in self._names:
                return ["?", f"the program has no {target}"]
            return ["=", encode(self._names[target], self._number), []]
        thing = self._objects[target]
        if verb == "get":
            return ["=", encode(getattr(thing, given[0]), self._number), []]
        if verb == "set":
            return ["=", setattr(thing, given[0], self._value(given[1])), []]
        nodes, names = given
        args, split = [self._value(node) for node in nodes], len(nodes) - len(names)
        result = encode(thing(*args[:split], **dict(zip(names, args[split:]))), self._number)  # noqa: B905 - Python 3.8
        after = [encode(arg, self._number) if type(node) is list else node for arg, node in zip(args, nodes)]  # noqa: B905
        return ["=", result, [[i, node] for i, node in enumerate(after) if node is not nodes[i] and node != nodes[i]]]

    def _value(self, node):
        return decode(node, self._objects.__getitem__)

    def _number(self, value):
        key = id(value)
        if key not in self._numbers:
            self._numbers[key] = len(self._objects)
            self._objects.append(value)
        return ["o", self._numbers[key]]

    def _raised(self, error):
        try:
            args = BaseException.args.__get__(error)
            text = args[0] if len(args) == 1 and type(args[0]) is str else str(error)
            return ["!", class_names(type(error)), text[:MAX_TEXT]]
        except BaseException:  # noqa: BLE001 - untrusted code again
            return ["!", ["Exception"], "?"]
