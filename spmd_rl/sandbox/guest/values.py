"""The plain values that travel between tests and the code that they test, as JSON: no object of the code ever does.

A message holds a table of nodes, one for each object that is no scalar; `[i]` in it stands for the object of node i. So
nesting has no limit, and an object that occurs twice stays one object. Only objects of exactly the types named here
have a plain form. A subclass has none: it might answer for itself. An object of named fields travels as their record,
beside its number.

    refs, nodes = encode([{"a": [1, 2]}], other)
    (value,) = decode(refs, nodes, {})
"""

import builtins
import gc
import importlib
import json
import operator
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

DIGITS = 4300  # longer integers travel as hexadecimal digits, which take a time that is linear in their number
SCALARS = frozenset((type(None), bool, int, float, str))
MUTABLE = {kind.__name__: kind for kind in (list, set, deque, dict, OrderedDict, Counter, defaultdict, bytearray)}
VIEWS = {type(getattr(made, name)()): name for made in ({}, OrderedDict()) for name in ("keys", "values", "items")}
FROZEN = {
    "tuple": tuple,
    "frozenset": frozenset,
    "view": lambda items: _method(items[0], {name: name for name in VIEWS.values()}[items[1]])(),
    "method": lambda items: _method(*items),
    "error": lambda items: {kind.__name__: kind for kind in _ERRORS}[items[0]](*items[1:]),
}
_PLAIN = (bool, int, float, complex, str, bytes, tuple, frozenset, range, object, type(None), *MUTABLE.values())
_OWNERS = {str, *MUTABLE.values()}
_ERRORS = [kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, Exception)]
_ITEMS = {tuple: "tuple", frozenset: "frozenset", **dict.fromkeys(VIEWS, "view"), **dict.fromkeys(_ERRORS, "error")}
TYPES = {kind.__name__: kind for kind in (*_PLAIN, *_ERRORS)}
_ISO = (lambda d: [d.isoformat()], lambda kind, text: kind.fromisoformat(text))
LEAVES = {
    "builtins.int": (lambda n: [format(n, "x")], lambda kind, text: kind(text, 16)),
    "builtins.bytes": (lambda b: [b.hex()], lambda kind, text: kind.fromhex(text)),
    "builtins.complex": (lambda z: [z.real, z.imag], lambda kind, *parts: kind(*parts)),
    "builtins.range": (lambda r: [r.start, r.stop, r.step], lambda kind, *parts: kind(*parts)),
    "decimal.Decimal": (lambda d: [str(d)], lambda kind, text: kind(text)),
    "fractions.Fraction": (lambda f: [str(f)], lambda kind, text: kind(text)),
    **dict.fromkeys(("datetime.date", "datetime.time", "datetime.datetime"), _ISO),
    "datetime.timedelta": (lambda t: [t.days, t.seconds, t.microseconds], lambda kind, *parts: kind(*parts)),
}
"""By the name of an exact type: the function to JSON scalars, and the function back."""
_DTYPE = re.compile(r"bool_?|u?int\d+|float(16|32|64)|str_?")
_set_digits = getattr(sys, "set_int_max_str_digits", lambda digits: None)
_get_digits = getattr(sys, "get_int_max_str_digits", lambda: 0)


class Malformed(Exception):
    """Raised when a message does not say what a message can say."""


# -- messages -------------------------------------------------------------------------------------------------------


def dumps(build):
    """Return the JSON bytes of `build(big)`, which is called with `big` true if there are long integers in it."""
    before = _get_digits()
    _set_digits(DIGITS)
    try:
        return _ENCODER.encode(build(False)).encode()
    except ValueError:
        return _ENCODER.encode(build(True)).encode()
    finally:
        _set_digits(before)


def loads(body):
    """Return what JSON bytes hold. Malformed if they are none, or hold an object or an integer that is too long."""
    before = _get_digits()
    _set_digits(DIGITS)
    try:
        return _DECODER.decode(body.decode())
    except (ValueError, RecursionError):
        raise Malformed from None
    finally:
        _set_digits(before)


def _refuse(pairs):
    raise ValueError("an object")


