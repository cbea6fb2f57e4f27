"""`train.compile`: layers that torch compiles give the logprobs and the gradients of those that it runs one by one."""

import shutil

import pytest
import torch

from spmd_rl.config.schema import PolicyConfig, TrainConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.model.build import build_model
from spmd_rl.model.load import local
from tests.dist.harness import run_ranks
from tests.models import tiny
from tests.training import SETTINGS, SHARES, TEMPERATURE, fsdp2_policy, global_batch, loss, relative


def differences(world: World, path, kept: str) -> list[float]:
    """[all] The number of graphs; relative differences of logprobs and entropy, and of moments, that is gradients."""
    seen = []
    for compiled in (False, True):
        policy = PolicyConfig(**{**SETTINGS, "lr": 0.0})
        model = build_model(path, torch.float32, "cpu")
        mine = fsdp2_policy(
            model, Layout(world), TrainConfig(compile=compiled, activation_checkpointing=kept), torch.float32, policy
        )
        found = []
        for seed in range(2):
            share = global_batch(seed).select(SHARES["dealt"](world.rank, world.size))
            found += mine.logprobs(share, TEMPERATURE)
            mine.update(share, loss, TEMPERATURE)
            found += [local(moment).clone() for moment in mine.model.state_dict()["optimizer"].values()]
        seen.append(found)
    plain, compiled = seen
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return [graphs, *(relative(c, p) for p, c in zip(plain, compiled, strict=True) if p.norm() > 0)]


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["none", "selective", "full"])
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on CPU needs a C++ compiler")
def test_compiled_layers_compute_the_same(kept, tmp_path) -> None:
    path = tiny("qwen3", tmp_path / "model")
    env = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "kernels")}
    for graphs, *off in run_ranks(2, differences, str(path), kept, timeout=240, env=env):
        assert graphs == 2, "one without gradients and one with them, for both layers and both batches"
        assert len(off) > 40 and max(off) < 1e-5
