"""Activation checkpointing: the same gradients, of less that is kept."""

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

from spmd_rl.base.errors import UserError
from spmd_rl.config.schema import TrainConfig
from spmd_rl.model.attention import Packing
from spmd_rl.model.build import build_model
from spmd_rl.train.recompute import recompute
from tests.models import tiny


def measured(path, mode: str) -> tuple[int, int, dict[str, torch.Tensor]]:
    """Bytes that a forward pass keeps, operations of both passes, gradients."""
    model, ids = build_model(path, torch.float64, "cpu"), torch.arange(128) % 250
    recompute(model, mode)
    packing, tracker = Packing.of(torch.tensor([0, len(ids)])), MemTracker()
    tracker.track_external(model)
    with FlopCounterMode(display=False) as flops:
        with tracker:
            out = model(input_ids=ids[None], position_ids=torch.arange(len(ids))[None], packing=packing).logits
            held = tracker.get_tracker_snapshot()[torch.device("cpu")]["Total"]
        out.square().mean().backward()
    return held, flops.get_total_flops(), {name: p.grad for name, p in model.named_parameters()}


def test_the_same_gradients_of_less_memory_or_less_work(tmp_path) -> None:
    path = tiny("llama", tmp_path)
    found = {mode: measured(path, mode) for mode in ("none", "selective", "full")}
    for mode, (_, _, gradients) in found.items():
        for name, gradient in found["none"][2].items():
            assert torch.equal(gradients[name], gradient), (mode, name)
    held, work = ([found[mode][i] for mode in found] for i in (0, 1))
    assert held == sorted(held, reverse=True) and len(set(held)) == 3
    assert work == sorted(work) and len(set(work)) == 3


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_recomputed_layer_drops_what_its_forward_pass_dropped(mode, tmp_path) -> None:
    path, gradients = tiny("llama", tmp_path), {}
    for each in ("none", mode):
        model, ids = build_model(path, torch.float64, "cpu"), torch.arange(64) % 250
        for layer in model.model.layers:
            layer.mlp.down_proj = nn.Sequential(nn.Dropout(0.5), layer.mlp.down_proj)
        recompute(model.train(), each)
        torch.manual_seed(0)
        packing = Packing.of(torch.tensor([0, len(ids)]))
        out = model(input_ids=ids[None], position_ids=torch.arange(len(ids))[None], packing=packing).logits
        out.square().mean().backward()
        gradients[each] = {name: p.grad for name, p in model.named_parameters()}
    for name, gradient in gradients["none"].items():
        assert torch.equal(gradients[mode][name], gradient), name


@pytest.mark.parametrize(
    ("given", "meant"), [("true", "full"), (True, "full"), ("selective", "selective"), (False, "none")]
)
def test_names(given, meant) -> None:
    assert TrainConfig(activation_checkpointing={"true": True}.get(given, given)).activation_checkpointing == meant


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UserError, match="activation_checkpointing: unknown name 'some'; known: none, selective, full"):
        TrainConfig(activation_checkpointing="some")
