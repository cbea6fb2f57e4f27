"""Whole weights out of shards: every bit of every parameter on every rank, on one machine and on several."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from spmd_rl.distributed import Layout, World
from spmd_rl.train.fsdp2 import gather
from tests.dist.harness import run_ranks


def passes(world: World, bucket_bytes: int) -> list[bool]:
    """Uneven shapes, small buckets; whether each of three passes gives all."""
    gather.BUCKET_BYTES = bucket_bytes
    torch.manual_seed(0)
    model = nn.ParameterDict({f"p{i}": nn.Parameter(torch.randn(shape)) for i, shape in enumerate(SHAPES)})
    expected = {name: p.detach().to(torch.bfloat16).clone() for name, p in model.named_parameters()}
    layout = Layout(world)
    fully_shard(model, mesh=layout.mesh)
    parameters = dict(model.named_parameters())
    road = gather.Gather(parameters, torch.bfloat16, layout)
    right = []
    for _ in range(3):
        got = {key: tensor.clone() for key, tensor in road.whole(parameters)}
        right.append(list(got) == list(expected) and all(torch.equal(got[key], expected[key]) for key in expected))
    return right


def slices(world: World, dim: int, bucket_bytes: int) -> list:
    """The experts of each slice that comes, and whether they have the right bits."""
    gather.BUCKET_BYTES = bucket_bytes
    torch.manual_seed(0)
    model = nn.ParameterDict({"experts": nn.Parameter(torch.randn(8, 4, 6)), "norm": nn.Parameter(torch.randn(6))})
    expected = {name: p.detach().to(torch.bfloat16).clone() for name, p in model.named_parameters()}
    layout = Layout(world)
    placement = lambda p: Shard(dim) if p.dim() == 3 else None  # noqa: E731
    fully_shard(model, mesh=layout.mesh, shard_placement_fn=placement)
    parameters = dict(model.named_parameters())
    road = gather.Gather(parameters, torch.bfloat16, layout, ["experts"])
    coming, found = iter(road.experts.get("experts", [[*range(8)]])), []
    for name, tensor in road.whole(parameters):
        experts = next(coming) if name == "experts" else [0]
        wanted = expected[name][experts] if name == "experts" else expected[name]
        found.append([name, experts, torch.equal(tensor, wanted)])
    return found


@pytest.mark.parametrize(
    ("dim", "bucket_bytes", "experts"),
    [
        (0, 384, [[*range(8)]]),
        (0, 200, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (0, 64, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (1, 64, [[expert] for expert in range(8)]),
        (2, 150, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_stacked_experts_come_in_slices(dim: int, bucket_bytes: int, experts: list) -> None:
    for found in run_ranks(2, slices, dim, bucket_bytes):
        assert found == [*(["experts", some, True] for some in experts), ["norm", [0], True]]


SHAPES = [(7, 3), (1, 5), (16, 4), (33,), (2, 2, 2), (64, 8)]


@pytest.mark.parametrize(("size", "per_machine", "bucket_bytes"), [(1, 1, 64), (2, 2, 64), (2, 1, 64), (4, 4, 2**20)])
def test_every_bit_arrives(size: int, per_machine: int, bucket_bytes: int) -> None:
    assert run_ranks(size, passes, bucket_bytes, per_machine=per_machine) == [[True] * 3] * size
