"""Whole weights out of shards: every bit of every parameter on every rank, on one machine and on several."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

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


SHAPES = [(7, 3), (1, 5), (16, 4), (33,), (2, 2, 2), (64, 8)]


@pytest.mark.parametrize(("size", "per_machine", "bucket_bytes"), [(1, 1, 64), (2, 2, 64), (2, 1, 64), (4, 4, 2**20)])
def test_every_bit_arrives(size: int, per_machine: int, bucket_bytes: int) -> None:
    assert run_ranks(size, passes, bucket_bytes, per_machine=per_machine) == [[True] * 3] * size
