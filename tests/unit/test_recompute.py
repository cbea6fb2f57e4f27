"""Activation checkpointing: the same gradients, of less that is kept."""

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

from spmd_rl.base.errors import UserError
from spmd_rl.config.schema import TrainConfig
from spmd_rl.config.sections.lora import LoraConfig
from spmd_rl.model.attention import Packing
from spmd_rl.model.build import build_model
from spmd_rl.train.adapters import Adapters
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
def test_a_recomputed_layer_draws_the_same_dropout(mode: str, tmp_path) -> None:
    def gradients(mode: str) -> dict[str, torch.Tensor]:
        model, ids = build_model(path, torch.float64, "cpu"), torch.arange(32)
        torch.manual_seed(2)
        adapters = Adapters(model, LoraConfig(rank=2, dropout=0.5), "policy.train")
        adapters.set_dropout(True)
        recompute(model, mode)
        packing = Packing.of(torch.tensor([0, len(ids)]))
        torch.manual_seed(3)
        out = model(input_ids=ids[None], position_ids=torch.arange(len(ids))[None], packing=packing).logits
        torch.manual_seed(4)
        out.square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    path = tiny("llama", tmp_path)
    kept, found = gradients("none"), gradients(mode)
    assert any(gradient.abs().max() > 0 for gradient in kept.values())
    assert all(torch.equal(found[name], gradient) for name, gradient in kept.items())


@pytest.mark.parametrize(
    ("given", "meant"), [("true", "full"), (True, "full"), ("selective", "selective"), (False, "none")]
)
def test_names(given, meant) -> None:
    assert TrainConfig(activation_checkpointing={"true": True}.get(given, given)).activation_checkpointing == meant


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UserError, match="activation_checkpointing: unknown name 'some'; known: none, selective, full"):
        TrainConfig(activation_checkpointing="some")
