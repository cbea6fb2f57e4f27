"""The plain values that travel between tests and the code that they test, as JSON: no object of the code ever does.

A message holds a table of nodes, one for each object that is no scalar; `[i]` in it stands for the object of node i. So
nesting has no limit, and an object that occurs twice stays one object. Only objects of exactly the types named here
have a plain form. A subclass has none: it might answer for itself. An object of named fields travels as their record,
beside its number.

    refs, nodes = encode([{"a": [1, 2]}], other)
    (value,) = decode(refs, nodes, {})
"""

import builtins
import datetime
import gc
import importlib
import json
import operator
import types
from array import array
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque, namedtuple

from spmd_rl.sandbox.guest.arrays import DTYPE, MADE_OF_BYTES, is_array, known_array, layout, made_array, memory_of
from spmd_rl.sandbox.guest.classes import is_unchanged, same_code

SCALARS = frozenset((type(None), bool, int, float, str))
MUTABLE = list, set, deque, dict, OrderedDict, Counter, defaultdict, types.SimpleNamespace, *MADE_OF_BYTES
MUTABLE = {kind.__name__: kind for kind in MUTABLE}
VIEWS = {type(getattr(made, name)()): name for made in ({}, OrderedDict()) for name in ("keys", "values", "items")}
FROZEN = {
    "tuple": tuple,
    "frozenset": frozenset,
    "named": lambda items, kind: named(kind[0], tuple(kind[1]))(*items),
    "nan": lambda items: float("nan"),
    "view": lambda items: _method(items[0], {name: name for name in VIEWS.values()}[items[1]])(),
    "method": lambda items: _method(*items),
    "part": lambda items: made_array(items[0].ravel("K"), *items[1:]),
    "error": lambda items: {kind.__name__: kind for kind in _ERRORS}[items[0]](*items[1:]),
    "leaf": lambda items: _made_leaf(*items),
    "slice": lambda items: slice(*items),
    "proxy": lambda items: types.MappingProxyType(*items),
    "chain": lambda items: _chain(*items),
    "zone": lambda items: datetime.timezone(*items),
}
KEPT = {"tuple", "frozenset", "named", "nan", "error", "leaf", "slice", "proxy", "chain", "zone"}
NUMBERED = {*MUTABLE, *KEPT, "ndarray", "part"}
"""Nodes of what has a number, by which the other side knows it again: containers, arrays, and parts of arrays; and what
cannot change, `KEPT`, so that it is the same object when it comes back."""
_PLAIN = (bool, int, float, complex, str, bytes, tuple, frozenset, range, object, type(None), *MUTABLE.values())
_OWNERS = {str, *MUTABLE.values()}
_ERRORS = [kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, Exception)]
_ITEMS = {tuple: "tuple", frozenset: "frozenset", float: "nan", slice: "slice", types.MappingProxyType: "proxy"}
_ITEMS.update({ChainMap: "chain", datetime.timezone: "zone"})
_ITEMS.update({**dict.fromkeys(VIEWS, "view"), **dict.fromkeys(_ERRORS, "error")})
TYPES = {kind.__name__: kind for kind in (*_PLAIN, *_ERRORS)}
TYPES.update(Ellipsis=Ellipsis, NotImplemented=NotImplemented)
_WITHIN = {ChainMap: lambda chain: [chain.maps], datetime.timezone: datetime.timezone.__getinitargs__}
_MOMENT = (
    lambda d: [d.isoformat(), d.fold, *(d.tzinfo.__getinitargs__()[1:] if d.tzinfo else ())],
    lambda kind, text, *rest: _moment(kind.fromisoformat(text), *rest),
)
LEAVES = {
    "builtins.bytes": (lambda b: [b.hex()], lambda kind, text: kind.fromhex(text)),
    "builtins.complex": (lambda z: [z.real, z.imag], lambda kind, *parts: kind(*parts)),
    "builtins.range": (lambda r: [r.start, r.stop, r.step], lambda kind, *parts: kind(*parts)),
    "decimal.Decimal": (lambda d: [str(d)], lambda kind, text: kind(text)),
    "fractions.Fraction": (lambda f: [str(f)], lambda kind, text: kind(text)),
    "datetime.date": (lambda d: [d.isoformat()], lambda kind, text: kind.fromisoformat(text)),
    **dict.fromkeys(("datetime.time", "datetime.datetime"), _MOMENT),
    "datetime.timedelta": (lambda t: [t.days, t.seconds, t.microseconds], lambda kind, *parts: kind(*parts)),
    "uuid.UUID": (lambda u: [str(u)], lambda kind, text: kind(text)),
}
"""By the name of an exact type: the function to JSON scalars, and the function back."""


