"""Arrays of numpy: views of one memory stay views of one memory on the other side."""

import importlib
import re
from array import array

MADE_OF_BYTES = bytearray, array
DTYPE = re.compile(r"[<>|]([biufcSU]\d+|[mM]8(\[\w+\])?)")


def is_array(value):
    """Return whether a value is an array of numpy's, of numbers, dates or texts."""
    kind = type(value)
    return kind.__name__ == "ndarray" and kind.__module__ == "numpy" and bool(DTYPE.fullmatch(value.dtype.str))


def memory_of(value):
    """Return the array that owns the memory of an array, or itself if that is no such array's; None of what is none."""
    if not is_array(value):
        return None
    owner = value
    while getattr(owner, "base", None) is not None:
        owner = owner.base
    return owner if is_array(owner) and owner.flags.owndata else value


def refuse_mixed(new, known):
    """Raise ValueError if an array lies in the memory of another container, without being known as a part of that."""
    new, known = ([it for it in each if isinstance(it, MADE_OF_BYTES) or is_array(it)] for each in (new, known))
    foreign = [it for it in (*new, *known) if new and is_array(it) and memory_of(it).base is not None]
    owners = [it for it in (*new, *known) if foreign and not (is_array(it) and memory_of(it).base is not None)]
    if any(importlib.import_module("numpy").may_share_memory(a, b) for a in foreign for b in owners):
        raise ValueError("an array in the memory of something else that crosses")


def layout(array, writeable=None):
    """Return what `made_array` needs beside the memory and the offset, as JSON scalars."""
    writeable = array.flags.writeable if writeable is None else writeable
    return [array.dtype.str, bool(writeable), *array.shape, *array.strides]


def made_array(memory, offset, dtype, writeable, *layout):
    """Return the array of that layout, shape and strides, in some memory."""
    if not DTYPE.fullmatch(dtype):
        raise ValueError(dtype)
    shape, strides = layout[: len(layout) // 2], layout[len(layout) // 2 :]
    made = importlib.import_module("numpy").ndarray(shape, dtype, memory, offset, strides)
    made.flags.writeable = writeable and made.flags.writeable
    return made


def known_array(array, node, known):
    """Return an array that a node describes: the one that is here under its number, changed to be the same, or this."""
    found = array if known is None or len(node) < 4 else known.setdefault(node[3], array)
    if found is not array:
        found.shape = array.shape
        if array.flags.owndata:
            found.flags.writeable = True
            found[...] = array
        found.flags.writeable = array.flags.writeable
        if layout(found) != layout(array):
            raise ValueError("another layout")
    return found
