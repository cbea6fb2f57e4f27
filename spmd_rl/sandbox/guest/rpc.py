"""Remote procedure calls by which tests in one process use the names that untrusted code defines in another.

The two never share an interpreter, so that nothing the code does to its own can make a test pass. A value that comes
back is rebuilt from JSON as an object of a builtin type and compared on the tests' side. A value without such a form
stays where it is and is represented by a `RemoteObject`, which equals no plain value: an object of the answer's own
cannot decide what it equals.

Tests that reach into the code's interpreter (its standard output, modules or frames) are not supported.
"""

import builtins
import importlib
import json
import operator
import os
import re
import struct
import types
from collections import deque, namedtuple

MAX_BYTES = 8 << 20
_LENGTH = struct.Struct("<I")
_TYPES = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, object)
}
_TYPES["NoneType"] = type(None)
_VALUES = {
    "builtins.complex": (lambda z: [z.real, z.imag], lambda kind, parts: kind(*parts)),
    "builtins.bytes": (bytes.hex, lambda kind, text: kind.fromhex(text)),
    "builtins.bytearray": (bytearray.hex, lambda kind, text: kind.fromhex(text)),
    "builtins.range": (lambda r: [r.start, r.stop, r.step], lambda kind, parts: kind(*parts)),
    "decimal.Decimal": (str, lambda kind, text: kind(text)),
    "fractions.Fraction": (lambda f: [f.numerator, f.denominator], lambda kind, parts: kind(*parts)),
    "datetime.date": (str, lambda kind, text: kind.fromisoformat(text)),
    "datetime.datetime": (str, lambda kind, text: kind.fromisoformat(text)),
    "numpy.ndarray": (lambda a: [a.dtype.name, a.tolist()], lambda kind, parts: _array(*parts)),
    "datetime.timedelta": (lambda t: [t.days, t.seconds, t.microseconds], lambda kind, parts: kind(*parts)),
}
"""By type: the function to its plain form, and the function back."""
_ITEMS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_CALLABLE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)


OPERATORS = "lt le gt ge add sub mul truediv floordiv mod pow matmul and or xor radd rsub rmul rtruediv neg"
"""Operators forwarded among objects of the code, and from an instance that the tests created on the left."""


class Disconnected(BaseException):
    """Raised when the other side is gone. It is no `Exception`, since a test may expect one of those."""


class NotSerializable(BaseException):
    """Raised when the tests pass a value that has no JSON form: a mistake of the tests, not of the code."""


class RemoteObject:
    """Stands for an object of the other side, which answers for its attributes, items and text.

    What a test would believe without comparing plain data is not: an operator that meets a value of ours is refused,
    since an answer may return an object that is equal to, greater than or a container of everything.
    """

    def __init__(self, peer, number):
        object.__setattr__(self, "_at", (peer, number))

    def __call__(self, *args, **kwargs):
        return _ask(self, "call", list(args), kwargs)

    def __getattr__(self, name):
        return _ask(self, "get", name)

    def __setattr__(self, name, value):
        _ask(self, "set", name, value)

    def __instancecheck__(self, instance):
        return isinstance(instance, RemoteObject) and _ask(self, "isinstance", instance) is True

    def __eq__(self, other):
        return self is other or (isinstance(other, RemoteObject) and _ask(self, "eq", other) is True)

    def __hash__(self):
        return self._at[1]

    def __bool__(self):
        return True

    def __contains__(self, item):
        raise TypeError("what an object of the code contains is its own word")

    def __enter__(self):
        return _ask(self, "op", "__enter__")

    def __exit__(self, *exc):
        return _ask(self, "op", "__exit__", None, None, None)


class RemoteInstance(RemoteObject):
    """An instance of a class that the tests themselves called by its name: its operators are the other side's."""

    def __contains__(self, item):
        return _ask(self, "contains", item) is True

    def __bool__(self):
        return _ask(self, "bool") is True


def _forward(name):
    return lambda self, *args: _ask(self, "op", name, *args)


def _forward_among_its_own(name):
    def operate(self, *args):
        if not isinstance(self, RemoteInstance) and not all(isinstance(arg, RemoteObject) for arg in args):
            return NotImplemented
        value = _ask(self, "op", name, *args)
        return RemoteInstance(*value._at) if isinstance(value, RemoteObject) else value

    return operate


