"""Seeds as counters: a number that depends on what it is for, and on nothing that happened before.

    counter_seed(run_seed, "train", epoch, prompt_id, answer, turn)

A stream of random numbers would tie each draw to all draws before it, and so to batching, placement and resumes.
Python's `hash` is salted per process and is never used.
"""

from hashlib import blake2b


def counter_seed(*parts: int | str) -> int:
    """64-bit number (0 .. 2**64-1) of the parts: blake2b over an encoding no two lists of parts share.

    Each part is written as its type, its length and itself (`i2:42,` or `s5:train,`), so ("ab", "c") and ("a", "bc")
    differ, and so do 1 and "1". The same on every machine and Python version; a golden test holds it.
    """
    return int.from_bytes(blake2b(_encode(parts), digest_size=8).digest(), "little")


def _encode(parts: tuple[int | str, ...]) -> bytes:
    chunks = []
    for part in parts:
        assert type(part) in (int, str), f"counter_seed takes int and str, not {part!r}"
        text = str(part).encode()
        chunks.append(b"%b%d:%b," % (b"i" if type(part) is int else b"s", len(text), text))
    return b"".join(chunks)
