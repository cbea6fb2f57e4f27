"""Rows between ranks of one machine or several: the same rows, whatever the sizes, or a failure by name."""

import time

import numpy as np
import pytest
import torch

from spmd_rl.base.errors import RunFailed
from spmd_rl.distributed import World
from tests.dist.harness import run_ranks

WIDTH = 13
TURNS = ["few", "none", "many", "from one", "to one", "few", "more", "few", "few"]
"""What travels in each turn."""


def counts_of(turn: int, size: int) -> np.ndarray:
    """Rows that rank i sends rank j in this turn, on all ranks the same."""
    most = {"none": 1, "many": 9_000, "more": 40_000}.get(TURNS[turn], 40)
    counts = np.random.default_rng(turn).integers(0, most, (size, size))
    if TURNS[turn] == "from one":
        counts[1:] = 0
    if TURNS[turn] == "to one":
        counts[:, :-1] = 0
    return counts


def row_block(turn: int, source: int, target: int, count: int) -> torch.Tensor:
    """uint8 [count, WIDTH]"""
    generator = torch.Generator().manual_seed(1000 * turn + 100 * source + target)
    return torch.randint(0, 256, (count, WIDTH), generator=generator, dtype=torch.uint8)


def turns(world: World) -> list[str]:
    """Names of the turns in which other rows arrived; ranks are slow in turn."""
    wrong = []
    for turn, name in enumerate(TURNS):
        counts = counts_of(turn, world.size)
        mine = torch.cat([row_block(turn, world.rank, to, n) for to, n in enumerate(counts[world.rank].tolist())])
        time.sleep(0.01 * (turn % world.size == world.rank))
        got = world.exchange("rows", mine, counts[world.rank], counts[:, world.rank], [turn, counts])
        coming = counts[:, world.rank].tolist()
        wanted = torch.cat([row_block(turn, source, world.rank, n) for source, n in enumerate(coming)])
        if not torch.equal(got, wanted) or got.dtype != wanted.dtype:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize(("size", "per_machine"), [(1, 1), (2, 2), (4, 4), (2, 1), (4, 2), (5, 3)])
def test_the_same_rows_arrive(size: int, per_machine: int) -> None:
    results = run_ranks(size, turns, per_machine=per_machine)
    assert results == [[]] * size


def turns_of_some(world: World) -> list[str]:
    """`turns` of ranks of several machines, in another order than theirs."""
    some = world.subset("some", [4, 1, 3, 0])
    return turns(some) if some else []


def test_the_same_rows_arrive_whatever_the_order_of_the_ranks() -> None:
    assert run_ranks(5, turns_of_some, per_machine=2) == [[]] * 5


def disagreement(world: World, what: str) -> str:
    """What the ranks say when the last one has another plan."""
    last = world.size - 1
    counts = np.full((world.size, world.size), 3)
    mine = torch.full((3 * world.size, WIDTH), 1 + world.rank, dtype=torch.uint8)
    agreed = (7, np.arange(20))
    if world.rank == last:
        if what == "value":
            agreed = (7, np.arange(20) + 1)
        elif what == "sizes":
            counts[last], mine = 4, mine.new_full((4 * world.size, WIDTH), 99)
        else:  # it has not the rows of its own plan
            counts[last], mine = 4, mine[:1]
    with pytest.raises(RunFailed) as failed:
        world.exchange("rows", mine, counts[world.rank], counts[:, world.rank], [agreed, counts])
    world.barrier("all have failed")
    return str(failed.value)


@pytest.mark.parametrize("what", ["value", "sizes", "other rows"])
def test_ranks_that_disagree_are_named(what: str) -> None:
    results = run_ranks(3, disagreement, what)
    assert len(set(results)) == 1, "each rank fails alike"
    assert (
        results[0].startswith("rows: ranks [2] differ from the others: [13, [") and " instead of [13, [" in results[0]
    )
