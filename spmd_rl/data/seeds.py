"""Seeds as counters: a number that depends on what it is for, and on nothing that happened before.

    counter_seed(run_seed, "train", epoch, prompt_id, answer, turn)

A stream of random numbers would tie each draw to all draws before it, and so to batching, placement and resumes.
Python's `hash` is salted per process and is never used.
"""

from functools import lru_cache
from hashlib import blake2b


def counter_seed(*parts: int | str) -> int:
    """64-bit number (0 .. 2**64-1) of the parts: blake2b over an encoding no two lists of parts share.

    Each part is written as its type, its length and itself (`i2:42,` or `s5:train,`), so ("ab", "c") and ("a", "bc")
    differ, and so do 1 and "1". The same on every machine and Python version; a golden test holds it.
    """
    return Seeds(*parts).seed()


class Seeds:
    """The seeds of all lists that begin with these parts: `Seeds(a, b).seed(c)` is `counter_seed(a, b, c)`."""

    __slots__ = ("_begun",)

    def __init__(self, *parts: int | str) -> None:
        self._begun = blake2b(_encode(parts), digest_size=8)

    def seed(self, *parts: int | str) -> int:
        """Of the list that ends with these parts."""
        whole = self._begun.copy()
        whole.update(_encode(parts))
        return int.from_bytes(whole.digest(), "little")


def _encode(parts: tuple[int | str, ...]) -> bytes:
    return "".join(map(_spelled, parts)).encode()


@lru_cache(maxsize=4096, typed=True)
def _spelled(part: int | str) -> str:
    if type(part) is int:
        text = str(part)
        return f"i{len(text)}:{text},"
    assert type(part) is str, f"counter_seed takes int and str, not {part!r}"
    return f"s{len(part.encode())}:{part},"  # its bytes are counted
