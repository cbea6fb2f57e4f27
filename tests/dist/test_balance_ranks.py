"""Samples change ranks: the gradient does not, whoever made them, and nothing is lost on the way."""

from array import array
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from spmd_rl.base.errors import RunFailed
from spmd_rl.batch import Batch
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.learn import losses, prepare
from spmd_rl.rollout.collected import Collected
from spmd_rl.train.base import ForwardArgs
from spmd_rl.types import Group, Message, Prompt, Sample, Turn, Verdict
from tests import plans
from tests.dist.harness import run_ranks
from tests.fakes import table_of
from tests.models import tiny
from tests.training import TEMPERATURE, backend
from tests.unit.test_prepare import plan_of

NUM_UPDATES = 2
LAYOUTS = {
    "round robin": lambda ticket, size: ticket % size,
    "the last rank holds all": lambda ticket, size: size - 1,
    "first ranks of replicas of two": lambda ticket, size: ticket % max(1, size // 2) * 2 % size,
}


def group(ticket: int) -> Group:
    """Four answers of one or two turns, from a few tokens to some eighty."""
    samples = []
    for answer in range(4):
        generator = torch.Generator().manual_seed(10 * ticket + answer)
        turns = []
        for _ in range(1 + (ticket + answer) % 2):
            blank, n = torch.randint(1, 6, (2,), generator=generator).tolist()
            n += 70 * (ticket == 2 and answer == 1)
            ids = torch.randint(0, 256, (blank + n,), generator=generator).tolist()
            logprobs = (-5.5 + torch.randn(n, generator=generator)).tolist()
            prompt_ids, token_ids, versions = (array("i", x) for x in (ids[:blank], ids[blank:], [ticket] * n))
            turns.append(Turn(prompt_ids, token_ids, array("f", logprobs), versions, "stop"))
        score = 0.5 * ((ticket + 3 * answer) % 4)
        samples.append(Sample(ticket, answer, tuple(turns), Verdict("ok", score)))
    return Group(Prompt(f"{ticket:032x}", (Message("user", "?"),), "toy", ""), ticket, tuple(samples))


GROUPS = [group(ticket) for ticket in range(6)]


def harvest(world: World, layout: str, groups: list[Group]) -> Collected:
    """What this rank would hold after a rollout."""
    rank_of = {g.ticket: LAYOUTS[layout](g.ticket, world.size) for g in groups}
    mine = tuple(g for g in groups if rank_of[g.ticket] == world.rank)
    return Collected(1, mine, (), table_of(groups, lambda s: rank_of[s.ticket], 9), 0.0, 0, 0)


def moved(
    world: World, layout: str, num_ranks: int, groups: list[Group] = GROUPS
) -> tuple[prepare.UpdatePlan, list[Batch]]:
    """`num_ranks=1`: everything goes to rank 0, the reference."""
    collected = harvest(world, layout, groups)
    plan = plan_of(collected, AlgorithmConfig(), NUM_UPDATES, num_ranks)
    return plan, plans.redistribute(collected, plan, NUM_UPDATES, Layout(world).data, world)


def samples_of(batch: Batch) -> dict[str, list]:
    """Each sample's columns, by its key."""
    bounds, held = batch.starts.tolist(), {}
    columns = (batch.token_ids, batch.position_ids, batch.loss_mask, batch.rollout_logprobs, batch.lags)
    columns += (batch.advantages, batch.weights)
    for s, key in enumerate(batch.keys.tolist()):
        held[str(tuple(key))] = [column[bounds[s] : bounds[s + 1]].tolist() for column in columns]
    return held


def travel(world: World) -> dict:
    """What arrives on this rank under each layout, and how balanced it is."""
    seen = {}
    for layout in LAYOUTS:
        plan, batches = moved(world, layout, world.size)
        seen[layout] = {"held": [samples_of(batch) for batch in batches], "balance": plan.balance}
    seen["reference"] = [samples_of(batch) for batch in moved(world, "round robin", 1)[1]]
    return seen


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_sample_arrives_once_and_unchanged(size: int) -> None:
    results = run_ranks(size, travel)
    wanted = results[0].pop("reference")
    assert [len(held) for held in wanted] == [12, 12]
    for layout in LAYOUTS:
        for number in range(NUM_UPDATES):
            shares = [seen[layout]["held"][number] for seen in results]
            assert all(shares), "a rank trains nothing"
            assert sum(len(share) for share in shares) == 12
            assert {key: columns for share in shares for key, columns in share.items()} == wanted[number]
        # who made a sample does not decide who trains it
        assert [seen[layout] for seen in results] == [seen["round robin"] for seen in results]
        assert results[0][layout]["balance"] >= 1


def gradients(world: World, path: str) -> dict[str, float]:
    """Worst relative L2 error of each layout's gradients against those of everything on rank 0."""
    loss = losses.bind_loss(AlgorithmConfig(clip_low=0.5, clip_high=0.5))
    mine = backend(world, path, budget=60)
    wanted: list[dict[str, torch.Tensor]] = []
    errors = {}
    for name, layout, num_ranks in (("reference", "round robin", 1), *((n, n, world.size) for n in LAYOUTS)):
        for number, batch in enumerate(moved(world, layout, num_ranks)[1]):
            batch.old_logprobs = batch.rollout_logprobs
            mine.accumulate(batch, ForwardArgs(TEMPERATURE), loss)
            got = {key: p.grad.full_tensor() for key, p in mine.model.module.named_parameters()}
            mine.model.step(0.0, None)
            if name == "reference":
                wanted.append(got)
                assert all(float(g.norm()) > 0 for g in got.values())
            else:
                worst = max(float((got[k] - g).norm() / g.norm()) for k, g in wanted[number].items())
                errors[f"{name}, {number}"] = worst
    return errors


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_gradient_is_that_of_the_unbalanced_batch(size: int, tmp_path) -> None:
    path = tiny("qwen2", tmp_path)
    for errors in run_ranks(size, gradients, str(path)):
        assert len(errors) == NUM_UPDATES * len(LAYOUTS)
        assert max(errors.values()) < 1e-6, errors


def rows(world: World) -> list:
    """Uneven rows, nothing at all from rank 1, nothing at all for the last rank."""
    last = world.size - 1
    plan = [[0 if at == 1 or to == last else 1 + at + 2 * to for to in range(world.size)] for at in range(world.size)]
    sent = plan[world.rank]
    mine = torch.cat([torch.full((n, 3), 10 * world.rank + to, dtype=torch.uint8) for to, n in enumerate(sent)])
    got = world.exchange("rows", mine, sent, [row[world.rank] for row in plan], plan)
    assert got.shape[1:] == (3,) and got.dtype == torch.uint8
    return [[plan[at][world.rank] for at in range(world.size)], got[:, 0].tolist()]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_exchange_of_uneven_rows(size: int) -> None:
    for rank, (counts, got) in enumerate(run_ranks(size, rows)):
        assert got == [10 * at + rank for at, n in enumerate(counts) for _ in range(n)]


def misled(world: World, how: str) -> str:
    """What the ranks say if the last one has another plan."""
    collected = harvest(world, "round robin", GROUPS)
    plan = plan_of(collected, AlgorithmConfig(), NUM_UPDATES, world.size)
    if world.rank == world.size - 1:
        if how == "advantages":
            plan = replace(plan, advantages=np.nextafter(plan.advantages, np.inf))
        elif how == "data_rank":
            plan = replace(plan, data_rank=plan.data_rank[::-1])
        else:  # samples that it does not have
            plan = replace(plan, src_rank=(plan.src_rank + 1) % world.size)
    with pytest.raises(RunFailed) as failed:
        plans.redistribute(collected, plan, NUM_UPDATES, Layout(world).data, world)
    return str(failed.value)


@pytest.mark.parametrize("how", ["advantages", "data_rank", "src_rank"])
def test_a_rank_with_another_plan_is_named_by_all(how: str) -> None:
    (told,) = set(run_ranks(3, misled, how))
    assert told.startswith("prepare: samples: ranks [2] differ from the others: ")


def weigh(world: World) -> list[int]:
    """Bytes of samples that this rank sends and gets, all columns of what it trains, and the global batch's bytes."""
    through = [0, 0]

    def counted(name: str, rows: torch.Tensor, *args: Any) -> torch.Tensor:
        arrived = World.exchange(world, name, rows, *args)
        through[0], through[1] = through[0] + rows.nbytes, through[1] + arrived.nbytes
        return arrived

    world.exchange = counted
    plan, batches = moved(world, "round robin", world.size, [group(ticket) for ticket in range(64)])
    held = sum(
        getattr(batch, f.name).nbytes for batch in batches for f in fields(batch) if getattr(batch, f.name) is not None
    )
    return [*through, held, 17 * int(plan.lengths.sum())]


@pytest.mark.parametrize("size", [2, 4])
def test_no_rank_holds_more_than_its_share(size: int, capsys) -> None:
    results = run_ranks(size, weigh)
    share = results[0][3] / size
    worst = [max(r[i] for r in results) / share for i in range(3)]
    with capsys.disabled():
        print(f"\n{size} ranks, of global bytes / ranks: sent {worst[0]:.2f}, got {worst[1]:.2f}, held {worst[2]:.2f}")
    assert max(worst[:2]) < 1.2
    assert sum(r[1] for r in results) == results[0][3]
    assert worst[2] < 1.2 * 37 / 17, "33 bytes a token, and a key and a start for each sample"
