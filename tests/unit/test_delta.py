"""Deltas of tensors: to the bit, smaller than the whole, and nothing else is read as one."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spmd_rl.errors import RunFailed
from spmd_rl.weights.delta import decode, encode, word

DTYPES = ("bool", "uint8", "int8", "float8_e4m3fn", "float16", "bfloat16", "float32", "int64", "float64", "complex128")
SPECIAL = (0x00, 0x80, 0xFF, 0x7F)
"""Bytes of zeros of both signs, and of NaNs and infinities."""


def versions(words: int, unit: int, share: float, seed: int) -> tuple[bytes, bytes]:
    """Random bytes, many of them special, and the same where about this share of the words have other bits."""
    random = np.random.default_rng(seed)
    base = np.where(
        random.random((words, unit)) < 0.5,
        random.choice(SPECIAL, (words, unit)),
        random.integers(0, 256, (words, unit)),
    ).astype(np.uint8)
    flips = random.integers(1, 256, (words, unit)).astype(np.uint8)
    return base.tobytes(), np.where(random.random((words, 1)) < share, base ^ flips, base).tobytes()


def changes(base: bytes, new: bytes, unit: int) -> int:
    return sum(base[at : at + unit] != new[at : at + unit] for at in range(0, len(base), unit))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(0, 3000), st.sampled_from([0, 0.001, 0.02, 0.3, 1]), st.integers(0, 999))
@example("bfloat16", 0, 0, 0)
def test_what_comes_out_is_the_new_version(dtype, count, share, seed):
    unit = word(dtype)
    size = count * getattr(torch, dtype).itemsize
    base, new = versions(size // unit, unit, share, seed)
    payload = encode(memoryview(base), memoryview(new), unit)
    if payload is None:
        assert 1 + changes(base, new, unit) * (unit + 1) + size // unit // 256 * (unit + 1) >= size
    else:
        assert len(payload) < size
        assert decode(memoryview(base), memoryview(payload), unit) == new


@pytest.mark.parametrize(
    ("at", "size"),
    [
        ([], 1),
        ([0], 1 + 3),
        ([255], 1 + 3),  # the greatest gap of one byte
        ([256], 1 + 4),  # which takes two, or an entry between
        ([65535], 1 + 4),
        ([65536], 1 + 2 * 4),
        ([199_999], 1 + 4 * 4),
        ([*range(0, 200_000, 200)], 1 + 1000 * 3),
        ([*range(0, 200_000, 400)], 1 + 500 * 4),
    ],
)
def test_gaps_of_all_sizes(at, size):
    base = torch.arange(200_000).to(torch.bfloat16)
    new = base.clone()
    new[at] += 1000
    new[at] = torch.where(new[at] == base[at], -1, new[at])
    old, now = (memoryview(tensor.view(torch.uint8).numpy()) for tensor in (base, new))
    payload = encode(old, now, 2)
    assert len(payload) == size
    assert decode(old, memoryview(payload), 2) == now.tobytes()


def test_the_sign_of_a_zero_and_the_bits_of_a_nan_are_changes():
    base = torch.zeros(100)
    base[7] = float("nan")
    new = base.clone()
    new[3] = -0.0
    new.view(torch.int32)[7] += 1  # another NaN
    old, now = (memoryview(tensor.view(torch.uint8).numpy()) for tensor in (base, new))
    payload = encode(old, now, 4)
    assert len(payload) == 1 + 2 * (1 + 4)
    assert decode(old, memoryview(payload), 4) == now.tobytes()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.sampled_from([1, 2, 4, 8]), st.integers(0, 40))
def test_any_other_bytes_are_refused_or_read_within_the_tensor(payload, unit, words):
    base = bytes(words * unit)
    try:
        assert len(decode(memoryview(base), memoryview(payload), unit)) == len(base)
    except RunFailed as error:
        assert "delta" in str(error)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"", "gaps of 0 bytes"),
        (b"\x03", "gaps of 3 bytes"),
        (b"\x01\x00\x01", "2 bytes too many, or too few, after 0 entries"),
        (b"\x01\x00\x04\x01\x00\x01\x00", "changes word 5 of a tensor of 4"),
    ],
)
def test_what_is_wrong_is_said(payload, words):
    with pytest.raises(RunFailed, match=words):
        decode(memoryview(bytes(8)), memoryview(payload), 2)
