"""Packed attention against each sequence alone: values and gradients, for every model family."""

from itertools import pairwise

import pytest
import torch

from spmd_rl.model.attention import Packing
from spmd_rl.model.build import build_model
from tests.models import KINDS, tiny

LENGTHS = ([5, 9, 1, 17], [7], [8, 8, 8], [3, 150, 70, 2, 300, 65])


def packed_and_alone(path, dtype, lengths, attention):
    ids = torch.randint(0, 256, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    positions = torch.cat([torch.arange(n) for n in lengths])
    direction = torch.randn(sum(lengths), 260, generator=torch.Generator().manual_seed(2), dtype=dtype)
    packed = build_model(path, dtype, "cpu")
    packing = Packing.of(torch.tensor(bounds))
    out = packed(input_ids=ids[None], position_ids=positions[None], packing=packing).logits[0]
    (out * direction).sum().backward()
    alone = build_model(path, dtype, "cpu", attention=attention)
    parts = [alone(input_ids=ids[None, a:b]).logits[0] for a, b in pairwise(bounds)]
    (torch.cat(parts) * direction).sum().backward()
    return packed, out, alone, torch.cat(parts)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_alone(kind, lengths, tmp_path):
    path = tiny(kind, tmp_path)
    _, out, _, wanted = packed_and_alone(path, torch.float32, lengths, "eager")
    torch.testing.assert_close(out, wanted, rtol=0, atol=2e-6)
    # eager attention takes its softmax in float32 whatever the dtype, so in float64 the reference is sdpa
    packed, out, alone, wanted = packed_and_alone(path, torch.float64, lengths, "sdpa")
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    for (name, got), want in zip(packed.named_parameters(), alone.parameters(), strict=True):
        error = (got.grad - want.grad).norm() / want.grad.norm()
        assert error < 1e-12, name


def test_a_neighbour_changes_nothing(tmp_path):
    model = build_model(tiny("qwen3", tmp_path), torch.float32, "cpu")
    ids = torch.arange(20)
    packing = Packing.of(torch.tensor([0, 8, 20]))
    positions = torch.cat([torch.arange(8), torch.arange(12)])
    with torch.no_grad():
        one = model(input_ids=ids[None], position_ids=positions[None], packing=packing).logits[0, 8:]
        other = model(input_ids=ids.flip(0)[None], position_ids=positions[None], packing=packing).logits
        ids[:8] = 99
        two = model(input_ids=ids[None], position_ids=positions[None], packing=packing).logits[0, 8:]
    assert torch.equal(one, two)
    assert not torch.allclose(one, other[0, 8:])


def test_similar_lengths_share_a_block():
    packing = Packing.of(torch.tensor([0, 10, 74, 200, 202, 1000]))
    waste = sum(b.queries.num_rows * b.queries.length for b in packing.blocks) / 1000
    assert [b.queries.num_rows for b in packing.blocks] == [3, 1, 1]
    assert waste < 1.2


def test_a_sliding_window_that_cuts_is_refused(tmp_path):
    path = tiny("qwen2", tmp_path, use_sliding_window=True, sliding_window=4, max_window_layers=0)
    model = build_model(path, torch.float32, "cpu")
    ids = torch.arange(6)[None]
    with pytest.raises(ValueError, match="sliding window of 4"):
        model(input_ids=ids, position_ids=ids, packing=Packing.of(torch.tensor([0, 6])))


def test_a_segment_sees_its_whole_path(tmp_path):
    """Three segments in a chain and a fourth beside the last, laid out in any order, against the sequences alone."""
    model = build_model(tiny("qwen2", tmp_path), torch.float64, "cpu")
    plain = build_model(tmp_path, torch.float64, "cpu", attention="sdpa")
    ids = torch.randint(0, 256, (180,), generator=torch.Generator().manual_seed(4))
    runs = [(0, 7), (7, 17), (17, 177), (177, 180)]  # the third is the root, then the first, then the others
    paths = [2, 0], [2, 0, 1], [2, 0, 3]
    starts, parents = torch.tensor([0, 7, 17, 177, 180]), torch.tensor([2, 0, -1, 0])
    first = torch.tensor([160, 167, 0, 167])
    positions = torch.cat([first[i] + torch.arange(b - a) for i, (a, b) in enumerate(runs)])
    packing = Packing.of(starts, parents)
    with torch.no_grad():
        out = model(input_ids=ids[None], position_ids=positions[None], packing=packing).logits[0]
        for path in paths:
            whole = torch.cat([torch.arange(*runs[i]) for i in path])
            alone = plain(input_ids=ids[whole][None]).logits[0]
            torch.testing.assert_close(out[whole], alone, rtol=0, atol=1e-12)
    assert packing.seen_starts[-1] == 180 + 160 + 2 * 167 and packing.max_seen == 177


def test_a_segment_sees_its_parent_whole_and_itself(tmp_path):
    """A parent with three continuations, laid out in any order, against each whole sequence alone."""
    model = build_model(tiny("qwen2", tmp_path), torch.float64, "cpu")
    plain = build_model(tmp_path, torch.float64, "cpu", attention="sdpa")
    ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(3))
    starts, parents = torch.tensor([0, 5, 14, 17, 18, 40]), torch.tensor([1, -1, 1, 1, -1])
    positions = torch.cat(
        [torch.arange(9, 14), torch.arange(9), torch.arange(9, 12), torch.tensor([9]), torch.arange(22)]
    )
    with torch.no_grad():
        packing = Packing.of(starts, parents)
        out = model(input_ids=ids[None], position_ids=positions[None], packing=packing).logits[0]
        for begin, end in ((0, 5), (14, 17), (17, 18)):
            alone = plain(input_ids=torch.cat([ids[5:14], ids[begin:end]])[None]).logits[0]
            torch.testing.assert_close(out[begin:end], alone[9:], rtol=0, atol=1e-12)
            torch.testing.assert_close(out[5:14], alone[:9], rtol=0, atol=1e-12)
        torch.testing.assert_close(out[18:], plain(input_ids=ids[None, 18:]).logits[0], rtol=0, atol=1e-12)
    assert packing.seen_starts[-1] == 40 + 3 * 9 and packing.max_seen == 22
