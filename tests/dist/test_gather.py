"""Both roads of whole weights, the shared window and the group, give every bit of every parameter on every rank."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from spmd_rl.distributed import Layout, SharedWindow, World
from spmd_rl.train.fsdp2 import gather
from tests.dist.harness import run_ranks


def both_roads(world: World, bucket_bytes: int) -> dict:
    """Uneven shapes, small buckets; three passes, since the window's halves are used in turn."""
    gather.BUCKET_BYTES = bucket_bytes
    torch.manual_seed(0)
    model = nn.ParameterDict({f"p{i}": nn.Parameter(torch.randn(shape)) for i, shape in enumerate(SHAPES)})
    expected = {name: p.detach().to(torch.bfloat16).clone() for name, p in model.named_parameters()}
    layout = Layout(world)
    fully_shard(model, mesh=layout.mesh)
    parameters = dict(model.named_parameters())
    roads = {"window": gather.Gather(parameters, torch.bfloat16, layout)}
    opened, SharedWindow.open = SharedWindow.open, classmethod(lambda *_: None)
    roads["group"] = gather.Gather(parameters, torch.bfloat16, layout)
    SharedWindow.open = opened
    right = {}
    for name, road in roads.items():
        passes = [{key: tensor.clone() for key, tensor in road.whole(parameters)} for _ in range(3)]
        right[name] = all(
            list(got) == list(expected) and all(torch.equal(got[key], expected[key]) for key in expected)
            for got in passes
        )
    return right | {"shared": roads["window"]._window is not None}


SHAPES = [(7, 3), (1, 5), (16, 4), (33,), (2, 2, 2), (64, 8)]


@pytest.mark.parametrize(("size", "bucket_bytes"), [(1, 64), (2, 64), (4, 2**20)])
def test_both_roads_give_every_bit(size: int, bucket_bytes: int) -> None:
    for seen in run_ranks(size, both_roads, bucket_bytes):
        assert seen == {"window": True, "group": True, "shared": size > 1}
