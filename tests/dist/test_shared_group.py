"""The `shm` backend gives what gloo gives, for every operation, dtype and shape that a library may ask for."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from spmd_rl.distributed import World
from tests.dist.harness import launch, run_ranks
from tests.patience import patient

SHAPES = [(3,), (0,), (2, 5), (), (70_000,)]
DTYPES = [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bfloat16]


def operations(group: dist.ProcessGroup, rank: int, size: int) -> Iterator[tuple[str, list[Tensor]]]:
    """A name and what came of it, for each operation."""

    def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(100 * seed + rank)
        return torch.randint(0, 50, shape, generator=generator).to(dtype)

    first = dist.get_global_rank(group, 0)
    last = dist.get_global_rank(group, size - 1)
    for dtype in DTYPES:
        for shape in SHAPES:
            name = f"{dtype} {shape}"
            mine = values(shape, dtype)
            outputs = [torch.empty(shape, dtype=dtype) for _ in range(size)]
            dist.all_gather(outputs, mine, group=group)
            yield f"all_gather {name}", outputs
            dist.gather(mine, outputs if rank == size - 1 else None, dst=last, group=group)
            yield f"gather {name}", outputs
            told = values(shape, dtype, seed=1)
            dist.broadcast(told, src=last, group=group)
            yield f"broadcast {name}", [told]
            deal = [values(shape, dtype, seed=2 + peer) for peer in range(size)] if rank == 0 else None
            dist.scatter(told, deal, src=first, group=group)
            yield f"scatter {name}", [told]
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
                total = mine.clone()
                work = dist.all_reduce(total, op=op, group=group, async_op=True)
                work.wait()
                yield f"all_reduce {op} {name}", [total]
            total = mine.clone()
            dist.reduce(total, dst=first, group=group)
            yield f"reduce {name}", [total] if rank == 0 else []
        flat = values((4 * size,), dtype)
        whole = torch.empty(4 * size * size, dtype=dtype)
        dist.all_gather_into_tensor(whole, flat, group=group)
        yield f"all_gather_into_tensor {dtype}", [whole]
        begin = rank * 4 * size
        whole[begin : begin + 4 * size] = flat + 1
        dist.all_gather_into_tensor(whole, whole[begin : begin + 4 * size], group=group)
        yield f"all_gather_into_tensor in place {dtype}", [whole]
        part = torch.empty(4, dtype=dtype)
        dist.reduce_scatter_tensor(part, flat, group=group)
        yield f"reduce_scatter_tensor {dtype}", [part]
        dist.reduce_scatter_tensor(flat[4 * rank : 4 * rank + 4], flat, group=group)
        yield f"reduce_scatter_tensor in place {dtype}", [flat[4 * rank : 4 * rank + 4]]
        yield from all_to_all(group, rank, size, dtype)
        columns = torch.zeros(6, size, dtype=dtype)
        dist.all_gather(list(columns.unbind(1)), values((6,), dtype), group=group)
        yield f"all_gather into columns {dtype}", [columns]
        rows = values((5, 3), dtype).t()
        dist.all_reduce(rows, group=group) if group.name() == "shm" else _plain_all_reduce(rows, group)
        yield f"all_reduce of a transposed tensor {dtype}", [rows]
        yield f"functional {dtype}", [functional.all_reduce(mine.float(), "sum", group).wait()]
        gathered = functional.all_gather_tensor(values((2, 3), dtype), 0, group)
        yield f"functional all_gather {dtype}", [gathered.wait()]
        scattered = functional.reduce_scatter_tensor(values((2 * size, 3), dtype).float(), "sum", 0, group)
        yield f"functional reduce_scatter {dtype}", [scattered.wait()]
    objects: list = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * 1000 * rank}, group=group)
    yield "all_gather_object", [torch.tensor([len(o["text"]) for o in objects])]
    dist.barrier(group=group)


def _plain_all_reduce(rows: Tensor, group: dist.ProcessGroup) -> None:
    whole = rows.contiguous()
    dist.all_reduce(whole, group=group)
    rows.copy_(whole)


def all_to_all(
    group: dist.ProcessGroup, rank: int, size: int, dtype: torch.dtype
) -> Iterator[tuple[str, list[Tensor]]]:
    """Uneven ones, some empty: rank i sends i + j rows to rank j, none to itself."""
    count: Callable[[int, int], int] = lambda src, dst: 0 if src == dst else src + dst  # noqa: E731
    sent, received = [count(rank, j) for j in range(size)], [count(i, rank) for i in range(size)]
    rows = torch.arange(sum(sent) * 2).view(-1, 2).to(dtype) + 10 * rank
    arrived = torch.empty(sum(received), 2, dtype=dtype)
    dist.all_to_all_single(arrived, rows, received, sent, group=group)
    yield f"all_to_all_single {dtype}", [arrived]
    even = torch.empty(size, dtype=dtype)
    dist.all_to_all_single(even, torch.arange(size).to(dtype) + rank, group=group)
    yield f"all_to_all_single even {dtype}", [even]


def against_gloo(world: World) -> list:
    """Names of the operations that differ from gloo's, and how many there were."""
    assert dist.get_backend() == "shm"
    wrong, count = [], 0
    for ranks in ([*range(world.size)], [0, world.size - 1]):
        gloo = dist.new_group(ranks, backend="gloo")
        shm = dist.new_group(ranks)
        if world.rank not in ranks:
            continue
        place = ranks.index(world.rank), len(ranks)
        for (name, ours), (_, theirs) in zip(operations(shm, *place), operations(gloo, *place), strict=True):
            count += 1
            same = [a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)]
            wrong += [f"{ranks}: {name}"] * (not all(same))
    return [wrong, count > 100]


