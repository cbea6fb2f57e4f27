"""Named collectives over 1, 2 and 4 ranks: uneven and empty records, large ones, disagreement, coming apart."""

import math
import tempfile
from pathlib import Path

import pytest

from spmd_rl.distributed import World, solo
from spmd_rl.errors import RunFailed, UserError
from tests.dist.harness import run_ranks


def everything(world: World) -> dict:
    """All that a healthy world does; each rank reports what it saw."""
    rank, last = world.rank, world.size - 1
    with world.phase("coordination"):
        seen = {
            "uneven": world.gather("uneven", [rank] * rank),
            "empty": world.gather("empty", None),
            "large": [len(text) for text in world.gather("large", "x" * (rank * 100_000))],
            "told": world.broadcast("told", {"from": rank}, src=last),
            "told at length": len(world.broadcast("told at length", [rank] * 5000 if rank == last else None, src=last)),
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
        assert seen["told at length"] == 5000
        assert seen["sum"] == {"a": float(size), "b": sum(0.5 * rank for rank in range(size))}
        assert seen["max"] == {"x": 0.0}
        assert seen["mean"] == {"x": (size - 1) / 2}
        assert seen["nothing"] == {}
        assert seen["phases"] == ["coordination"]
        odd_plan, odd_keys, apart = seen["failures"]
        if size == 1:
            assert seen["failures"] == [None, None, None]
            continue
        assert (odd_plan is None) == (size == 2)
        if size == 4:
            assert "odd plan: ranks [0] differ" in odd_plan  # one voice against three
        assert f"odd keys: ranks {list(range(1, size))} bring other keys" in odd_keys
        assert f"ranks [{size - 1}] in 'barrier left' #" in apart
        assert f"ranks {list(range(size - 1))} in 'gather stay' #" in apart


def meshes(world: World) -> list:
    """A 2-D mesh and its axes; an impossible one."""
    made = world.mesh(dp=2, tp=2)
    with pytest.raises(UserError) as refused:
        world.mesh(dp=3, tp=2)
    return [made.get_local_rank("dp"), made.get_local_rank("tp"), list(made.mesh_dim_names), str(refused.value)]


def blocks(world: World) -> list:
    """What the ranks of each block tell each other, twice over, and what the traffic of it was."""
    world.traffic.take()
    pairs, again = world.split("pairs", 2), world.split("pairs", 2)
    told = [pairs.gather("rank", world.rank), again.broadcast("rank", world.rank, src=1)]
    return [*told, world.traffic.take()["meetings"]]


@pytest.mark.parametrize("per_machine", [4, 2, 3, 1])
def test_blocks_meet_apart_on_one_machine_or_several(per_machine: int) -> None:
    results = run_ranks(4, blocks, per_machine=per_machine)
    assert results == [[[0, 1], 1, 2.0], [[0, 1], 1, 2.0], [[2, 3], 3, 2.0], [[2, 3], 3, 2.0]]


def left_behind(world: World) -> list[str]:
    """What a start leaves in the temporary directory."""
    world.barrier("all connected")
    return [str(path) for path in Path(tempfile.gettempdir()).glob("spmd-rl-*/s")]


def test_the_way_to_meet_has_no_name_left_behind() -> None:
    assert run_ranks(2, left_behind) == [[], []]


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
