"""Rows between ranks, through shared memory and over gloo: the same rows, whatever the sizes, or a failure by name."""

import time

import numpy as np
import pytest
import torch

from spmd_rl.distributed import World, rows, window
from spmd_rl.errors import RunFailed
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


def turns(world: World, limit: int, blind: int) -> dict:
    """All turns, ranks slow in turn; `limit`: bytes of the window; `blind`: a rank that cannot map it, or -1."""
    rows.LIMIT = limit
    if world.rank == blind:
        window._map = lambda *_: None
    world.traffic.take()
    wrong, sent = [], 0
    for turn, name in enumerate(TURNS):
        counts = counts_of(turn, world.size)
        mine = torch.cat([row_block(turn, world.rank, to, n) for to, n in enumerate(counts[world.rank].tolist())])
        sent += mine.nbytes
        time.sleep(0.01 * (turn % world.size == world.rank))
        got = world.exchange("rows", mine, counts, {"turn": turn})
        coming = counts[:, world.rank].tolist()
        wanted = torch.cat([row_block(turn, source, world.rank, n) for source, n in enumerate(coming)])
        if not torch.equal(got, wanted) or got.dtype != wanted.dtype:
            wrong.append(name)
    told = world.traffic.take()
    lines = world.journal.path.read_text().splitlines()
    named = [sum(f'"name":"{name}"' in line for line in lines) // 2 for name in ("rows", "rows: rows")]
    # what meetings say of each turn is a digest; the bytes beyond the rows are few
    return {"wrong": wrong, "room": world._rows._room, "named": named, "counted": told["meeting_bytes"] >= sent}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("road", ["window", "gloo", "small window", "one rank is blind"])
def test_every_road_carries_the_same_rows(size: int, road: str) -> None:
    limit = 2 * size * rows.LEAST if road == "small window" else rows.LIMIT
    blind = size - 1 if road == "one rank is blind" else -1
    per_machine = 1 if road == "gloo" else size
    results = run_ranks(size, turns, limit, blind, per_machine=per_machine)
    assert all(seen == results[0] for seen in results)
    assert results[0]["wrong"] == [] and results[0]["counted"]
    room, (meetings, over_gloo) = results[0]["room"], results[0]["named"]
    assert meetings == len(TURNS), "each turn meets once under its name"
    if size == 1:
        assert (room, over_gloo) == (0, 0)
    elif road == "window":
        assert room >= 40_000 * WIDTH and over_gloo == 0
    elif road == "small window":
        assert room == rows.LEAST and over_gloo == 2, "what is too large goes over gloo, and the window stays"
    else:
        assert room == 0 and over_gloo == len(TURNS)


def disagreement(world: World, what: str, warm: bool) -> list:
    """What the ranks say when the last one has another plan; and whether it touched the others' parts."""
    last = world.size - 1
    counts = np.full((world.size, world.size), 3)
    mine = torch.full((3 * world.size, WIDTH), 1 + world.rank, dtype=torch.uint8)
    if warm:
        for _ in range(2):
            world.exchange("rows", mine, counts)
    agreed = (7, np.arange(20))
    if world.rank == last:
        if what == "value":
            agreed = (7, np.arange(20) + 1)
        elif what == "sizes":
            counts[last], mine = 4, mine.new_full((4 * world.size, WIDTH), 99)
        elif what == "more than there is room for":
            counts[last] = rows.LEAST
            mine = mine.new_full((rows.LEAST * world.size, WIDTH), 99)
        else:  # it has not the rows of its own plan
            counts[last], mine = 4, mine[:1]
    with pytest.raises(RunFailed) as failed:
        world.exchange("rows", mine, counts, agreed)
    world.barrier("all have failed")
    untouched = [
        bool((half[rank, : 3 * world.size * WIDTH] == 1 + rank).all())
        for half in world._rows._halves
        for rank in range(last)
    ]
    return [str(failed.value), untouched]


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("what", ["value", "sizes", "more than there is room for", "other rows"])
def test_ranks_that_disagree_are_named_and_touch_nothing_of_the_others(what: str, warm: bool) -> None:
    results = run_ranks(3, disagreement, what, warm)
    assert len({told for told, _ in results}) == 1, "each rank fails alike"
    assert results[0][0].startswith("rows: ranks [2] differ from the others: [[") and " instead of [[" in results[0][0]
    assert all(untouched == [True] * 4 * warm for _, untouched in results)