# -- messages -------------------------------------------------------------------------------------------------------


def dumps(message):
    """Return a message as JSON bytes. ValueError if an integer in it has more digits than this interpreter allows."""
    return _ENCODER.encode(message).encode("utf-8", "surrogatepass")  # half characters side by side stay two


def loads(body):
    """Return what JSON bytes hold. ValueError or RecursionError if they are none, or hold an object or an integer that
    is too long."""
    return _DECODER.decode(body.decode("utf-8", "surrogatepass"))


def _refuse(pairs):
    raise ValueError("an object")


_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(object_pairs_hook=_refuse)


# -- to JSON --------------------------------------------------------------------------------------------------------


def encode(roots, other, known=None, number=None, record=None):
    """Return (references to the roots, nodes).

    `other(value)` returns the node of an object without a plain form, or raises. `known(value)`: the number of a
    thing that the receiver has as it is, or None. `number(value)` returns the number by which a thing is known from now
    on. `record(value)` returns the values of an object's fields and the rest of its node, or None.
    """
    nodes, refs, entered, unfilled, kept = [], {}, set(), [], {}
    stack = [root for root in roots if not _is_scalar(root)]
    while stack:
        value = stack.pop()
        kind, key = type(value), id(value)
        if key in refs:
            continue
        memory = memory_of(value)
        is_container = memory is value or (MUTABLE.get(kind.__name__) is kind and _is_plain_container(value))
        is_frozen = memory is not None or kind in _ITEMS or _is_method(value) or is_named(kind)
        is_frozen = is_frozen and is_unchanged(kind)
        place = known(value) if known else None
        held = (parts(value), None) if is_container else record(value) if record and not is_frozen else None
        if place:
            node = ["known", place]
        elif held:
            refs[key] = [len(nodes)]
            unfilled.append((len(nodes), value, *held))
            nodes.append(None)
            stack += [part for part in held[0] if id(part) not in entered and not _is_scalar(part)]
            continue
        elif is_frozen:
            if key not in kept:
                kept[key] = _items(value, kind)
            items = kept[key]
            if key not in entered and not _are_scalars(items):
                entered.add(key)
                stack.append(value)
                stack += [part for part in items if id(part) not in entered and not _is_scalar(part)]
                continue
            node = [_ITEMS.get(kind, "method" if memory is None else "part"), _refer(items, refs)]
            if hasattr(kind, "_fields"):
                _named[kind.__name__, kind._fields] = kind
                node = ["named", node[1], [kind.__name__, list(kind._fields)]]
        else:
            node = _leaf(value) or other(value)
        if number and (node[0] == "part" or (node[0] in KEPT and (node[1] or kind is float))):
            node = [node[0], node[1], node[2] if len(node) > 2 else None, number(value)]
        refs[key] = [len(nodes)]
        nodes.append(node)
    for i, value, items, rest in unfilled:
        nodes[i] = [type(value).__name__, _refer(items, refs), _extra(value)]
        if rest:
            nodes[i] = ["record", _refer(items, refs), *rest]
        elif number:
            nodes[i].append(number(value))
    return _refer(roots, refs), nodes


