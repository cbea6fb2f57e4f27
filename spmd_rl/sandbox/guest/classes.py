"""What the code's side says of classes: for which a copy may stand, how their objects are compared, and of what fields
they are made. A copy stands for an object only if its class has no operator that the copy lacks."""

import dataclasses
import enum
import functools
import operator
import types
import typing
import uuid
from collections import ChainMap, Counter
from fractions import Fraction

from spmd_rl.sandbox.guest.remote import ASKED, REFUSED


def is_unchanged(kind):
    """Return whether a class, if it is one of those that are written in Python, has what it had before the code ran."""
    if kind not in WRITTEN:
        return True
    return all(_own(base) == WRITTEN[base] for base in kind.__mro__ if base in WRITTEN)


def _own(kind):
    return {name: it for name, it in vars(kind).items() if name != "__slotnames__"}  # which `copy` keeps there


_KINDS = [ChainMap, Counter, Fraction, uuid.UUID, typing.Protocol, *vars(enum).values()]
_KINDS = [kind for kind in _KINDS if isinstance(kind, type) and kind.__module__ != "builtins"]
_KINDS = {base for kind in _KINDS for each in (kind, type(kind)) for base in each.__mro__}
HEAP = 1 << 9  # the flag of classes that can be changed
WRITTEN = {kind: _own(kind) for kind in _KINDS if kind.__flags__ & HEAP}
"""Classes of Python's own that are written in Python, so that the code can change them, as they are before it runs."""


def same_code(one, two):
    """Return whether two functions do the same, as far as their code says: the globals may differ; of other things,
    whether they are of one type."""
    one, two = (getattr(it, "__func__", it) for it in (one, two))
    if type(one) is not types.FunctionType or type(two) is not types.FunctionType:
        return type(one) is type(two)
    return _CODE(one.__code__) == _CODE(two.__code__)


_CODE = operator.attrgetter("co_code", "co_names", "co_varnames", "co_argcount", "co_flags")


def traits(kind):
    """Return of a class whether its objects say themselves whether they are true (others all are); how they are
    compared and hashed: as `identity` (a `member` of an enum too), by their `fields`, in a way of their `own`, or
    `none`; and whether their order is that of their fields.

    A copy stands for an object only if its class, the bases and the metaclass define nothing that the copy has not, as
    `specials` says; else the object is compared and hashed in a way of its own, which is never asked for. What
    `dataclass` makes is known by its code. An answer can fool this: it can change this process, or what
    `NotImplemented` means there. It gains nothing over plain classes: what crosses must still be right.
    """
    is_enum, is_value = isinstance(kind, enum.EnumMeta), issubclass(kind, (int, float, str, tuple))
    is_own = bool(specials(kind) - (set() if is_value else OPERATORS) or specials(type(kind)) - OPERATORS)
    is_own = is_own or not keeps_fields(kind)
    found = [any(name in vars(base) for base in kind.__mro__ for name in ("__bool__", "__len__"))]
    for name in ("__eq__", "__hash__"):
        method = getattr(kind, name)
        mode = next((mode for known, mode in _MODES[name] if known is method), "none" if method is None else "own")
        mode = "fields" if is_generated(kind, name) else mode
        if is_enum or mode == "member":
            mode = "member" if is_enum and mode in ("identity", "member") else "own"
        found.append("own" if is_own else mode)
    return [*found, all(is_generated(kind, f"__{name}__") for name in ("lt", "le", "gt", "ge"))]


def _names(text):
    return frozenset(f"__{name}__" for name in text.split())


PLAIN = _names(
    """
annotate annotate_func annotations annotations_cache call class_getitem copy dataclass_fields dataclass_params deepcopy
del delattr dict dir doc eq firstlineno format getattr getnewargs getstate hash init init_subclass match_args module
new orig_bases parameters post_init prepare qualname reduce reduce_ex replace repr set_name setattr setstate sizeof
slotnames slots static_attributes str subclasshook type_params weakref
"""
)
"""What makes an object, names it, or is called and read over there; `eq` and `hash` are looked at by themselves."""
OPERATORS = _names(" ".join([REFUSED, *ASKED]))
"""What is called over there or refused, if an object is not a number, text or tuple too, as its copy then is."""
_MODES = (
    (object, "identity"),
    (tuple, "fields"),
    (enum.Enum, "member"),
    *((kind, "member") for kind in (int, float, str)),
)
_MODES = {name: [(getattr(kind, name), mode) for kind, mode in _MODES] for name in ("__eq__", "__hash__")}