for _name in ("iter", "next", "len", "str", "repr", "getitem", "setitem", "delitem"):
    setattr(RemoteObject, f"__{_name}__", _forward(f"__{_name}__"))
for _name in OPERATORS.split():
    setattr(RemoteObject, f"__{_name}__", _forward_among_its_own(f"__{_name}__"))
RemoteInstance.__abs__ = _forward("__abs__")


def _ask(remote, *question):
    peer, number = remote._at
    return peer.ask(number, *question)


async def _given(value):
    return value


class Peer:
    """One end of the connection. `trusted` is the tests' end: the other side can call only what it was given."""

    def __init__(self, fd, trusted):
        self.gone = False
        self.errors = {}  # by name: exception classes of the other side, mirrored here
        self._fd = fd
        self._trusted = trusted
        self._objects = []
        self._numbers = {}

    # -- frames -----------------------------------------------------------------------------------------------------

    def send(self, message):
        """Write one message. Disconnected if nobody reads, ValueError if it is too large."""
        body = json.dumps(message).encode()
        if len(body) > MAX_BYTES:
            raise ValueError(f"{len(body)} bytes; at most {MAX_BYTES} travel")
        data = memoryview(_LENGTH.pack(len(body)) + body)
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            self._lose()

    def receive(self):
        """Read one message. Disconnected if there is none or it is malformed."""
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if size > MAX_BYTES:
            self._lose()
        body = self._read(size)
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            self._lose()

    def _read(self, size):
        data = bytearray()
        while len(data) < size:
            try:
                chunk = os.read(self._fd, min(size - len(data), 1 << 16))
            except OSError:
                chunk = b""
            if not chunk:
                self._lose()
            data += chunk
        return bytes(data)

    def _lose(self):
        self.gone = True
        raise Disconnected("the code is gone")

    # -- questions --------------------------------------------------------------------------------------------------

    def ask(self, number, verb, *args):
        """Return the other side's answer or raise its exception. Its own questions are answered meanwhile."""
        if self.gone:
            self._lose()
        try:
            packed = [self.pack(arg) for arg in args]
        except RecursionError:
            packed = None
        if packed is None:
            raise NotSerializable("an argument refers to itself")
        self.send(["?", number, verb, packed])
        while True:
            message = self.receive()
            try:
                kind, *rest = message
                if kind == "?":
                    self.answer(*rest)
                elif kind == "!":
                    raise self._error(*rest)
                elif kind == "=":
                    value, changed = rest
                    if verb == "call":
                        _put_back(args[0], {int(i): self.unpack(item) for i, item in changed.items()})
                    return self.unpack(value)
                else:
                    self._lose()
            except _Malformed:
                self._lose()

    def answer(self, number, verb, packed):
        """Answer one question with a value or an exception."""
        try:
            if self._trusted and not (verb == "call" and callable(self._objects[number])):
                self._lose()
            args = [self.unpack(arg) for arg in packed]
            value, changed = self._do(self._objects[number], verb, args, packed)
            reply = ["=", self.pack(value), changed]
            json.dumps(reply)
        except Disconnected:
            raise
        except BaseException as error:  # noqa: BLE001 - it travels to the other side
            reply = ["!", *_described(error)]
        try:
            self.send(reply)
        except (ValueError, RecursionError) as error:
            self.send(["!", *_described(error)])

    def _do(self, target, verb, args, packed):
        if verb == "call":
            positional, keywords = args
            value = target(*positional, **keywords)
            if isinstance(value, types.CoroutineType):
                value = _Awaited(importlib.import_module("asyncio").run(value))
            made = isinstance(target, type) and target.__name__[:1].isupper()
            changed = {}
            for i, arg in enumerate(positional):
                if type(arg) in (list, dict, set, bytearray) and (after := self.pack(arg)) != packed[0][1][i]:
                    changed[i] = after
            return (_InstanceHere(value) if made else value), changed
        return _OTHER_VERBS[verb](target, *args), {}

    def _error(self, base, name, text):
        mirrored = self.errors.get(name)
        found = getattr(builtins, base, None) if isinstance(base, str) else None
        usable = isinstance(found, type) and issubclass(found, BaseException)
        kind = mirrored or (found if usable else RuntimeError)
        try:
            return kind(str(text))
        except TypeError:  # one that wants more arguments
            return ValueError(str(text))

    # -- values -----------------------------------------------------------------------------------------------------

    def pack(self, value):
        """Return the JSON form of a value: plain data, or a number that stands for an object."""
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
            return self.pack(value.item())
        if (path := f"{kind.__module__}.{kind.__name__}") in _VALUES:
            return [path, _VALUES[path][0](value)]
        if isinstance(value, RemoteObject):
            return ["yours", value._at[1]]
        if kind in (_Awaited, _InstanceHere):
            return ["awaited" if kind is _Awaited else "made", self.pack(value.value)]
        if isinstance(value, dict):
            return ["dict", [[self.pack(k), self.pack(v)] for k, v in dict.items(value)]]
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return ["named", [kind.__name__, list(kind._fields), [self.pack(item) for item in value]]]
        for base in _ITEMS.values():
            if isinstance(value, base):
                return [base.__name__, [self.pack(item) for item in base.__iter__(value)]]
        for base in (int, float, str):
            if isinstance(value, base):
                return base.__str__(value) if base is str else base.__add__(value, base(0))
        if isinstance(value, type) and _TYPES.get(value.__name__) is value:
            return ["type", value.__name__]
        if self._trusted and not isinstance(value, _CALLABLE):
            raise NotSerializable(f"the tests hand a {kind.__name__} to the code")
        return ["mine", self.number(value)]

    def number(self, value):
        """Keep an object and return the number that stands for it."""
        key = id(value)
        if key not in self._numbers:
            self._numbers[key] = len(self._objects)
            self._objects.append(value)
        return self._numbers[key]

    def unpack(self, packed):
        """Return the value of a JSON form, of exact builtin types whatever the other side meant."""
        if not isinstance(packed, list):
            if isinstance(packed, dict):
                raise _Malformed
            return packed
        try:
            tag, body = packed
            if tag in _ITEMS:
                return _ITEMS[tag](self.unpack(item) for item in body)
            if tag == "dict":
                return {self.unpack(k): self.unpack(v) for k, v in body}
            if tag == "named":
                name, fields, items = body
                return namedtuple(name, fields)(*map(self.unpack, items))
            if tag == "mine":
                return RemoteObject(self, int(body))
            if tag == "yours":
                return self._objects[int(body)]
            if tag == "made":
                inner = self.unpack(body)
                return RemoteInstance(self, inner._at[1]) if isinstance(inner, RemoteObject) else inner
            if tag == "awaited":
                return _given(self.unpack(body))
            if tag == "type":
                return _TYPES[body]
            if tag in _VALUES:
                module, _, name = tag.partition(".")
                return _VALUES[tag][1](getattr(importlib.import_module(module), name), body)
        except (ArithmeticError, ImportError, LookupError, TypeError, ValueError):
            pass
        raise _Malformed