def _items(value, kind):
    if (memory := memory_of(value)) is not None:
        offset = value.__array_interface__["data"][0] - memory.__array_interface__["data"][0]
        return [memory, offset, *layout(value)]
    if _is_method(value):
        return [value.__self__, value.__name__]
    if _ITEMS.get(kind) == "error":
        path = [value.filename] if isinstance(value, OSError) and value.filename is not None else []
        return [kind.__name__, *BaseException.args.__get__(value), *path]
    if kind in (slice, ChainMap, datetime.timezone):
        return [value.start, value.stop, value.step] if kind is slice else list(_WITHIN[kind](value))
    if kind not in VIEWS and kind is not types.MappingProxyType:
        return [] if kind is float else list(value)
    (mapping,) = gc.get_referents(value)
    if kind not in VIEWS:
        return [mapping]
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
    if isinstance(value, MADE_OF_BYTES) or is_array(value):
        return []
    value = vars(value) if type(value) is types.SimpleNamespace else value
    return [*value, *value.values()] if isinstance(value, dict) else list(value)


def contents(container):
    """Return what is in a container, to find later whether that has changed; None of what cannot change."""
    if is_array(container):
        own = container.tobytes() if memory_of(container) is container else b""
        return repr(layout(container)).encode() + own
    if type(container).__name__ not in MUTABLE:
        return None
    return bytes(container) if isinstance(container, MADE_OF_BYTES) else tuple(parts(container))


def same_items(left, right):
    """Return whether two sequences have the same objects, or bytes."""
    return left == right if type(left) is bytes else len(left) == len(right) and all(map(operator.is_, left, right))


def _is_scalar(item):
    """Return whether an item is a scalar without an identity: NaN is equal to nothing but itself."""
    return type(item) in SCALARS and item == item


def _are_scalars(items):
    return SCALARS.issuperset(map(type, items)) and not any(map(operator.ne, items, items))


def _refer(items, refs):
    if _are_scalars(items):
        return list(items)
    return [item if _is_scalar(item) else refs[id(item)] for item in items]


def _extra(value):
    """Return what a container has beside its items: the end of a deque, the factory of a default dictionary, bytes."""
    if isinstance(value, defaultdict):
        return value.default_factory and value.default_factory.__name__
    if isinstance(value, MADE_OF_BYTES):
        return [bytes(value).hex(), *([value.typecode] if type(value) is array else [])]
    if is_array(value):
        kept = value.copy("K")  # without gaps; what shares memory in an unknown way can only be read over there
        return [kept.ravel("K").tobytes().hex(), 0, *layout(kept, value.flags.writeable and value.flags.owndata)]
    return value.maxlen if isinstance(value, deque) else None


def _is_plain_container(value):
    """Return whether a container has no function of anybody's own in it."""
    factory = value.default_factory if type(value) is defaultdict else None
    return is_unchanged(type(value)) and (factory is None or TYPES.get(getattr(factory, "__name__", "")) is factory)


def is_named(kind):
    """Return whether a type is what `namedtuple` makes, with nothing added or replaced by hand."""
    if kind.__bases__ != (tuple,) or not hasattr(kind, "_fields"):
        return False
    own = [*vars(kind).values()]
    if _seen.get(kind) != own:
        twin, rest = vars(namedtuple("Any", kind._fields)), vars(kind).keys() - _NAMED
        if rest != twin.keys() - _NAMED or not all(same_code(vars(kind)[name], twin[name]) for name in rest):
            return False
        probe = tuple.__new__(kind, range(len(kind._fields)))
        if any(getattr(probe, name) != i for i, name in enumerate(kind._fields)):
            return False
        _seen[kind] = own
    return True


_seen = {}


_NAMED = {"__annotations__", "__orig_bases__", "__annotate_func__", "__doc__", "__module__", "_field_defaults"}
_NAMED |= {"__static_attributes__", "__firstlineno__", "__annotations_cache__", "__annotate__", "_fields_defaults"}


