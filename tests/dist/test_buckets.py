"""Weights by broadcast: what ranks that train stream, on every rank that generates, whatever the buckets."""

import torch

from spmd_rl.distributed import World
from spmd_rl.weights import Buckets
from tests.dist.harness import run_ranks

SHAPES = [("odd", torch.bfloat16, (3, 5)), ("askew", torch.float32, (7,)), ("none", torch.float32, (0, 4))]
SHAPES += [("flag", torch.bool, (1,)), ("large", torch.float64, (40, 40)), ("scalar", torch.int64, ())]
SHAPES += [("int8", torch.int8, (33,)), ("fp8", torch.float8_e4m3fn, (2, 9))]


def pieces(version: int) -> list:
    draws = torch.Generator().manual_seed(version)
    return [(name, torch.randint(-9, 9, shape, generator=draws).to(dtype)) for name, dtype, shape in SHAPES]


def shown(name: str, tensor: torch.Tensor) -> tuple:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return name, str(tensor.dtype), list(tensor.shape), data.hex()


def broadcast(world: World, trainers: list[int], bucket_bytes: int) -> bool:
    buckets, equal = Buckets(world, trainers, bucket_bytes), []
    for version in range(2):
        found = buckets.send(pieces(version)) if world.rank in trainers else buckets.receive()
        equal.append([shown(*one) for one in found] == [shown(*one) for one in pieces(version)])
    return all(equal)


def test_every_rank_gets_every_tensor_once_and_in_order() -> None:
    for ranks, trainers, bucket_bytes in [(2, [0], 2**20), (4, [1, 2], 1), (4, [0, 1, 3], 100), (3, [2], 64)]:
        assert run_ranks(ranks, broadcast, trainers, bucket_bytes) == [True] * ranks
