"""Token ids of pictures: negative numbers that are a hash of the picture.

    prompt_ids = text_ids + picture_ids(data, 64) + more_text_ids

All code that compares token ids keeps pictures apart without a change: the engines' prefix caches, the prefix trees of
training, a resumed rollout. A model gets its own placeholder token and the picture's features instead. A negative id
that reached an embedding would be an error there, never a silent mistake.
"""

from array import array
from hashlib import shake_256


def picture_ids(data: bytes, count: int) -> array:
    """Return `count` negative token ids ('i') for the picture with these encoded bytes.

    Each of them depends on all of the bytes, so different pictures differ in their first id already, except for one
    pair in 2**31.
    """
    digest = array("I", shake_256(data).digest(4 * count))
    return array("i", (-1 - (word >> 1) for word in digest))
