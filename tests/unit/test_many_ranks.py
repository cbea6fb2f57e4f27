"""What rank r of 256 would hold, in one process: torch's fake process group, and a model without memory."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from spmd_rl.distributed import Journal, Layout, World
from spmd_rl.distributed.membership import Membership, Rendezvous
from spmd_rl.model.load import owned_region
from spmd_rl.train.fsdp2 import shard
from spmd_rl.train.fsdp2.experts import spread_experts

RANKS = 256


@pytest.fixture
def rank_of_many(tmp_path):
    """Makes the world of a rank of 256."""

    def world(rank: int) -> World:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        me = Membership(rank, RANKS, rank % 8, 8, str(rank // 8), launched=True, device=torch.device("cpu"))
        return World(me, Rendezvous(dist.HashStore(), "many", None), Journal(tmp_path, rank))

    assert not dist.is_initialized(), "another test has left its default group"
    yield world
    dist.destroy_process_group()


def experts_of_30b(layers: int) -> torch.nn.Module:
    """Qwen3-30B-A3B with fewer layers, on the meta device."""
    config = Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("rank", [0, 77, 255])
def test_a_mixture_is_shared_out_evenly_where_there_are_fewer_experts_than_ranks(rank, rank_of_many):
    model = experts_of_30b(2)
    total = sum(p.numel() for p in model.parameters())
    shard.shard(model, Layout(rank_of_many(rank)), torch.bfloat16, keep_gathered=False)
    parts = {name: shard.local(p) for name, p in model.named_parameters()}
    assert sum(part.numel() for part in parts.values()) <= 1.01 * total / RANKS
    assert parts["model.layers.0.mlp.experts.gate_up_proj"].shape == (128, 1536 // RANKS, 2048)
    region = owned_region(dict(model.named_parameters())["model.layers.1.mlp.experts.down_proj"])
    assert region == (slice(0, 128), slice(rank * 8, rank * 8 + 8), slice(0, 768))


def test_experts_that_are_spread_are_shared_out_evenly_by_the_other_ranks(rank_of_many):
    rank = 77
    model, layout = experts_of_30b(2), Layout(rank_of_many(rank), ep=8)
    total = sum(p.numel() for p in model.parameters())
    spread_experts(model, layout)
    shard.shard(model, layout, torch.bfloat16, keep_gathered=False)
    assert sum(shard.local(p).numel() for p in model.parameters()) <= 1.01 * total / RANKS
    region = owned_region(dict(model.named_parameters())["model.layers.1.mlp.experts.down_proj"])
    first, rows = 16 * (rank % 8), 2048 // 32 * (rank // 8)
    assert region == (slice(first, first + 16), slice(rows, rows + 64), slice(0, 768))


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [((128, 1536, 2048), 64, None), ((128, 1536, 2048), 256, 1), ((128, 768, 2048), 1024, 2), ((100, 7), 64, None)],
)
def test_the_dimension_in_which_a_parameter_is_shared_out(shape, ranks, dim):
    placement = shard.placement(torch.Size(shape), ranks)
    assert (placement and placement.dim) == dim
