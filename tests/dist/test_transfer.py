"""Samples and columns on their way between data shards, whose blocks may hold several ranks."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spmd_rl.batch import Batch
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.learn.transfer import RoleShards, Route, transfer
from spmd_rl.rollout.collected import Collected
from tests import plans
from tests.columns import assert_same, teacher_batch
from tests.dist.harness import run_ranks
from tests.fakes import table_of
from tests.unit.test_prepare import group, plan_of, sample

SAMPLES = [sample(ticket, answer, 1 + 3 * ticket + answer, 1.0) for ticket in range(4) for answer in range(3)]
GROUPS = [group(ticket, [(2 + ticket, 1.0), (30 - ticket, 0.0), (3, 0.5)]) for ticket in range(5)]


def every_kind(world: World, block: int) -> int:
    """[all] Columns of every kind, from scattered ranks to shards of `block` ranks. Returns the samples that came."""
    data, n = Layout(world, tp=block).data, len(SAMPLES)
    batch = teacher_batch(SAMPLES)
    route = Route(
        keys=batch.keys.numpy(),
        units=batch.units.numpy(),
        lengths=batch.starts.diff().numpy(),
        src_rank=np.arange(n) * 7 % world.size,
        data_rank=np.arange(n) % 3 % data.size,
        data=data,
    )
    mine = np.flatnonzero(route.src_rank == world.rank)[::-1]  # in another order than the route's
    arrived = transfer("all", batch.select(mine.copy()), route, world)
    wanted = np.flatnonzero(route.data_rank == data.rank)
    assert_same(arrived, teacher_batch([SAMPLES[i] for i in wanted]))
    return arrived.num_samples


@pytest.mark.parametrize(("size", "block"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_every_kind_of_column_arrives_on_all_ranks_of_a_block(size: int, block: int) -> None:
    numbers = run_ranks(size, every_kind, block)
    assert sum(numbers[::block]) == len(SAMPLES)
    assert all(len(set(numbers[i : i + block])) == 1 for i in range(0, size, block))


def role(world: World, block: int) -> SimpleNamespace:
    """What is asked of a role's place."""
    return SimpleNamespace(layout=SimpleNamespace(data=Layout(world, tp=block).data), hidden_size=64)


def fingerprints(batch: Batch) -> torch.Tensor:
    """A number for each token that depends on its sample, position and id alone."""
    keys = batch.keys.repeat_interleave(batch.starts.diff(), 0) @ torch.tensor([100, 10])
    return (keys + batch.position_ids + batch.token_ids / 64).float()


def asked(world: World, policy_block: int, role_block: int) -> list[list[int]]:
    """[all] A role on other shards computes a column. Returns how many samples of each mini-batch it has seen here."""
    policy, other = role(world, policy_block), role(world, role_block)
    mine = tuple(g for g in GROUPS if g.ticket % world.size == world.rank)
    collected = Collected(1, mine, (), table_of(GROUPS, lambda s: s.ticket % world.size), 0.0, 0, 0)
    plan = plan_of(collected, AlgorithmConfig(), 2, policy.layout.data.size)
    batches = plans.redistribute(collected, plan, 2, policy.layout.data, world)
    shards, seen = RoleShards(policy, other, plan, world), []

    def compute(batch: Batch) -> dict[str, torch.Tensor]:
        seen.append(batch.num_samples)
        return {"ref_logprobs": fingerprints(batch), "values": 3 * fingerprints(batch)}

    shards.fill_in("ref_logprobs", batches, compute)
    for batch in batches:
        assert torch.equal(batch.ref_logprobs, fingerprints(batch))
        assert torch.equal(batch.values, 3 * fingerprints(batch))
        batch.returns = 2 * fingerprints(batch)
    for batch in shards.share("update: critic", batches):  # with everything that the policy's ranks have found out
        assert torch.equal(batch.returns, 2 * fingerprints(batch)) and torch.equal(
            batch.ref_logprobs, batch.returns / 2
        )
    return [seen, [batch.num_samples for batch in batches]]


@pytest.mark.parametrize(
    ("size", "policy_block", "role_block"), [(2, 1, 2), (2, 2, 1), (4, 1, 2), (4, 4, 2), (4, 2, 2)]
)
def test_a_role_with_other_data_shards_is_asked_there(size: int, policy_block: int, role_block: int) -> None:
    results = run_ranks(size, asked, policy_block, role_block)
    for number, total in enumerate((9, 6)):
        assert sum(seen[number] for seen, _ in results[::role_block]) == total
        assert sum(held[number] for _, held in results[::policy_block]) == total
    for block, column in ((role_block, 0), (policy_block, 1)):
        assert all(results[i][column] == results[i - i % block][column] for i in range(size)), "a block is not alike"


def missing(world: World) -> str:
    """[all] A rank that believes in another route."""
    batch = teacher_batch(SAMPLES)
    ones = np.zeros(len(SAMPLES), np.int64)
    route = Route(batch.keys.numpy(), batch.units.numpy(), batch.starts.diff().numpy(), ones, ones, Layout(world).data)
    if world.rank == 1:
        route = replace(route, data_rank=ones + 1)
    with pytest.raises(Exception, match="differ from the others") as failed:
        transfer("all", batch.select(np.flatnonzero(route.src_rank == world.rank)), route, world)
    return type(failed.value).__name__


def test_ranks_with_different_routes_are_told_so() -> None:
    assert set(run_ranks(2, missing)) == {"RunFailed"}
