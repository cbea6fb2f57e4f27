"""Plain values as JSON, the only ones that travel between a program and its tests; their types are exactly these.

None, booleans, `int`, `float` and `str` are themselves. Every other value is a list that begins with a letter:

| letter | value | after it |
|---|---|---|
| l, t, s, f | list, tuple, set, frozenset | the items |
| d | dict | key, value, key, value, ... |
| b, c, D, F | bytes, complex, Decimal, Fraction | hexadecimal digits; two floats; the text; two integers |
| o | an object of the program | its number |
"""

import json
from decimal import Decimal
from fractions import Fraction

SCALARS = {type(None), bool, int, float, str}
KINDS = {"l": list, "t": tuple, "s": set, "f": frozenset}
LETTERS = {kind: letter for letter, kind in KINDS.items()}
LEAVES = {
    bytes: lambda it: ["b", it.hex()],
    complex: lambda it: ["c", it.real, it.imag],
    Decimal: lambda it: ["D", str(it)],
    Fraction: lambda it: ["F", it.numerator, it.denominator],
}
FAULTS = ValueError, TypeError, ArithmeticError, LookupError, RecursionError, MemoryError


def encode(value, other):
    """Return a value's JSON form; `other(value)` for one that is not plain. RecursionError if deep."""
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind in LEAVES:
        return LEAVES[kind](value)
    if kind in LETTERS:
        if SCALARS.issuperset(map(type, value)):
            return [LETTERS[kind], *value]
        return [LETTERS[kind], *[encode(item, other) for item in value]]
    if kind is dict:
        return ["d", *[encode(item, other) for pair in value.items() for item in pair]]
    return other(value)


def decode(node, other):
    """Return the value of a JSON form; `other(number)` for an object. `FAULTS` if malformed."""
    if type(node) is not list:
        return node
    letter, *items = node
    if letter in KINDS:
        if list in map(type, items):
            items = [decode(item, other) for item in items]
        return items if letter == "l" else KINDS[letter](items)
    if letter == "d":
        items = [decode(item, other) for item in items]
        if len(items) % 2:
            raise ValueError("a key without a value")
        return dict(zip(items[::2], items[1::2]))  # noqa: B905 - Python 3.8
    kinds = list(map(type, items))
    if (letter, kinds) == ("b", [str]):
        return bytes.fromhex(*items)
    if (letter, kinds) == ("c", [float, float]):
        return complex(*items)
    if (letter, kinds) == ("D", [str]):
        return Decimal(*items)
    if (letter, kinds) == ("F", [int, int]):
        made = Fraction(*items)
        # a program may make one by hand that is not reduced
        if [made.numerator, made.denominator] == items:
            return made
    if (letter, kinds) == ("o", [int]):
        return other(*items)
    raise ValueError("no plain value")


def dumps(message):
    """Return a message as JSON bytes. ValueError for an integer with too many digits."""
    # two halves of a character stay two
    return _ENCODER.encode(message).encode("utf-8", "surrogatepass")


def loads(body):
    """Return the message of JSON bytes. `FAULTS` if malformed."""
    return _DECODER.decode(body.decode("utf-8", "surrogatepass"))


def _refuse(pairs):
    raise ValueError("an object")


_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(object_pairs_hook=_refuse)
