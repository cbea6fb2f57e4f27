"""Token ids of pictures: negative numbers that are a hash of the picture.

    prompt_ids = text_ids + picture_ids(data, 64) + more_text_ids

Code that compares token ids keeps pictures apart: prefix caches, prefix trees of training, a resumed rollout. A model
gets its placeholder token and the picture's features instead; a negative id in an embedding would be an error.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import shake_256
from itertools import islice
from pathlib import Path

from spmd_rl.types.data import Message


def picture_ids(data: bytes, count: int) -> array:
    """Return `count` negative token ids ('i') for the picture with these encoded bytes.

    Each depends on all of the bytes, so different pictures differ in their first id, except for one pair in 2**31.
    """
    digest = array("I", shake_256(data).digest(4 * count))
    return array("i", (-1 - (word >> 1) for word in digest))


def first_id(data: bytes) -> int:
    """Return the first token id of the picture with these encoded bytes."""
    return picture_ids(data, 1)[0]


def pictures_of(messages: Iterable[Message]) -> tuple[bytes, ...]:
    """Return the encoded pictures of messages, in order."""
    parts = (part for message in messages for part in message.pictures)
    return tuple(part.data or Path(part.path).read_bytes() for part in parts)


def split_pictures(parts: Iterable[array], pictures: Sequence[bytes]) -> list[tuple[bytes, ...]]:
    """Return the encoded pictures of each part ('i') of a text, which has the ids of `pictures` in this order."""
    heads, found, number = [picture_ids(data, 2) for data in pictures], [], 0
    for ids in parts:
        first = number
        for place in (place for place, id in enumerate(ids) if id < 0) if heads else ():
            seen = [id for id in ids[place : place + 2] if id < 0]
            if number < len(heads) and seen == heads[number][: len(seen)].tolist():
                number += 1
        found.append(tuple(pictures[first:number]))
    return found


def pictures_in(ids: array, known: Mapping[int, bytes], count: Callable[[bytes], int]) -> tuple[bytes, ...]:
    """Return the encoded pictures of token ids ('i'), in order. KeyError for one that is not known.

    known: encoded pictures by their first id. count: returns the number of ids of a picture.
    """
    found, left = [], (id for id in ids if id < 0)
    for id in left:
        found.append(known[id])
        # Skip its other ids.
        for _ in islice(left, count(known[id]) - 1):
            pass
    return tuple(found)
