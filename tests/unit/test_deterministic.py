"""`train.deterministic`: passes run with torch's deterministic algorithms, and nothing else does."""

import torch

from spmd_rl.config.schema import AlgorithmConfig, PolicyConfig, TrainConfig
from spmd_rl.distributed import Layout
from spmd_rl.learn.losses import bind_loss
from spmd_rl.model.build import build_model
from tests.engines import one_rank
from tests.models import tiny
from tests.training import fsdp2_policy, global_batch


def test_forward_and_backward_passes_run_with_them_and_the_process_is_as_before(tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    model, batch = build_model(tiny("llama", tmp_path), torch.float32, "cpu"), global_batch()
    seen = {"forward": [], "backward": []}

    def note(way):
        return lambda *_: seen[way].append(torch.get_deterministic_debug_mode())

    model.model.layers[0].register_forward_hook(note("forward"))
    model.model.layers[0].register_full_backward_hook(note("backward"))
    with one_rank() as world:
        train = TrainConfig(deterministic=True)
        policy = fsdp2_policy(model, Layout(world), train, torch.float32, PolicyConfig(model=""), 10)
        metrics = policy.update(batch, bind_loss(AlgorithmConfig()), 1.0)
    assert metrics["grad_norm"] > 0
    assert all(modes and set(modes) == {2} for modes in seen.values())  # 2: raise where there is no such algorithm
    assert torch.get_deterministic_debug_mode() == 0 and torch.utils.deterministic.fill_uninitialized_memory
