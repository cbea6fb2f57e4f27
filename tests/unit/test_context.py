"""A row shared out over ranks: every token lies on one of them and sees what it sees where one rank has the whole row.

The exchange between ranks is played by indexing here; `tests/dist/test_train_parity.py` has real ranks.
"""

from itertools import accumulate

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from spmd_rl.model.attention import Packing, packed_attention
from spmd_rl.model.context import GatherKeys, Ulysses, context_of


class Group:
    """What a context asks of a process group."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class Indexed(GatherKeys):
    """Gathers keys from where they are known already."""

    def before(self, q, k, v):
        return q[self.own], k[self.gathered], v[self.gathered]


@st.composite
def trees(draw) -> tuple[int, list[int], list[int]]:
    """Ranks, lengths of segments, each one's parent; the last segment fills the row up."""
    size = draw(st.integers(2, 4))
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=7))
    parents = [draw(st.integers(-1, i - 1)) for i in range(len(lengths))]
    if blank := -sum(lengths) % (2 * size):
        return size, [*lengths, blank], [*parents, -1]
    return size, lengths, parents


@settings(max_examples=60, deadline=None)
@given(trees())
@example((2, [2, 3, 1, 2], [-1, 0, 0, -1]))  # beside one another: what stands apart in the row
def test_no_token_is_lost_and_each_sees_its_own_path_alone(tree) -> None:
    size, lengths, parents = tree
    starts, total = torch.tensor([0, *accumulate(lengths)]), sum(lengths)
    generator = torch.Generator().manual_seed(total)
    shapes = ((1, 6, total, 4), (1, 3, total, 4), (1, 3, total, 4))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)

    def attend(packing: Packing) -> torch.Tensor:
        return packed_attention(nn.Identity(), q, k, v, None, 0.5, packing)[0][0]

    wanted = attend(Packing.of(starts, torch.tensor(parents)))
    contexts = [Indexed(Group(size, rank)) for rank in range(size)]
    owned = [context.tokens(total) for context in contexts]
    assert sorted(torch.cat(owned).tolist()) == list(range(total)) and len({len(own) for own in owned}) == 1
    for context, own in zip(contexts, owned, strict=True):
        context.own, context.gathered = own, torch.cat(owned)
        packing = context.packing(starts, torch.tensor(parents), q.device, torch.float64)
        torch.testing.assert_close(attend(packing), wanted[own], rtol=0, atol=1e-12)


def test_early_and_late_tokens_balance() -> None:
    """In one long sequence, the pairs of query and key that each rank computes."""
    context = GatherKeys(Group(4))
    work = [int((context.tokens(4096, rank) + 1).sum()) for rank in range(4)]
    assert max(work) == min(work)


@pytest.mark.parametrize(("heads", "kv_heads", "kind"), [(8, 4, Ulysses), (8, 2, GatherKeys), (9, 3, GatherKeys)])
def test_heads_that_divide_are_exchanged(heads: int, kv_heads: int, kind: type) -> None:
    assert type(context_of(Group(4), heads, kv_heads)) is kind
