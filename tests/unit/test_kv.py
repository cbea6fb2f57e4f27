"""The block pool: references, the bound, what is read is what was written."""

import pytest
import torch

from spmd_rl.engine.native.kv import BLOCK, KVPool, blocks_for


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


def test_shared_blocks_leave_with_their_last_holder():
    kv = pool()
    blocks = kv.take(3)
    kv.share(blocks[:2])
    kv.drop(blocks)
    assert kv.num_used == 2
    kv.drop(blocks[:2])
    assert kv.num_used == 0
    with pytest.raises(AssertionError):
        kv.drop(blocks)


def test_read_gives_what_was_written_in_table_order():
    kv = pool()
    table = kv.take(3)[::-1]
    keys, values = torch.randn(2, 2 * BLOCK + 5, 2, 4)
    positions = torch.arange(2 * BLOCK + 5)
    slots = torch.tensor(table)[positions // BLOCK] * BLOCK + positions % BLOCK
    kv.write(1, slots, keys, values)
    read_keys, read_values = kv.read(1, torch.tensor([table]))
    assert read_keys.shape == (1, 2, 3 * BLOCK, 4)
    assert torch.equal(read_keys[0].transpose(0, 1)[: len(keys)], keys)
    assert torch.equal(read_values[0].transpose(0, 1)[: len(keys)], values)
    assert not kv.read(0, torch.tensor([table]))[0].any(), "another layer"


def test_copy_covers_all_layers():
    kv = pool()
    source, target = kv.take(2)
    for layer in range(2):
        kv.write(layer, torch.tensor([source * BLOCK + 3]), torch.full((1, 2, 4), layer + 1.0), torch.ones(1, 2, 4))
    kv.copy([source], [target])
    for layer in range(2):
        assert kv.read(layer, torch.tensor([[target]]))[0][0, :, 3].eq(layer + 1.0).all()


def test_memory_never_written_reads_as_zero():
    """A NaN in fresh memory would pass through the attention mask."""
    kv = pool()
    kv._data.fill_(float("nan"))
    for num in (1, 3, 2):
        assert not kv.read(0, torch.tensor([kv.take(num)]))[0].isnan().any()


def test_sleep_frees_and_wake_starts_empty():
    kv = pool()
    kv.drop(kv.take(2))
    kv.sleep()
    assert kv._data.numel() == 0
    kv.wake()
    assert not kv.read(0, torch.tensor([kv.take(6)]))[0].any()
    with pytest.raises(AssertionError, match="in use"):
        kv.sleep()


def test_blocks_for():
    assert [blocks_for(n) for n in (0, 1, BLOCK, BLOCK + 1)] == [0, 1, 1, 2]
