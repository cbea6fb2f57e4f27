"""Named collectives over 1, 2 and 4 ranks: uneven and empty records, large ones, disagreement, coming apart."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from spmd_rl.base.errors import RunFailed, UserError
from spmd_rl.distributed import World, solo
from tests.dist.harness import launch, run_ranks


def everything(world: World) -> dict:
    """All that a healthy world does; each rank reports what it saw."""
    rank, last = world.rank, world.size - 1
    with world.phase("coordination"):
        seen = {
            "uneven": world.gather("uneven", [rank] * rank),
            "empty": world.gather("empty", None),
            "large": [len(text) for text in world.gather("large", "x" * (rank * 100_000))],
            "told": world.broadcast("told", {"from": rank}, src=last),
            "told at length": [
                world.broadcast("told at length", [rank] * 5000 if rank == src else None, src)[-1]
                for src in range(world.size)
            ],
            "sum": world.reduce("sum", {"b": 0.5 * rank, "a": 1.0}, "sum"),
            "max": world.reduce("max", {"x": -float(rank)}, "max"),
            "mean": world.reduce("mean", {"x": float(rank)}, "mean"),
            "nothing": world.reduce("nothing", {}, "mean"),
        }
        world.agree("plan", {"keys": [1, 2], "weights": {"a": 0.1}})
        world.barrier("end")
    seen["failures"] = [_failure(world.agree, "odd plan", min(rank, 1) if world.size > 2 else 0)]
    seen["failures"].append(_failure(world.reduce, "odd keys", {f"key{min(rank, 1)}": 1.0}))
    apart = (world.barrier, "left") if rank == last else (world.gather, "stay", 1)
    seen["failures"].append(_failure(*apart))
    apart = world.broadcast if rank == last else world.gather
    seen["failures"].append(_failure(apart, "long and apart", "x" * 5000))
    seen["phases"] = sorted(world.journal.take_times())
    return seen


def _failure(call, *args) -> str | None:
    try:
        call(*args)
    except RunFailed as failed:
        return str(failed)
    return None


@pytest.mark.parametrize(
    ("size", "per_machine"), [(1, 1), (2, 2), (4, 4), (2, 1), (4, 2), pytest.param(4, 3, id="uneven machines")]
)
def test_every_rank_sees_the_same(size: int, per_machine: int) -> None:
    results = run_ranks(size, everything, per_machine=per_machine)
    assert all(seen["failures"][0] == results[0]["failures"][0] for seen in results)
    for seen in results:
        assert seen["uneven"] == [[rank] * rank for rank in range(size)]
        assert seen["empty"] == [None] * size
        assert seen["large"] == [rank * 100_000 for rank in range(size)]
        assert seen["told"] == {"from": size - 1}
        assert seen["told at length"] == [*range(size)]
        assert seen["sum"] == {"a": float(size), "b": sum(0.5 * rank for rank in range(size))}
        assert seen["max"] == {"x": 0.0}
        assert seen["mean"] == {"x": (size - 1) / 2}
        assert seen["nothing"] == {}
        assert seen["phases"] == ["coordination"]
        odd_plan, odd_keys, apart, long = seen["failures"]
        if size == 1:
            assert seen["failures"] == [None] * 4
            continue
        assert (odd_plan is None) == (size == 2)
        if size == 4:
            assert "odd plan: ranks [0] differ" in odd_plan  # one voice against three
        assert f"odd keys: ranks {list(range(1, size))} bring other keys" in odd_keys
        assert f"ranks [{size - 1}] in 'barrier left' #" in apart
        assert f"ranks {list(range(size - 1))} in 'gather stay' #" in apart
        assert f"ranks [{size - 1}] in 'broadcast long and apart' #" in long


def meshes(world: World) -> list:
    """A 2-D mesh and its axes; an impossible one."""
    made = world.mesh(dp=2, tp=2)
    with pytest.raises(UserError) as refused:
        world.mesh(dp=3, tp=2)
    return [made.get_local_rank("dp"), made.get_local_rank("tp"), list(made.mesh_dim_names), str(refused.value)]


def blocks(world: World) -> list:
    """What the ranks of each half tell each other, twice over, in halves that meet different numbers of times."""
    halves = [world.subset("low", [0, 1]), world.subset("high", [3, 2])]
    (mine,) = filter(None, halves)
    again = world.subset("pair", [0, 1] if world.rank < 2 else [2, 3])
    assert world.subset("everyone", range(4)) is world
    seen = [mine.rank, mine.gather("rank", world.rank), again.broadcast("rank", world.rank, src=1)]
    for round_ in range(world.rank // 2):  # the halves' numbers come apart; the world's do not
        mine.barrier(f"round {round_}")
    seen.append(mine.reduce("sum", {"x": float(world.rank)})["x"])
    counts = np.array([[0, 1], [2, 0]])
    rows = torch.full((int(counts[mine.rank].sum()), 3), world.rank, dtype=torch.uint8)
    seen.append(mine.exchange("rows", rows, counts[mine.rank], counts[:, mine.rank])[:, 0].tolist())
    total = torch.tensor([1 + world.rank])
    mesh = mine.mesh(dp=1, tp=2)
    torch.distributed.all_reduce(total, group=mesh.get_group("tp"))
    seen += [int(total), mesh.mesh.tolist()]
    mine.store.set("key", str(world.rank)) if mine.rank == 0 else None
    mine.barrier("key is there")
    seen.append(int(mine.store.get("key")))
    inner = mine.subset("second", [1])
    seen.append(inner and [inner.rank, inner.size, list(inner.ranks), inner.gather("alone", "x")])
    whole = world.mesh(dp=2, tp=2)
    torch.distributed.all_reduce(total, group=whole.get_group("dp"))
    world.barrier("all")
    return [*seen, int(total)]


@pytest.mark.parametrize("per_machine", [4, 2])
def test_subsets_meet_apart(per_machine: int) -> None:
    results = run_ranks(4, blocks, per_machine=per_machine)
    low, high, second = [3, [[0, 1]], 0], [7, [[3, 2]], 3], lambda rank: [0, 1, [rank], ["x"]]
    assert results == [
        [0, [0, 1], 1, 1.0, [1, 1], *low, None, 10],
        [1, [0, 1], 1, 1.0, [0], *low, second(1), 10],
        [1, [3, 2], 3, 5.0, [3], *high, second(2), 10],
        [0, [3, 2], 3, 5.0, [2, 2], *high, None, 10],
    ]


def lonely(world: World) -> None:
    """Rank 2 waits for rank 3, which waits for nobody."""
    high = world.subset("high", [2, 3])
    if world.rank == 2:
        high.barrier("hello")
    world.clone_store().wait(["never written"])


def test_a_hang_report_names_the_meeting_of_the_subset(tmp_path: Path) -> None:
    with launch(4, lonely, directory=tmp_path, stall_seconds=2.0) as job:
        job.wait(30)
        report = (job.run_dir / "hang.txt").read_text()
        assert "collective: 'high: hello' #1\n  arrived: rank 2\n  did not arrive: rank 3\n" in report


def test_mesh_axes_vary_last_first() -> None:
    refused = "impossible mesh: dp=3 x tp=2 needs 6 ranks, the world has 4"
    assert run_ranks(4, meshes) == [[dp, tp, ["dp", "tp"], refused] for dp in range(2) for tp in range(2)]


def test_solo_needs_no_process_group() -> None:
    with solo() as world:
        assert world.gather("one", (1, "a")) == [[1, "a"]]
        assert world.reduce("one", {"x": math.inf}) == {"x": math.inf}
        world.store.set("key", "value")
        assert world.clone_store().get("key") == b"value"
        assert world.journal.path.exists()
