"""Master weights that begin inside of their rounding intervals."""

import pytest
import torch
from torch import nn

from spmd_rl.model.lora import Adapter
from spmd_rl.train.dither import dither, merged


def linear(dtype=torch.bfloat16):
    torch.manual_seed(0)
    layer = nn.Linear(300, 200)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(p.to(dtype))
    return layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_rounded_model_is_the_same_to_the_bit(dtype):
    layer = linear(dtype)
    before = layer.weight.detach().clone()
    dither(layer, dtype)
    assert torch.equal(layer.weight.to(dtype).float(), before)
    assert (layer.weight != before).float().mean() > 0.99


@pytest.mark.parametrize("step", [3e-5, -3e-5, 1e-6])
def test_a_small_step_moves_the_rounded_weights_by_itself_on_average(step):
    layer = linear()
    before = layer.weight.detach().clone()

    def moved(weights):
        return float(((weights + step).bfloat16().float() - before).double().mean()) / step

    with torch.no_grad():
        assert moved(before) < 0.5, "without dither most of a small step is lost"
        dither(layer, torch.bfloat16)
        noise = float(before.abs().mean()) / 256 / abs(step) / before.numel() ** 0.5 * (abs(step) * 256) ** 0.5 * 8
        assert moved(layer.weight) == pytest.approx(1, abs=max(0.05, noise))


def test_the_offsets_do_not_depend_on_how_the_elements_are_processed(monkeypatch):
    whole, pieces = linear(), linear()
    dither(whole, torch.bfloat16)
    monkeypatch.setattr("spmd_rl.train.dither.CHUNK", 37)
    dither(pieces, torch.bfloat16)
    assert torch.equal(whole.weight, pieces.weight)
    assert torch.equal(whole.bias, pieces.bias)


def test_parameters_of_one_shape_get_offsets_of_their_own():
    layers = nn.ModuleList([linear() for _ in range(8)])
    dither(layers, torch.bfloat16)
    offsets = {tuple(layer.weight[0, :8].tolist()) for layer in layers}
    assert len(offsets) == len(layers)


def test_what_is_not_on_the_grid_stays_and_so_do_zeros_and_frozen_weights():
    layer = linear()
    with torch.no_grad():
        layer.weight[0] += 1e-6
        layer.weight[1] = 0
    layer.bias.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    dither(layer, torch.bfloat16)
    assert torch.equal(layer.weight[:2], before["weight"][:2])
    assert torch.equal(layer.bias, before["bias"])


def test_in_the_masters_own_dtype_nothing_happens():
    layer = linear()
    before = layer.weight.detach().clone()
    dither(layer, torch.float32)
    assert torch.equal(layer.weight, before)


def test_what_a_small_adapter_adds_arrives_on_average_and_in_any_part() -> None:
    draw = torch.Generator().manual_seed(2)
    weight = torch.randn(300, 200, generator=draw).bfloat16()
    adapter = Adapter(torch.rand(2, 200, generator=draw), torch.full((300, 2), 1e-5), 2.0)
    added = adapter.added_to(torch.zeros(300, 200))
    lost = (weight.float() + added).bfloat16().float() - weight.float()
    found = merged(adapter, weight, "layer.weight", 300)
    arrived = found.float() - weight.float()
    large = weight.abs() > 0.1  # whose steps are wider than what is added
    assert float(lost[large].abs().max()) == 0.0
    assert float(arrived[large].mean() / added[large].mean()) == pytest.approx(1.0, abs=0.15)
    parts = [merged(adapter, weight[a:b], "layer.weight", 300, slice(a, b)) for a, b in ((0, 130), (130, 300))]
    assert torch.equal(torch.cat(parts), found)
    assert torch.equal(merged(adapter._replace(scaling=0.0), weight, "layer.weight", 300), weight)
    wide = weight.float()
    assert torch.equal(merged(adapter, wide, "layer.weight", 300), adapter.added_to(wide))
    assert torch.equal(wide, weight.float()), "the trainer's own is not written to"
