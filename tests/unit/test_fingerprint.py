"""A fingerprint notices what copies and exchanges do to a tensor, and needs no memory of its size."""

from collections.abc import Callable

import pytest
import torch
import xxhash
from torch import Tensor

from spmd_rl.model import fingerprint as room
from spmd_rl.model.fingerprint import PENDING, ROWS, WHOLE, WORDS, Fingerprints, fingerprint, fingerprints

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool]
BLOCK = ROWS * WORDS
"""Words of a block"""


def words(count: int, seed: int = 0) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(seed))


def expected(data: bytes) -> bytes:
    """The definition, in plain Python."""
    if len(data) <= WHOLE:
        return xxhash.xxh3_128_digest(data)
    num_rows = len(data) // (8 * WORDS)
    if num_rows % ROWS and num_rows % ROWS % 2 == 0:
        num_rows -= 1
    inside = num_rows * 8 * WORDS
    all_words = [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, inside, 8)]
    rows = [all_words[i : i + WORDS] for i in range(0, len(all_words), WORDS)]
    whole, rest = rows[: len(rows) // ROWS * ROWS], rows[len(rows) // ROWS * ROWS :]
    blocks = [whole[i : i + ROWS] for i in range(0, len(whole), ROWS)]
    found = [sum(row) for block in blocks for row in block]
    found += [sum(column) for block in blocks for column in zip(*block, strict=True)]
    found += [sum(row) for row in rest] + [sum(column) for column in zip(*rest, strict=True)]
    packed = b"".join((value % 2**64).to_bytes(8, "little") for value in found)
    return xxhash.xxh3_128_digest(packed + data[inside:])


@pytest.mark.parametrize(
    "size", [0, 1, WHOLE, WHOLE + 1, 8 * BLOCK - 1, 8 * BLOCK, 8 * (2 * BLOCK + 3 * WORDS + 5) + 3]
)
def test_definition(size: int) -> None:
    data = words(-(-size // 8)).view(torch.uint8)[:size]
    assert fingerprint(data) == expected(data.numpy().tobytes())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bit_of_a_small_tensor_and_its_place(dtype: torch.dtype) -> None:
    tensor = torch.randn(7, 11, generator=torch.Generator().manual_seed(0)).to(dtype)
    own = fingerprint(tensor)
    assert len(own) == 16 and fingerprint(tensor.clone()) == own
    seen = {own}
    raw = tensor.view(-1).view(torch.uint8)
    for byte in range(len(raw)):
        for bit in (1, 128):
            raw[byte] ^= bit
            seen.add(fingerprint(tensor))
            raw[byte] ^= bit
    assert len(seen) == 1 + 2 * len(raw) and fingerprint(tensor) == own


def exchanged(data: Tensor, one: slice, other: slice) -> Tensor:
    found = data.clone()
    found[one], found[other] = data[other], data[one]
    return found


def added(data: Tensor, *changes: tuple[int, int]) -> Tensor:
    found = data.clone()
    for place, value in changes:
        found[place] += value
    return found


def signs(data: Tensor, which: slice) -> Tensor:
    found = data.clone()
    found[which] += TOP
    return found


def square(data: Tensor) -> Tensor:
    return data[:BLOCK].view(ROWS, WORDS)


def of_block(data: Tensor, first: Tensor) -> Tensor:
    return torch.cat([first.flatten(), data[BLOCK:]])


def at(place: int, size: int = 1) -> slice:
    return slice(place, place + size)


TOP = -(2**63)
"""A word's top bit, of which two cancel in a sum"""
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "a bit": lambda data: added(data, (70_001, 1)),
    "a top bit": lambda data: added(data, (70_001, TOP)),
    "two top bits of a row": lambda data: added(data, (70_001, TOP), (70_009, TOP)),
    "two top bits of a column": lambda data: added(data, (70_001, TOP), (70_001 + WORDS, TOP)),
    "two top bits in one place of two blocks": lambda data: added(data, (1, TOP), (1 + BLOCK, TOP)),
    "all signs": lambda data: data + TOP,
    "signs of every second word": lambda data: signs(data, slice(None, None, 2)),
    "signs of every fourth word": lambda data: signs(data, slice(1, None, 4)),
    "signs of a block": lambda data: signs(data, at(BLOCK, BLOCK)),
    "more and less in a row": lambda data: added(data, (70_001, 1), (70_002, -1)),
    "more and less in a column": lambda data: added(data, (70_001, 1), (70_001 + WORDS, -1)),
    "three corners of a rectangle": lambda data: added(data, (0, 1), (9, -1), (WORDS, -1)),
    "two elements of 16 bits": lambda data: exchanged(data.view(torch.int16), at(5), at(6)),
    "two elements far from each other": lambda data: exchanged(data.view(torch.int16), at(5), at(300_000)),
    "two rows": lambda data: exchanged(data, at(0, WORDS), at(3 * WORDS, WORDS)),
    "two columns": lambda data: of_block(data, exchanged(square(data).T, at(0), at(9)).T),
    "two rows of another width": lambda data: exchanged(data, at(0, 1000), at(5000, 1000)),
    "two blocks": lambda data: exchanged(data, at(0, BLOCK), at(BLOCK, BLOCK)),
    "a shift": lambda data: data.roll(1),
    "a shift by two bytes": lambda data: data.view(torch.int16).roll(1),
    "a shift by a row": lambda data: data.roll(WORDS),
    "a shift by a block": lambda data: data.roll(BLOCK),
    "a missing word": lambda data: data[:-1],
    "a missing row": lambda data: data[:-WORDS],
    "a missing byte": lambda data: data.view(torch.uint8)[:-1],
    "no second half": lambda data: torch.cat([data[:BLOCK], torch.zeros_like(data[BLOCK:])]),
    "another layout": lambda data: of_block(data, square(data).T),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name: str) -> None:
    data = words(2 * BLOCK + 3 * WORDS + 5)
    assert fingerprint(CHANGES[name](data)) != fingerprint(data)


@pytest.mark.parametrize("num_rows", [17, 18, 254, 255, 256, 257, 510, 512])
def test_changed_signs_of_a_whole_tensor_are_noticed(num_rows: int) -> None:
    data = words(num_rows * WORDS)
    assert fingerprint(data + TOP) != fingerprint(data) != fingerprint(signs(data, slice(None, None, 2)))


def test_zeros_of_other_sizes() -> None:
    sizes = [*range(9), WHOLE, WHOLE + 1, WHOLE + 8, 8 * BLOCK - 8, 8 * BLOCK, 8 * BLOCK + 1, 8 * (BLOCK + WORDS)]
    assert len({fingerprint(torch.zeros(size, dtype=torch.uint8)) for size in sizes}) == len(sizes)


def test_only_rectangles_within_a_block_cancel() -> None:
    """The limit that the module names."""
    data = words(2 * BLOCK)
    rectangle = lambda a, b, c, d: added(data, (a, 5), (b, -5), (c, -5), (d, 5))  # noqa: E731
    assert fingerprint(rectangle(3, 9, 3 + WORDS, 9 + WORDS)) == fingerprint(data)
    assert fingerprint(rectangle(3, 9, 3 + BLOCK, 9 + BLOCK)) != fingerprint(data)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_in_their_order_whatever_the_layout(dtype: torch.dtype) -> None:
    whole = torch.randn(60, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    views = (whole, whole.T, whole[1:4], whole[:, ::3], whole[2, 5], whole[:0], whole.view(-1)[3:])
    for tensor in (*views, torch.nn.Parameter(whole, False)):
        in_order = tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        assert fingerprint(tensor) == expected(in_order.numpy().tobytes())


def test_storage_stays_resizable() -> None:
    """FSDP frees the whole tensors that it gives by resizing their storage to nothing."""
    for size in (100, 100_000):
        tensor = torch.randn(size)
        fingerprint(tensor)
        tensor.untyped_storage().resize_(0)


def test_a_tensor_may_change_once_it_is_read() -> None:
    for count in (10, BLOCK):
        data, found = words(count), Fingerprints()
        own = fingerprint(data)
        found.add("a", data)
        data += 1
        found.add("b", data)
        assert found.finish() == {"a": own, "b": fingerprint(data)}


def test_tensors_in_their_order_however_often_the_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {str(i): words(size, i) for i, size in enumerate((5, 2 * BLOCK, 7, BLOCK, 3))}
    want = {name: fingerprint(data) for name, data in given.items()}
    for pending in (1, 5000, PENDING):
        monkeypatch.setattr(room, "PENDING", pending)
        assert [*fingerprints(given.items()).items()] == [*want.items()]


def allocated(call: Callable[[], object]) -> tuple[int, int]:
    """All bytes that a call allocates, freed or not, and the number of its sums."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        call()
    events = profiler.events()
    return sum(max(0, event.self_cpu_memory_usage) for event in events), sum(e.name == "aten::sum" for e in events)


def test_no_temporary_of_a_tensors_size() -> None:
    bucket = torch.empty(2**24, dtype=torch.bfloat16).fill_(1.5)
    num_bytes, num_sums = allocated(lambda: fingerprint(bucket))
    assert bucket.nbytes / 128 <= num_bytes < 0.02 * bucket.nbytes and num_sums == 4
    # A sum that widens its input makes a copy of it, which this count would find.
    assert allocated(lambda: bucket.view(torch.int32).sum(0, dtype=torch.int64))[0] > bucket.nbytes
