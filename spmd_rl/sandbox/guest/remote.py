"""What stands for objects of the code on the tests' side: a name, an object, or an iterator. See `stubs`."""

import builtins
import importlib
import math
import operator

ASKED = ["delitem", "getitem", "iter", "len", "next", "repr", "setitem", "str"]
"""Special methods that are called on the code's side, of objects that the tests have made of its classes."""
REFUSED = """
abs add aenter aexit aiter and anext await bool bytes ceil complex contains dir divmod enter exit float floor floordiv
format fspath ge gt iadd iand ifloordiv ilshift imatmul imod imul index int invert ior ipow irshift isub itruediv ixor
le lshift lt matmul mod mro_entries mul neg or pos pow radd rand rdivmod reduce_ex reversed rfloordiv
rlshift rmatmul rmod rmul ror round rpow rrshift rshift rsub rtruediv rxor sizeof sub truediv trunc xor
"""

TEXTS = "str", "repr", "format"
"""Those of any object."""


class Pending(Exception):
    """Raised for an object that the tests have made here and that the code has not made yet."""


class Maker:
    """A class whose objects are nothing but fields. Tests make them here: the code does not learn what is expected."""

    def __init__(self, kind, fields, defaults, is_tuple, compared, traits):
        """`defaults` are those of the last fields; a type among them makes one."""
        self.kind, self.fields, self.defaults, self.is_tuple = kind, fields, defaults, is_tuple
        self.compared, self.traits = compared, traits

    def record(self, args, kwargs):
        """Return the record of an object made with these arguments: all that the tests give is compared, whatever the
        class says. TypeError if they do not fit."""
        inspect = importlib.import_module("inspect")
        defaults = [inspect.Parameter.empty] * (len(self.fields) - len(self.defaults)) + list(self.defaults)
        wanted = dict(zip(self.fields, defaults))  # noqa: B905 - Python 3.8
        parameters = [inspect.Parameter(name, 1, default=default) for name, default in wanted.items()]
        given = inspect.Signature(parameters).bind(*args, **kwargs).arguments
        made = {name: it() if it in (list, dict, set) else it for name, it in wanted.items() if name not in given}
        found = {**given, **made}
        return self.kind, self.fields, tuple(found[name] for name in self.fields), self.is_tuple, self.compared, given


class Remote:
    """Stands for a name or an object of the code's."""

    __slots__ = ("client", "made", "maker", "node", "record", "traits")

    def __init__(self, client, node, maker=None, record=None, made=None):
        """`node`: how the code's side finds it; None before the code has made it as `made` says: (class, arguments)."""
        traits = maker_of(made[0]).traits if record else (True, *["identity" if maker else "own"] * 2, False)
        for name, value in zip(Remote.__slots__, (client, made, maker, node, record, traits)):  # noqa: B905 - Python 3.8
            object.__setattr__(self, name, value)

    def __call__(self, *args, **kwargs):
        client, maker, node = _client(self), maker_of(self), node_of(self)
        if maker:
            return Remote(client, None, None, maker.record(args, kwargs), (self, args, kwargs))
        found = client.ask("call", self, [*args, *kwargs.values()], kwargs)
        if type(found) is Remote and _is_name(node) and node[1][:1].isupper():
            _set_made(found, (self, args, kwargs))
        return found

    def __getattribute__(self, name):
        if name == "__name__" and _is_name(node_of(self)):  # `assertRaises` shows it
            return node_of(self)[1]
        if name in ("__copy__", "__deepcopy__"):
            return object.__getattribute__(self, name)
        if name == "__wrapped__":  # pytest looks for it
            raise AttributeError(name)
        if name == "__class__" and _client(self).collects:  # pytest looks whether a parameter is of a kind of its own
            return Remote
        if name.startswith("__") and name not in ("__name__", "__doc__", "__qualname__"):
            _client(self).want(f"the tests read {name} of an object of the code's")
        return _client(self).ask("get", self, [], [name])

    def __setattr__(self, name, value):
        _client(self).ask("set", self, [value], [name])

    def __eq__(self, other):
        if type(value := value_of(self)) is not Remote:
            return value == other
        if type(other) is Remote and type(value := value_of(other)) is not Remote:
            return self == value
        mine, theirs = record_of(self), record_of(other) if type(other) is Remote else None
        modes = {_traits(self)[1], _traits(other)[1] if type(other) is Remote else ""}
        if modes == {"fields"} and mine and theirs:
            return other is self or _are_equal(mine, theirs)
        if mine and mine[3] and type(other) is not Remote:
            return mine[2] == other
        if modes <= {"identity", "member", "fields"}:
            return other is self
        if "own" not in modes and (mine or "member" in modes or other is None):  # its fields are no other value's
            return False
        return _client(self).want("the tests compare an object of the code's", other)

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        if type(value := value_of(self)) is not Remote:
            return value.__hash__()
        (_, equal, hashed, _), record = _traits(self), record_of(self)
        if hashed == "none":
            raise TypeError("unhashable type")
        if hashed == equal and equal != "own" and (record or equal != "fields"):
            return tuple(_compared(record, record[4])).__hash__() if equal == "fields" else id(self)
        return _client(self).want("the tests hash an object of the code's")

    def __instancecheck__(self, thing):
        return _client(self).ask("isinstance", self, [thing]) is True

    def __subclasscheck__(self, thing):
        return _client(self).ask("issubclass", self, [thing]) is True


