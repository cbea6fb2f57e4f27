"""`train.compile`: layers that torch compiles give the logprobs and the gradients of those that it runs one by one."""

import shutil

import pytest
import torch

from spmd_rl.config.schema import PolicyConfig, TrainConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.model.build import build_model
from spmd_rl.model.load import local
from tests.dist.harness import run_ranks
from tests.models import EXPERTS, tiny
from tests.training import SETTINGS, TEMPERATURE, fsdp2_policy, global_batch, loss, relative, share_of

DENSE, MIXTURE = 2, 6
"""Graphs without gradients and with them: of a layer; of the norms, the attention and the router of a mixture's."""


def compared(world: World, path, kept: str, axes: dict[str, int], own: dict[str, float]) -> dict:
    """[all] Numbers of graphs after each step, of their breaks, and of frames that torch gave up; relative differences
    of logprobs, entropy and loss, and of moments, that is gradients."""
    seen, graphs, counters = [], [], torch._dynamo.utils.counters
    for compiled in (False, True):
        policy = PolicyConfig(**{**SETTINGS, "lr": 0.0}, **own)
        train = TrainConfig(compile=compiled, activation_checkpointing=kept, **axes)
        model = build_model(path, torch.float32, "cpu")
        mine, found = fsdp2_policy(model, Layout(world, **train.axes), train, torch.float32, policy), []
        for seed in range(2):
            share = share_of(mine, "dealt", global_batch(seed))
            found += mine.logprobs(share, TEMPERATURE)
            metrics = mine.update(share, loss, TEMPERATURE)
            found += [torch.tensor(metrics[name]) for name in ("loss", "grad_norm", "actor/ratio")]
            found += [local(moment).clone() for moment in mine.model.state_dict()["optimizer"].values()]
            graphs.append(counters["stats"]["unique_graphs"])
        seen.append(found)
    plain, compiled = seen
    return {
        "graphs": graphs,
        "breaks": sum(counters["graph_break"].values()),
        "given up": counters["frames"]["total"] - counters["frames"]["ok"],
        "off": [relative(c, p) for p, c in zip(plain, compiled, strict=True) if p.norm() > 0],
    }


@pytest.mark.slow
@pytest.mark.timeout(600)  # four ranks compile on two cores
@pytest.mark.parametrize(
    ("kind", "size", "axes", "kept", "num_graphs"),
    [
        ("qwen3", 2, {}, "none", DENSE),
        ("qwen3", 2, {}, "selective", DENSE),
        ("qwen3", 2, {}, "full", DENSE),
        ("qwen3", 2, {"tp": 2}, "selective", DENSE),
        ("qwen3", 2, {"cp": 2}, "none", DENSE),
        ("qwen3_moe", 2, {"ep": 2}, "full", MIXTURE),
        # Here keys are gathered: one key-value head a rank is too few to exchange heads.
        ("qwen3", 4, {"tp": 2, "cp": 2}, "full", DENSE),
    ],
)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on CPU needs a C++ compiler")
def test_compiled_layers_compute_the_same(kind, size, axes, kept, num_graphs, tmp_path) -> None:
    path = tiny(kind, tmp_path / "model", **EXPERTS.get(kind, {}))
    own = {"router_aux_coef": 0.1} if kind in EXPERTS else {}
    env = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "kernels")}
    for found in run_ranks(size, compared, str(path), kept, axes, own, timeout=240, env=env):
        assert found["graphs"] == [0, 0, num_graphs, num_graphs], "for both layers, and none from the second step on"
        assert found["breaks"] == found["given up"] == 0
        assert len(found["off"]) > 40 and max(found["off"]) < 1e-5
