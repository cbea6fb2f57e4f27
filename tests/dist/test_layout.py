"""`Layout`: who holds which data shard, who leads it, and what the shards' meetings give."""

import pytest
import torch
import torch.distributed as dist

from spmd_rl.base.errors import UserError
from spmd_rl.distributed import Layout, World, solo
from tests.dist.harness import run_ranks


def facts(world: World, tp: int, copies: int = 1) -> dict:
    """What one rank sees."""
    layout = Layout(world, tp=tp, dp_replicate=copies)
    data = layout.data
    sums = {}
    for axis in ("dp_replicate", "fsdp", "tp") if copies > 1 else ("fsdp", "tp"):
        total = torch.tensor(world.rank)
        if layout.group(axis) is not None:
            dist.all_reduce(total, group=layout.group(axis))
        sums[axis] = int(total)
    value = {"x": float(10 * data.rank + (0 if data.is_leader else 1000))}
    return {
        "shard": [data.rank, data.size, data.is_leader],
        "place": [layout.rank("dp_shard"), layout.rank("tp"), layout.size("dp_shard"), layout.size("tp")],
        "copy": [layout.rank("dp_replicate"), layout.size("dp_replicate"), layout.data_mesh.ndim],
        "ranks": [data.ranks_of(shard) for shard in range(data.size)],
        "gathered": data.gather("ranks", world.rank),
        "reduced": [data.reduce(f"x {op}", value, op)["x"] for op in ("sum", "max", "mean")],
        "sums": sums,
    }


def test_a_block_holds_one_shard_and_its_leader_counts_once() -> None:
    for rank, seen in enumerate(run_ranks(4, facts, 2)):
        assert seen == {
            "shard": [rank // 2, 2, rank % 2 == 0],
            "place": [rank // 2, rank % 2, 2, 2],
            "copy": [0, 1, 1],
            "ranks": [[0, 1], [2, 3]],
            "gathered": [0, 2],
            "reduced": [10.0, 10.0, 5.0],
            "sums": {"fsdp": 2 + 2 * (rank % 2), "tp": 1 if rank < 2 else 5},
        }


def test_without_tensor_parallelism_each_rank_leads_its_own_shard() -> None:
    for rank, seen in enumerate(run_ranks(3, facts, 1)):
        assert seen["shard"] == [rank, 3, True] and seen["gathered"] == [0, 1, 2]
        assert seen["reduced"] == [30.0, 20.0, 10.0] and seen["sums"] == {"fsdp": 3, "tp": rank}


def test_copies_of_the_model_are_on_neighbours_and_every_rank_still_has_a_shard_of_data() -> None:
    for rank, seen in enumerate(run_ranks(4, facts, 1, 2)):
        assert seen["shard"] == [rank, 4, True] and seen["gathered"] == [0, 1, 2, 3]
        assert seen["place"] == [rank % 2, 0, 2, 1] and seen["copy"] == [rank // 2, 2, 2]
        assert seen["sums"] == {"dp_replicate": 2 + 2 * (rank % 2), "fsdp": 1 if rank < 2 else 5, "tp": rank}


def refusals(world: World) -> list[str]:
    told = []
    for axes in ({"tp": 2}, {"dp_replicate": 2, "key": "reference.train"}, {"tp": 3, "dp_replicate": 2}):
        try:
            Layout(world, **axes)
        except UserError as error:
            told.append(str(error))
    return told


def test_a_layout_that_does_not_fit_is_the_users_mistake() -> None:
    wanted = [
        "train.tp: 2 does not divide 3 ranks",
        "reference.train.dp_replicate: 2 does not divide 3 ranks",
        "train.dp_replicate: 2 does not divide 1, which is 3 ranks / tp 3",
    ]
    assert run_ranks(3, refusals) == [wanted] * 3


def test_a_world_of_one_needs_no_process_group() -> None:
    with solo() as world:
        layout = Layout(world)
        assert (layout.data.rank, layout.data.size, layout.data.is_leader) == (0, 1, True)
        assert layout.data.gather("x", 5) == [5] and layout.data.reduce("x", {"a": 2.0}, "mean") == {"a": 2.0}
        with pytest.raises(UserError, match="2 does not divide 1 ranks"):
            Layout(world, tp=2)