@pytest.mark.parametrize("size", [2, 3])
def test_it_gives_what_gloo_gives(size: int) -> None:
    results = run_ranks(size, against_gloo, timeout=120)
    assert [wrong for wrong, _ in results] == [[]] * size
    assert results[0][1]


def sums(world: World) -> list:
    """bfloat16 terms that vanish one by one in bfloat16, but not in float32; and a mean."""
    terms = torch.full((3,), 256.0 if world.rank == 0 else 1.0, dtype=torch.bfloat16)
    dist.all_reduce(terms)
    mean = torch.tensor([float(world.rank)])
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return [terms.tolist(), mean.tolist()]


def test_sums_are_taken_in_float32() -> None:
    assert run_ranks(3, sums) == [[[258.0] * 3, [1.0]]] * 3


def interleaved(world: World, rounds: int) -> list[bool]:
    """Pairs and everybody in turn, a rank often ahead of the others, buffers that grow now and then."""
    pairs = world.mesh(a=world.size // 2, b=2)
    low, high = pairs.get_group("a"), pairs.get_group("b")
    right = []
    for round_ in range(rounds):
        length = 1 + round_ * (1000 if round_ % 7 == 0 else 1)
        for group in (low, high, None, high):
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            outputs = [torch.empty(length) for _ in ranks]
            dist.all_gather(outputs, torch.full((length,), float(100 * world.rank + round_)), group=group)
            right.append(all(bool((o == 100 * r + round_).all()) for o, r in zip(outputs, ranks, strict=True)))
    return [all(right), len(right) == 4 * rounds]


def test_groups_do_not_disturb_each_other() -> None:
    assert run_ranks(4, interleaved, 60) == [[True, True]] * 4


def test_eight_ranks_on_few_cores() -> None:
    assert run_ranks(8, interleaved, 10, timeout=120) == [[True, True]] * 8


def left_over(world: World) -> list[str]:
    """What of ours stands in the file systems of memory while a group is in use."""
    dist.all_reduce(torch.ones(1 << 20))
    return [path.name for path in Path("/dev/shm").glob("*spmd_rl*")]


def test_nothing_has_a_name() -> None:
    assert run_ranks(2, left_over) == [[], []]


def forever(world: World) -> None:
    """One library collective after the other."""
    while True:
        with world.collective("sum"):
            dist.all_reduce(torch.ones(10))


def test_a_killed_rank_is_noticed_inside_an_operation(tmp_path: Path) -> None:
    with launch(3, forever, directory=tmp_path) as job:
        job.wait_for("collective_done", 3, name="sum")
        os.kill(job.pids()[1], signal.SIGKILL)
        assert job.wait(5) == [1, -signal.SIGKILL, 1]
        assert "(rank 1 is gone: killed?)" in job.output()


def asked(world: World) -> None:
    """Let a signal ask the run to end, which then takes long."""
    world.stop.accept()
    forever(world)


def test_a_rank_killed_after_a_signal_names_the_patience_of_torchrun(tmp_path: Path) -> None:
    with launch(3, asked, directory=tmp_path) as job:
        job.wait_for("collective_done", 3, name="sum")
        for pid in job.pids().values():
            os.kill(pid, signal.SIGTERM)
        time.sleep(patient(0.5))  # until all ranks have their signal
        assert "torchrun kills it after --shutdown-timeout, 30 s by default" in job.output()
        os.kill(job.pids()[1], signal.SIGKILL)
        assert job.wait(5) == [1, -signal.SIGKILL, 1]
        assert "s after the signal, where torchrun waits --shutdown-timeout=30 s?)" in job.output()