_FLAGS = {id(getattr(kind, name)) for kind in (enum.Flag, enum.IntFlag) for name in dir(kind)}  # subclasses have them


def specials(kind):
    """Return the special methods beyond the plain ones that a class and its bases define themselves; of an enum of
    numbers or texts, any method of these. What Python brings along unchanged is left out."""
    found, plain = set(), next((each for each in (int, str, float) if issubclass(kind, each)), object)
    own = frozenset(dir(plain)) - frozenset(dir(object)) if isinstance(kind, enum.EnumMeta) else frozenset()
    own -= frozenset(kind.__members__ if own else ())
    for base in kind.__mro__:
        if base.__flags__ & HEAP and not (base in WRITTEN and is_unchanged(base)):
            names = [name for name in vars(base) if name in own or (name[:2] == name[-2:] == "__")]
            found.update(name for name in names if id(vars(base)[name]) not in _FLAGS)
    return found - PLAIN


def is_generated(kind, name):
    """Return whether a method of a class is what `dataclass` makes of the fields that it has."""
    if not hasattr(kind, "__dataclass_params__"):
        return False
    said = []
    for field in dataclasses.fields(kind):
        known = {"compare": field.compare, "hash": field.hash}
        given = [each for each in _DEFAULTS if name == "__init__" and getattr(field, each) is not dataclasses.MISSING]
        said.append((field.name, *known.items(), *((each, list) for each in given)))
    return same_code(getattr(kind, name), getattr(_twin(kind.__dataclass_params__.frozen, *said), name))


def keeps_fields(kind):
    """Return whether the objects of a class, if it is a dataclass, have in its fields what they are given."""
    if not hasattr(kind, "__dataclass_params__"):
        return True
    held = [vars(base)[name] for name in fields_of(kind) for base in kind.__mro__ if name in vars(base)]
    return is_generated(kind, "__setattr__") and not any(
        hasattr(type(it), "__set__") and type(it) is not _SLOT for it in held
    )


_SLOT = types.MemberDescriptorType
_DEFAULTS = "default", "default_factory"


@functools.lru_cache(None)
def _twin(frozen, *said):
    fields = [(name, object, dataclasses.field(**dict(given))) for name, *given in said]
    return dataclasses.make_dataclass("Twin", fields, order=True, unsafe_hash=True, frozen=frozen)


def compared(kind):
    """Return the names of the fields by which objects of a class are compared."""
    if hasattr(kind, "__dataclass_fields__"):
        return [field.name for field in dataclasses.fields(kind) if field.compare]
    return list(getattr(kind, "_fields", ()))


def plain_of(value):
    """Return the number or text that a member of an enum is, None if it is neither."""
    kind = next((kind for kind in (int, str, float) if isinstance(value, kind)), None)
    return kind and (str.__getitem__(value, slice(None)) if kind is str else kind.__pos__(value))


def fields_of(kind):
    """Return the names of the fields of a dataclass or a named tuple, else None."""
    if hasattr(kind, "__dataclass_fields__"):
        return [field.name for field in dataclasses.fields(kind)]
    return list(kind._fields) if issubclass(kind, tuple) and hasattr(kind, "_fields") else None


def operators_of(kind):
    """Return the names of the operators that a class of exceptions has beyond those of a builtin one."""
    said = [name for name, mode in zip(("__eq__", "__hash__"), traits(kind)[1:]) if mode != "identity"]  # noqa: B905
    said += ["__str__"] * (type(kind.__str__) is types.FunctionType)
    return sorted(name[2:-2] for name in specials(kind).union(said))