_ENCODER = json.JSONEncoder(check_circular=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(object_pairs_hook=_refuse)


# -- to JSON --------------------------------------------------------------------------------------------------------


def encode(roots, other, known=None, number=None, big=False, record=None):
    """Return (references to the roots, nodes).

    `other(value)` returns the node of an object without a plain form, or raises. `known(value)`: the number of a
    container that the receiver has as it is, or None. `number(value)` returns the number by which a container is known
    from now on. `record(value)` returns the values of an object's fields and the rest of its node, or None.
    """
    nodes, refs, entered, unfilled, kept = [], {}, set(), [], {}
    inline = SCALARS - {int} if big else SCALARS
    stack = [root for root in roots if type(root) not in inline]
    while stack:
        value = stack.pop()
        kind, key = type(value), id(value)
        if key in refs:
            continue
        is_container = MUTABLE.get(kind.__name__) is kind and plain_factory(value)
        if is_container and known and (place := known(value)):
            node = ["known", place]
        elif is_container:
            refs[key] = [len(nodes)]
            items = parts(value)
            unfilled.append((len(nodes), value, items, None))
            nodes.append(None)
            stack += [part for part in items if type(part) not in inline and id(part) not in entered]
            continue
        elif kind in _ITEMS or _is_method(value) or is_named(kind):
            if key not in kept:
                kept[key] = _items(value, kind)
            items = kept[key]
            if key not in entered and not inline.issuperset(map(type, items)):
                entered.add(key)
                stack.append(value)
                stack += [part for part in items if type(part) not in inline and id(part) not in entered]
                continue
            node = [_ITEMS.get(kind, "method"), _refer(items, refs, inline)]
            if hasattr(kind, "_fields"):
                _named[kind.__name__, kind._fields] = kind
                node = ["named", node[1], kind.__name__, list(kind._fields)]
        elif kind is int and -(1 << 64) < value < 1 << 64:
            refs[key] = value
            continue
        elif record and (found := record(value)):
            refs[key] = [len(nodes)]
            unfilled.append((len(nodes), value, *found))
            nodes.append(None)
            stack += [part for part in found[0] if type(part) not in inline and id(part) not in entered]
            continue
        else:
            node = _leaf(value) or other(value)
        refs[key] = [len(nodes)]
        nodes.append(node)
    for i, value, items, rest in unfilled:
        nodes[i] = [type(value).__name__, _refer(items, refs, inline), _extra(value)]
        if rest:
            nodes[i] = ["record", _refer(items, refs, inline), *rest]
        elif number:
            nodes[i].append(number(value))
    return _refer(roots, refs, inline), nodes


def _items(value, kind):
    if _is_method(value):
        return [value.__self__, value.__name__]
    if _ITEMS.get(kind) == "error":
        return [kind.__name__, *BaseException.args.__get__(value)]
    if kind not in VIEWS:
        return list(value)
    (mapping,) = gc.get_referents(value)
    if MUTABLE.get(type(mapping).__name__) is not type(mapping) or not SCALARS.issuperset(map(type, mapping)):
        copies = {"keys": dict.fromkeys, "values": lambda items: dict(enumerate(items)), "items": dict}
        mapping = copies[VIEWS[kind]](value)
    return [mapping, VIEWS[kind]]


def _is_method(value):
    return type(value) is type([].append) and type(value.__self__) in _OWNERS


def _method(owner, name):
    if type(owner) not in _OWNERS or name.startswith("_"):
        raise ValueError(name)
    return getattr(owner, name)


def parts(value):
    """Return the objects in a container; those of a dictionary as its keys, then its values."""
    if isinstance(value, bytearray):
        return []
    return [*value, *value.values()] if isinstance(value, dict) else list(value)


def contents(container):
    """Return what is in a container, to find later whether that has changed."""
    return tuple(container if type(container) is bytearray else parts(container))


def same_items(left, right):
    """Return whether two sequences have the same objects."""
    return len(left) == len(right) and all(map(operator.is_, left, right))


def _refer(items, refs, inline):
    if inline.issuperset(map(type, items)):
        return list(items)
    return [item if type(item) in inline else refs[id(item)] for item in items]


def _extra(value):
    """Return what a container has beside its items: the end of a deque, the factory of a default dictionary."""
    if isinstance(value, defaultdict):
        return value.default_factory and value.default_factory.__name__
    if isinstance(value, bytearray):
        return value.hex()
    return value.maxlen if isinstance(value, deque) else None


def plain_factory(value):
    """Return whether a container has no function of anybody's own in it."""
    factory = value.default_factory if type(value) is defaultdict else None
    return factory is None or TYPES.get(getattr(factory, "__name__", "")) is factory


def is_named(kind):
    """Return whether a type is what `namedtuple` makes, with nothing added by hand."""
    if kind.__bases__ != (tuple,) or not hasattr(kind, "_fields"):
        return False
    return set(vars(kind)) - set(kind._fields) <= _NAMED


_NAMED = set(vars(namedtuple("Any", ()))) | {"__annotations__", "__orig_bases__", "__annotate_func__", "__doc__"}
_NAMED |= {"__static_attributes__", "__firstlineno__", "__annotations_cache__", "__annotate__"}


def _leaf(value):
    kind = type(value)
    path = f"{kind.__module__}.{kind.__name__}"
    if path in LEAVES:
        zone = getattr(value, "tzinfo", None)
        if zone is None or type(zone).__name__ == "timezone":
            return [path, *LEAVES[path][0](value)]
    elif kind is type and TYPES.get(value.__name__) is value:
        return ["type", value.__name__]
    elif kind.__module__ == "numpy" and hasattr(value, "dtype") and _DTYPE.fullmatch(value.dtype.type.__name__):
        name = value.dtype.type.__name__.rstrip("_")
        if kind.__name__ == "ndarray":
            return ["ndarray", name, list(value.shape), value.ravel().tolist()]
        return ["ndarray", name, None, [value.item()]]
    return None


# -- from JSON ------------------------------------------------------------------------------------------------------


def decode(refs, nodes, special, known=None):
    """Return the values of references. Malformed if they are none.

    `special`: by a node's first word, a function from the rest of the node to an object. `known`: containers by number;
    a node with such a number changes that container, and a container with another number is added.
    """
    try:
        made, unfilled = [None] * len(nodes), []
        for i, node in enumerate(nodes):
            if node[0] in MUTABLE:
                made[i] = _shell(node, known)
                unfilled.append((i, node))
            elif node[0] == "record":
                made[i] = special["handle"](node[2], node[6])
        for i, node in enumerate(nodes):
            if node[0] not in MUTABLE and node[0] != "record":
                made[i] = special[node[0]](*node[1:]) if node[0] in special else _frozen(node, made)
        for i, node in unfilled:
            _fill(made[i], _resolve(node[1], made) if node[0] != "bytearray" else bytes.fromhex(node[2]))
        for i, node in enumerate(nodes):
            if node[0] == "record":
                special["record"](made[i], _resolve(node[1], made), *node[3:6])
        return _resolve(refs, made)
    except (ArithmeticError, AttributeError, ImportError, LookupError, RecursionError, TypeError, ValueError):
        raise Malformed from None


def _resolve(items, made):
    return [made[item[0]] if type(item) is list else item for item in items]


def _shell(node, known):
    """Return the container of a node, without its contents."""
    kind, extra = MUTABLE[node[0]], node[2]
    made = kind(maxlen=extra) if kind is deque else kind(extra and TYPES[extra]) if kind is defaultdict else kind()
    found = made if known is None or len(node) < 4 else known.setdefault(node[3], made)
    if type(found) is not kind:
        raise TypeError(kind)
    return found


def _fill(container, items):
    """Give a container other contents, as `parts` returns them."""
    if isinstance(container, (list, bytearray)):
        container[:] = items
        return
    container.clear()
    if isinstance(container, dict):
        half = len(items) // 2
        for key, value in zip(items[:half], items[half:]):  # noqa: B905 - Python 3.8
            container[key] = value  # `update` counts, or forgets the order
    else:
        getattr(container, "update" if isinstance(container, set) else "extend")(items)


def _frozen(node, made):
    tag, *body = node
    if tag in FROZEN:
        return FROZEN[tag](_resolve(body[0], made))
    if tag == "named":
        return named(body[1], tuple(body[2]))(*_resolve(body[0], made))
    if tag == "type":
        return TYPES[body[0]]
    if tag == "ndarray":
        return _array(*body)
    module, _, name = tag.partition(".")
    return LEAVES[tag][1](getattr(importlib.import_module(module), name), *body)


_named = {}


def named(name, fields, defaults=()):
    """Return the one type that stands for the named tuples of that name and these fields."""
    if (name, fields) not in _named:
        _named[name, fields] = namedtuple(name, fields, defaults=defaults)
    return _named[name, fields]


def _array(dtype, shape, items):
    numpy = importlib.import_module("numpy")
    if not _DTYPE.fullmatch(dtype):
        raise ValueError(dtype)
    array = numpy.array(items, dtype=dtype)
    return array[0] if shape is None else array.reshape(shape)
