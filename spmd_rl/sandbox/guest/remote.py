"""The tests' side of a check: the questions to the program.

A function, class or object of the program is a `Remote`: a number that can be called and has attributes. Every other
use raises `Refused`, which no test can expect, and fails the test.
"""

import sys
import types

from spmd_rl.sandbox.guest.link import Gone
from spmd_rl.sandbox.guest.values import FAULTS, decode, encode

ENDS = StopIteration, StopAsyncIteration
"""Exceptions that end a loop of the tests."""
LIBRARY = {"builtins", "json.decoder", "decimal", "binascii", "statistics", "re", "struct", "zlib", "dataclasses"}
"""Modules whose exceptions do not steer the test runner, unlike pytest's."""
_KINDS = object, int, float, dict, set, list, str, types.GeneratorType, types.CoroutineType
_MORE = """bool index complex bytes fspath aiter anext enter exit aenter aexit reversed length_hint missing copy
deepcopy buffer delete instancecheck subclasscheck mro_entries"""
_OPERATORS = "add sub mul matmul truediv floordiv divmod mod pow lshift rshift and or xor"
_KEPT = {"__new__", "__init__", "__getattribute__", "__getattr__", "__setattr__", "__class__", "__call__", "__del__"}
_KEPT |= {"__doc__", "__name__", "__qualname__", "__init_subclass__", "__subclasshook__", "__class_getitem__"}
REFUSED = {name for kind in _KINDS for name in dir(kind) if name.startswith("__")}
REFUSED |= {f"__{name}__" for name in _MORE.split()}
REFUSED |= {f"__{sort}{name}__" for name in _OPERATORS.split() for sort in ("", "r", "i")}
REFUSED -= _KEPT
"""Special methods that an operator, a statement or a builtin function may call."""


class Refused(BaseException):
    """Error if a test asks for more than a plain value, or the program has no answer: the test has failed."""


class Beyond(Exception):
    """Error if tests pass a value that is not plain."""


class Remote:
    """A function, a class or an object of the program."""

    __slots__ = ("_spmd_place",)

    def __init__(self, client, number):
        _PLACE.__set__(self, (client, number))

    def __getattribute__(self, name):
        client, number = place_of(self)
        # unittest has the name in its messages
        if name == "__name__":
            return "object"
        if name.startswith("__"):
            client.refuse(f"{name} of an object")
        return client.ask("get", number, name)

    def __setattr__(self, name, value):
        client, number = place_of(self)
        client.ask("set", number, name, client.encoded(value))

    def __call__(self, *args, **kwargs):
        client, number = place_of(self)
        return client.call(number, [*args, *kwargs.values()], [*kwargs])


_PLACE = Remote.__dict__["_spmd_place"]
place_of = _PLACE.__get__


def _refusing(name):
    def method(self, *_, **__):
        place_of(self)[0].refuse(f"{name} of an object")

    return method


for _name in REFUSED:
    setattr(Remote, _name, _refusing(_name))


class Client:
    """The asker of the program. Answers are plain values, numbers of objects and names of exceptions."""

    def __init__(self, link):
        self._link, self._errors, self._first = link, {}, {}
        self.asked, self.refused, self.gone, self.beyond = 0, "", "", ""

    def greet(self):
        """Wait until the program has been loaded."""
        try:
            sort, said = self._link.receive()
            if sort != "ready":
                self.gone = f"the program does not load: {said}"
                return
            for name, bases in said:
                self._errors[name] = _own_error(name, tuple(self._known(bases)) or (Exception,), self)
        except (Gone, *FAULTS) as error:
            self.gone = f"the program does not load: {error}"

    def name(self, name):
        """Return the object of a name of the program, or raise Refused."""
        if name in self._errors:
            return self._errors[name]
        if name not in self._first:
            value = self.ask("name", name)
            if type(value) is not Remote:
                self.asked += 1
                return value
            # the program may later give the name to another object
            self._first[name] = value
        return self._first[name]

    def call(self, number, args, names):
        """Call an object of the program, and change the arguments as it did."""
        result, after = self._ask("call", number, [self.encoded(arg) for arg in args], names)
        try:
            for index, node in after:
                _renew(args[index], decode(node, self._remote))
        except FAULTS as error:
            self.refuse(f"an argument afterwards: {type(error).__name__}")
        return result

    def ask(self, *question):
        """Return the answer to a question."""
        return self._ask(*question)[0]

    def encoded(self, value):
        """Return a value's JSON form. Refused if it is not plain."""
        try:
            return encode(value, self._handle)
        except (Beyond, RecursionError) as error:
            self.beyond = self.beyond or f"values: the tests pass {error}"
            self.refuse(self.beyond)

    def refuse(self, why):
        """Raise Refused, and keep the reason for the running test."""
        self.refused = self.refused or why or "it is refused"
        raise Refused(why)

    def _ask(self, *question):
        if self.gone:
            self.refuse(self.gone)
        self.asked += question[0] != "name"
        try:
            self._link.send(question)
            sort, *said = self._link.receive()
            if sort == "=":
                node, after = said
                return decode(node, self._remote), list(after)
            if sort == "!":
                names, text = said
                error = self._raised(names, text)
        except Gone as error:
            self.gone = str(error)
            self.refuse(self.gone)
        except FAULTS as error:
            self.refuse(f"the program's answer: {type(error).__name__}")
        if sort != "!":
            self.refuse(f"{said[0]}" if said else "the program has no answer")
        raise error

    def _raised(self, names, text):
        kind = next(iter(self._known(names)), None)
        if kind is None or issubclass(kind, ENDS) or type(text) is not str:
            self.refuse(f"the program raised {names[0]!r:.100}")
        return kind.__new__(kind) if kind in self._errors.values() else kind.__new__(kind, text)

    def _known(self, names):
        # the program's classes have a name, others a path
        found = [self._errors.get(name) or _of_library(*name.split(":")) for name in names if type(name) is str]
        return [kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception)]

    def _remote(self, number):
        return Remote(self, number)

    def _handle(self, value):
        if type(value) is not Remote:
            raise Beyond(f"a {type(value).__name__}")
        return ["o", place_of(value)[1]]


class OwnError(type):
    """The metaclass of the program's exceptions, which can only be caught by their class or a base."""

    def __call__(cls, *_, **__):
        cls.client_of_spmd.refuse(f"more of {cls.__name__} than its name")


def _own_error(name, bases, client):
    body = dict.fromkeys(("eq", "ne", "hash", "bool", "str", "repr", "format"), lambda self, *_: type(self)())
    body = {f"__{key}__": method for key, method in body.items()}
    body["args"] = property(lambda self: type(self)())
    return OwnError(name, bases, {**body, "__module__": "solution", "client_of_spmd": client})


def _of_library(module, name=""):
    return getattr(sys.modules[module], name, None) if module in LIBRARY and module in sys.modules else None


def _renew(old, new):
    if type(old) is not type(new):
        raise TypeError("another type")
    if type(old) is list:
        old[:] = new
    elif type(old) in (dict, set):
        old.clear()
        old.update(new)
    elif type(old) is tuple and len(old) == len(new):
        for mine, its in zip(old, new):  # noqa: B905 - Python 3.8
            if type(mine) in (list, dict, set, tuple):
                _renew(mine, its)
    else:
        raise TypeError("it cannot change")