def _array(dtype, items):
    """Return a NumPy array of numbers."""
    if not re.fullmatch(r"bool|u?int\d+|float\d+", dtype):
        raise ValueError(dtype)
    return importlib.import_module("numpy").array(items, dtype=dtype)


class _Malformed(Exception):
    pass


class _Awaited:
    def __init__(self, value):
        self.value = value


class _InstanceHere(_Awaited):
    pass


_OTHER_VERBS = {
    "get": getattr,
    "set": setattr,
    "isinstance": lambda target, instance: isinstance(instance, target),
    "eq": lambda target, other: bool(target == other),
    "contains": lambda target, item: item in target,
    "bool": bool,
    "op": lambda target, name, *args: _operate(target, name, args),
}
_BUILTIN_OPERATORS = {"__iter__": iter, "__next__": next, "__len__": len, "__str__": str, "__repr__": repr}


def _operate(target, name, args):
    if name in _BUILTIN_OPERATORS:
        return _BUILTIN_OPERATORS[name](target)
    if hasattr(operator, name):
        return getattr(operator, name)(target, *args)
    if name.startswith("__r"):  # reflected
        return getattr(operator, "__" + name[3:])(*args, target)
    return getattr(type(target), name)(target, *args)


def _put_back(positional, changed):
    """Repeat on our arguments what a call did to its copies."""
    for i, after in changed.items():
        before = positional[i] if 0 <= i < len(positional) else None
        if type(before) is not type(after):
            raise _Malformed
        if type(before) in (list, bytearray):
            before[:] = after
        elif type(before) in (dict, set):
            before.clear()
            before.update(after)


def _described(error):
    """Return an exception's first builtin base, its name and its text."""
    bases = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - untrusted code again
        text = "?"
    return bases[0], type(error).__name__, text[:10_000]
