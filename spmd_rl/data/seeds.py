"""Counter-based seeds: a random seed is a hash of its purpose, independent of earlier draws.

    counter_seed(run_seed, "train", epoch, prompt_id, answer, turn)

A stream of random numbers would tie each draw to batching, placement and resumes.
"""

from hashlib import blake2b


def counter_seed(*parts: int | str) -> int:
    """Return the 64-bit seed (0 to 2**64 - 1) of a list of parts, with blake2b; the same on every machine and
    Python.
    """
    # Each part is encoded as its type, its length and itself (`i2:42,` or `s5:train,`), so ("ab", "c") and ("a", "bc")
    # differ, and so do 1 and "1". Python's `hash` is salted per process.
    digest = blake2b("".join(map(_encode, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _encode(part: int | str) -> str:
    if type(part) is int:
        text = str(part)
        return f"i{len(text)}:{text},"
    assert type(part) is str, f"counter_seed takes int and str, not {part!r}"
    # The length is that of the UTF-8 bytes.
    return f"s{len(part.encode())}:{part},"
