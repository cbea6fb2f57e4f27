"""The last stretch of the weight road: what the first rank of a replica fetched, on all of its ranks, to the bit."""

import torch

from spmd_rl.distributed import World
from spmd_rl.weights import messages
from spmd_rl.weights.replica_broadcast import ReplicaBroadcast
from tests.dist.harness import run_ranks

SHAPES = [("odd", torch.bfloat16, (3, 5)), ("askew", torch.float32, (7,)), ("none", torch.float32, (0, 4))]
SHAPES += [("flag", torch.bool, (1,)), ("large", torch.float64, (40, 40)), ("scalar", torch.int64, ())]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def pieces(index: int) -> list:
    """A version of a replica's own, so that one could not pass for another's."""
    draws = torch.Generator().manual_seed(index)
    tensors = [(name, torch.randint(-9, 9, shape, generator=draws).to(dtype)) for name, dtype, shape in SHAPES]
    return [(name, tensor, messages.digest(bytes_of(tensor))) for name, tensor in tensors]


def carried(world: World, tp: int, bucket_bytes: int) -> list:
    replica = ReplicaBroadcast(world, tp, bucket_bytes)
    own = pieces(world.rank // tp)
    said = replica.broadcast("test: hello", world.rank)
    arrived = [
        (name, str(tensor.dtype), list(tensor.shape), bytes_of(tensor).hex(), digest.hex())
        for name, tensor, digest in replica.carry(own if replica.leads else None)
    ]
    expected = [(name, str(t.dtype), list(t.shape), bytes_of(t).hex(), digest.hex()) for name, t, digest in own]
    return [arrived == expected, len(arrived), replica.leads, said]


def test_all_ranks_of_a_replica_get_what_its_first_one_has() -> None:
    for ranks, tp, bucket_bytes in [(2, 2, 2**20), (4, 2, 1), (4, 2, 100), (4, 4, 64), (2, 1, 1)]:
        results = run_ranks(ranks, carried, tp, bucket_bytes)
        for rank, (equal, count, leads, said) in enumerate(results):
            assert equal and count == len(SHAPES)
            assert leads == (rank % tp == 0) and said == rank // tp * tp
