"""The block pool: references, the bound, what is read is what was written."""

from array import array

import pytest
import torch

from spmd_rl.engine.native.kv import BLOCK, KVPool, block_keys, blocks_for

KEYS = block_keys(array("i", range(4 * BLOCK)))


def pool(num_blocks=6) -> KVPool:
    return KVPool(2, num_blocks * BLOCK + 3, 2, 4, torch.float32, torch.device("cpu"))


def test_blocks_are_bounded_and_come_back():
    kv = pool()
    assert (kv.num_blocks, kv.num_free) == (6, 6)
    a, b = kv.take(2), kv.take(4)
    assert sorted(a + b) == list(range(6)) and kv.num_free == 0
    with pytest.raises(AssertionError, match="1 blocks asked for, 0 free"):
        kv.take(1)
    kv.drop(a)
    assert sorted(kv.take(2)) == sorted(a) and kv.peak == 6


def test_a_key_stands_for_its_block_and_all_before_it():
    tokens = array("i", range(3 * BLOCK))
    assert block_keys(tokens) == block_keys(tokens + array("i", [7])) == KEYS[:3] and len(set(KEYS)) == 4
    tokens[1] += 1
    assert not set(block_keys(tokens)) & set(KEYS)
    assert block_keys(tokens[: BLOCK - 1]) == []


def test_shared_blocks_leave_with_their_last_holder():
    kv = pool()
    blocks = kv.take(3)
    kv.keep(KEYS, blocks)
    assert kv.find(KEYS[:2]) == blocks[:2]
    kv.drop(blocks)
    assert kv.num_used == 2
    kv.drop(blocks[:2])
    assert kv.num_used == 0
    with pytest.raises(AssertionError):
        kv.drop(blocks)


def test_what_nobody_holds_stays_until_its_place_is_needed():
    kv = pool()
    old, other = kv.take(3), kv.take(1)
    kv.keep(KEYS, old)
    kv.keep(block_keys(array("i", [5] * BLOCK)), other)
    kv.drop(old)
    kv.drop(other)
    assert (kv.num_free, kv.num_used) == (6, 0)
    rest = kv.take(3)
    assert not set(rest[:2]) & {*old, *other} and rest[2] == old[2], "free ones first, then the unused end of a chain"
    assert kv.find(KEYS) == old[:2] and kv.num_used == 5
    assert kv.take(1) == other and kv.num_free == 0, "what was found is used: the longest unused one goes"
    kv.drop([*rest, *old[:2], *other])
    kv.forget()
    assert kv.find(KEYS) == [] and sorted(kv.take(6)) == list(range(6))


def test_a_block_is_found_by_the_key_it_had_first():
    kv = pool()
    first, second = kv.take(1), kv.take(1)
    kv.keep(KEYS[:1], first)
    kv.keep(KEYS[:1], second)
    kv.drop(second)
    assert kv.find(KEYS[:1]) == first and kv.take(1) == second, "the second was not kept"


def test_read_gives_what_was_written_in_table_order():
    kv = pool()
    table = kv.take(3)[::-1]
    keys, values = torch.randn(2, 2 * BLOCK + 1, 2, 4)
    positions = torch.arange(2 * BLOCK + 1)
    slots = torch.tensor(table)[positions // BLOCK] * BLOCK + positions % BLOCK
    kv.write(1, slots, keys, values)
    read_keys, read_values = kv.read(1, torch.tensor([table]))
    assert read_keys.shape == (1, 2, 3 * BLOCK, 4)
    assert torch.equal(read_keys[0].transpose(0, 1)[: len(keys)], keys)
    assert torch.equal(read_values[0].transpose(0, 1)[: len(keys)], values)
    assert not kv.read(0, torch.tensor([table]))[0].any(), "another layer"


def test_memory_never_written_reads_as_zero():
    """A NaN in fresh memory would pass through the attention mask."""
    kv = pool()
    kv.data.fill_(float("nan"))
    for num in (1, 3, 2):
        assert not kv.read(0, torch.tensor([kv.take(num)]))[0].isnan().any()


def test_sleep_frees_and_wake_starts_empty():
    kv = pool()
    blocks = kv.take(2)
    kv.keep(KEYS, blocks)
    kv.drop(blocks)
    kv.sleep()
    assert kv.data.numel() == 0
    kv.wake()
    assert kv.find(KEYS) == []
    assert not kv.read(0, torch.tensor([kv.take(6)]))[0].any()
    with pytest.raises(AssertionError, match="in use"):
        kv.sleep()


def test_blocks_for():
    assert [blocks_for(n) for n in (0, 1, BLOCK, BLOCK + 1)] == [0, 1, 1, 2]