_client, _made, maker_of, node_of, record_of, _traits = (vars(Remote)[name].__get__ for name in Remote.__slots__)
_set_node, set_record, _set_made, set_traits = (vars(Remote)[n].__set__ for n in ("node", "record", "made", "traits"))


def _compared(record, names):
    return [value for name, value in zip(record[1], record[2]) if name in names]  # noqa: B905 - Python 3.8


def _are_equal(mine, theirs):
    """Return whether two records are of one class and equal in all fields that either is compared by, or tuples."""
    if mine[3] and theirs[3]:
        return mine[2] == theirs[2]
    names = {*mine[4], *mine[5], *theirs[5]}
    return mine[:2] == theirs[:2] and _compared(mine, names) == _compared(theirs, names)


def settle(remote):
    """Have the code make an object that the tests have made here."""
    kind, args, kwargs = _made(remote)
    found = _client(remote).ask("call", kind, [*args, *kwargs.values()], kwargs)
    if type(found) is not Remote:
        _client(remote).refuse("a class of the code's makes no objects")
    _set_node(remote, node_of(found))
    _client(remote).remotes[tuple(node_of(found))] = remote


def value_of(remote):
    """Return what the code has under a name, if that is plain, else what stands for it."""
    return _client(remote).ask("value", remote) if _is_name(node_of(remote)) and not maker_of(remote) else remote


def _is_name(node):
    return bool(node) and node[0] in ("name", "first")


def _special(name):
    def special(self, *args):
        client, node, record = _client(self), node_of(self), record_of(self)
        if record and record[3] and name not in TEXTS:
            return _apply(name, record[2], *(_tuple_of(arg) for arg in args))
        if type(value := value_of(self)) is not Remote:
            return _apply(name, value, *args)
        is_name = _is_name(node)
        if name in ("str", "repr") and is_name:
            return f"<{node[1]}>"
        if name == "bool" and (not _traits(self)[0] or is_name):
            return True
        if name in ("lt", "le", "gt", "ge") and _are_ordered(self, *args):
            return _apply(name, *(tuple(_compared(record_of(it), record[4])) for it in (self, *args)))
        known = name in ASKED and (_made(self) or record or (is_name and name in ("getitem", "iter", "len")))
        if name in TEXTS or known:
            return client.ask(name, self, args)
        return client.want(f"the tests use __{name}__ of an object of the code's", *args)

    return special


def _tuple_of(thing):
    record = record_of(thing) if type(thing) is Remote else None
    return record[2] if record and record[3] else thing


def _are_ordered(one, two):
    """Return whether two objects are of one class whose order is that of its fields."""
    records = [record_of(it) if type(it) is Remote and _traits(it)[3] else None for it in (one, two)]
    return all(records) and records[0][0] == records[1][0] and "own" not in (_traits(one)[1], _traits(two)[1])


def _apply(name, value, *args):
    """Do what a special method of a plain value does."""
    if name[0] == "r" and hasattr(operator, name[1:]) and args:  # of the right operand
        return getattr(operator, name[1:])(args[0], value)
    found = [getattr(module, name) for module in (operator, builtins, math) if hasattr(module, name)]
    if not found:
        raise TypeError(f"{type(value).__name__} has no __{name}__")
    return found[0](value, *args)


Remote.__copy__ = lambda self: _client(self).ask("copy", self)
Remote.__deepcopy__ = lambda self, memo: _client(self).ask("deepcopy", self)
for _name in (*ASKED, *REFUSED.split()):
    setattr(Remote, f"__{_name}__", _special(_name))


def member(remote, plain):
    """Return what stands for an enum's member that is a number or a text too: the same here, with its attributes."""

    def ask(verb):
        return lambda self, *given: _client(remote).ask(verb, remote, given)

    names = {name: ask(name[2:-2]) for name in ("__str__", "__repr__", "__format__")}
    made = {"__getattr__": lambda self, name: getattr(remote, name), "remote_of": lambda self: remote, **names}
    return type("Member", (type(plain),), made)(plain)
