"""FSDP through shared memory against FSDP through gloo, and layers that are kept against layers that are given back."""

import pytest
import torch

from spmd_rl.config.schema import PolicyConfig, TrainConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.model.build import build_model
from spmd_rl.train.fsdp2 import FSDP2Backend, shard
from tests.dist.harness import run_ranks
from tests.dist.test_train_parity import SETTINGS, SHARES, TEMPERATURE, forward, global_batch, loss
from tests.models import tiny


def roads(world: World, path) -> dict[str, bool]:
    """Whether gradients, logprobs before and after updates, and weights are bitwise those of the plainest road."""
    seen: dict[str, list[torch.Tensor]] = {}
    through_memory = shard.open_comms
    for dtype in ("float32", "bfloat16"):
        for road in ("gloo", "memory"):
            for reshard in (True, False):
                shard.open_comms = through_memory if road == "memory" else lambda *_: None
                seen[f"{dtype} {road} {reshard}"] = run(world, path, dtype, reshard)
    plain = {dtype: seen[f"{dtype} gloo True"] for dtype in ("float32", "bfloat16")}
    return {
        case: all(torch.equal(a, b) for a, b in zip(found, plain[case.split()[0]], strict=True))
        for case, found in seen.items()
    }


def run(world: World, path, dtype: str, reshard: bool) -> list[torch.Tensor]:
    train = TrainConfig(tokens_per_microbatch=50, reshard_after_forward=reshard)
    model = build_model(path, torch.float32, "cpu")
    policy = PolicyConfig(**SETTINGS)
    mine = FSDP2Backend(model, Layout(world), train, getattr(torch, dtype), policy, total_updates=5)
    share = global_batch().select(SHARES["uneven"](world.rank, world.size))
    mine._accumulate(share, forward(mine), loss)
    found = [p.grad.full_tensor() for p in mine._optimizer._parameters.values()]
    mine._optimizer.zero_grad()
    for _ in range(2):
        found += mine.logprobs(share, TEMPERATURE)
        mine.update(share, loss, TEMPERATURE)
        found += [weight.clone() for _, weight in mine.weights()]
    return found


@pytest.mark.parametrize("size", [1, 2])  # two numbers have one sum, whoever adds them
def test_every_road_gives_the_same_bits(size: int, tmp_path) -> None:
    path = tiny("qwen2", tmp_path, head_dim=16, intermediate_size=90, vocab_size=263)  # nothing divides by 4
    for facts in run_ranks(size, roads, str(path), timeout=200):
        assert all(facts.values()), facts
        assert len(facts) == 8
