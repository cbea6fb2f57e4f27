"""float16: the factor of the loss changes neither gradients nor metrics, and an overflow costs one update."""

import math

import pytest
import torch

from spmd_rl.config.schema import PolicyConfig, TrainConfig
from spmd_rl.distributed import Layout
from spmd_rl.model.build import build_model
from spmd_rl.train.fsdp2.model import FIRST, GROWS_AFTER, LossScale
from tests.engines import one_rank
from tests.models import tiny
from tests.training import TEMPERATURE, fsdp2_policy, global_batch, loss, plain_backward


def test_the_factor_halves_doubles_and_is_1_elsewhere() -> None:
    scale, wide = LossScale(torch.float16), LossScale(torch.bfloat16)
    for skipped in (True, False, True):
        scale.update(skipped)
        wide.update(skipped)
    assert (scale.factor, wide.factor) == (FIRST / 4, 1.0)
    for _ in range(GROWS_AFTER):
        scale.update(False)
    assert scale.factor == FIRST / 2


def test_updates_in_float16_follow_float32_and_an_overflow_is_skipped(tmp_path) -> None:
    path = tiny("llama", tmp_path / "model")
    settings = PolicyConfig(lr=1e-3, max_grad_norm=1e9, max_skipped_updates=50)
    with one_rank() as world:
        layout, train = Layout(world), TrainConfig()
        made = [
            fsdp2_policy(build_model(path, torch.float32, "cpu"), layout, train, torch.float16, settings)
            for _ in range(2)
        ]
        plain = build_model(path, torch.float32, "cpu", attention="sdpa")
        total, _ = plain_backward(plain, global_batch())
        norm = float(torch.stack([p.grad.norm() for p in plain.parameters()]).norm())

        def small(logprobs, entropy, batch):  # of gradients that float16 has no numbers for
            per_token, found = loss(logprobs, entropy, batch)
            return 1e-6 * per_token, found

        first = made[0].update(global_batch(), loss, TEMPERATURE)
        assert first["loss"] == pytest.approx(total, rel=1e-2)
        assert first["grad_norm"] == pytest.approx(norm, rel=2e-2) and first["loss_scale"] == FIRST
        tiny_ones = made[1].update(global_batch(), small, TEMPERATURE)
        assert tiny_ones["grad_norm"] == pytest.approx(1e-6 * norm, rel=2e-2)

        def huge(logprobs, entropy, batch):
            per_token, found = loss(logprobs, entropy, batch)
            return 100 * per_token, found

        before = {name: tensor.clone() for name, tensor in made[0].weights()}
        skipped = made[0].update(global_batch(), huge, TEMPERATURE)
        assert skipped["skipped"] == 1 and not math.isfinite(skipped["grad_norm"])
        assert skipped["loss_scale"] == FIRST / 2
        assert all(torch.equal(before[name], tensor) for name, tensor in made[0].weights())
        while (found := made[0].update(global_batch(), huge, TEMPERATURE))["skipped"]:
            pass
        assert found["grad_norm"] == pytest.approx(100 * norm, rel=0.5) and found["loss_scale"] < FIRST
        (tmp_path / "saved").mkdir()
        made[0].save(tmp_path / "saved")
        made[1].load(tmp_path / "saved")
        again = made[1].update(global_batch(), loss, TEMPERATURE)
        assert again["loss_scale"] == found["loss_scale"]