def _leaf(value):
    kind = type(value)
    path = f"{kind.__module__}.{kind.__name__}"
    if path in LEAVES and type(getattr(value, "tzinfo", None)) in (type(None), datetime.timezone):
        node = ["leaf", [path, *LEAVES[path][0](value)]]
        is_same = kind.__module__ == "builtins" or repr(_made_leaf(*node[1])) == repr(value)
        return node if is_same and is_unchanged(kind) else None  # a fraction may not be reduced
    if value is ... or value is NotImplemented:
        return ["type", repr(value)]
    if kind is type and TYPES.get(value.__name__) is value:
        return ["type", value.__name__]
    if kind.__module__ == "numpy" and "generic" in {base.__name__ for base in kind.__mro__}:
        return ["scalar", value.tobytes().hex(), value.dtype.str] if DTYPE.fullmatch(value.dtype.str) else None
    return None


def _moment(made, fold, *name):
    """Return a time with that fold, whose time zone has that name."""
    return made.replace(fold=fold, tzinfo=datetime.timezone(made.utcoffset(), *name) if name else made.tzinfo)


# -- from JSON ------------------------------------------------------------------------------------------------------


def decode(refs, nodes, special, known=None):
    """Return the values of references. An exception of any kind if they are none.

    `special`: by a node's first word, a function from the rest of the node to an object. `known`: containers by number;
    a node with such a number changes that container, and a container with another number is added.
    """
    made, unfilled = [None] * len(nodes), []
    for i, node in enumerate(nodes):
        if node[0] in MUTABLE:
            made[i] = _shell(node, known)
            unfilled.append((i, node))
        elif node[0] == "ndarray":
            array = made_array(bytes.fromhex(node[2][0]), *node[2][1:]).copy("K")
            array.flags.writeable = node[2][3]
            made[i] = known_array(array, node, known)
        elif node[0] == "record":
            made[i] = special["handle"](*node[2:4])
    for i, node in enumerate(nodes):
        if node[0] == "part":
            made[i] = known_array(_frozen(node, made), node, known)
        elif node[0] not in MUTABLE and node[0] not in ("record", "ndarray"):
            made[i] = special[node[0]](*node[1:]) if node[0] in special else _frozen(node, made)
            if node[0] in KEPT and len(node) > 3 and known is not None:
                made[i] = known.setdefault(node[3], made[i])
    for i, node in unfilled:
        _fill(made[i], _resolve(node[1], made), node[2])
    for i, node in enumerate(nodes):
        if node[0] == "record":
            special["record"](made[i], _resolve(node[1], made), *node[4:])
    return _resolve(refs, made)


def _resolve(items, made):
    return [made[item[0]] if type(item) is list else item for item in items]


def _shell(node, known):
    """Return the container of a node, without its contents."""
    kind, extra = MUTABLE[node[0]], node[2]
    given = [extra and TYPES[extra]] if kind is defaultdict else extra[1:] if kind is array else []
    made = kind(maxlen=extra) if kind is deque else kind(*given)
    found = made if known is None or len(node) < 4 else known.setdefault(node[3], made)
    if type(found) is not kind:
        raise TypeError(kind)
    return found


def _fill(container, items, extra):
    """Give a container other contents, as `parts` and `_extra` return them."""
    if isinstance(container, MADE_OF_BYTES):
        items = type(container)(*extra[1:], bytes.fromhex(extra[0]))
    if isinstance(container, (list, *MADE_OF_BYTES)):
        container[:] = items
        return
    container = vars(container) if type(container) is types.SimpleNamespace else container
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
        return FROZEN[tag](_resolve(body[0], made), *body[1:2] if tag == "named" else [])
    if tag == "type":
        return TYPES[body[0]]
    return made_array(bytes.fromhex(body[0]), 0, body[1], False)[()]


def _made_leaf(path, *said):
    module, _, name = path.partition(".")
    return LEAVES[path][1](getattr(importlib.import_module(module), name), *said)


def _chain(maps):
    made = ChainMap()
    made.maps = maps
    return made


_named = {}


def named(name, fields, defaults=()):
    """Return the one type that stands for the named tuples of that name and these fields."""
    if (name, fields) not in _named:
        _named[name, fields] = namedtuple(name, fields, defaults=defaults)
    return _named[name, fields]
