"""Matrices in 4 bits: the values that NF4 has, rows that stand alone, and what is kept for the backward pass."""

import pytest
import torch
from torch import nn

from spmd_rl.config.schema import PolicyConfig, TrainConfig
from spmd_rl.config.sections.lora import LoraConfig
from spmd_rl.distributed import Layout
from spmd_rl.model.build import build_model
from spmd_rl.model.lora import PREFIX
from spmd_rl.train.nf4 import CODE, Packed, pack, pack_layer, rounded, unpack
from tests.engines import needs_nf4, one_rank
from tests.models import tiny
from tests.training import fsdp2_policy


@pytest.mark.parametrize("shape", [(3, 50), (5, 64), (2, 200)])
def test_each_block_of_a_row_takes_the_nearest_of_16_values(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight[0] = 0
    found = rounded(weight)
    assert pack(weight).shape == (shape[0], -(-shape[1] // 64) * 34), "4 bits and a quarter"
    for begin in range(0, shape[1], 64):
        block, got = weight[:, begin : begin + 64], found[:, begin : begin + 64]
        factor = block.abs().amax(1, keepdim=True).bfloat16().float()
        error = (block[..., None] - factor[..., None] * torch.tensor(CODE)).abs().amin(-1)
        assert torch.allclose((block - got).abs(), error, rtol=0, atol=1e-6)
    assert not found[0].any() and torch.equal(rounded(found), found), "what has the values already keeps them"
    assert torch.equal(torch.cat([rounded(row[None]) for row in weight]), found), "a row is the same in any shard"


def test_a_packed_layer_computes_with_its_values_and_keeps_bytes_alone() -> None:
    layer = nn.Linear(100, 70, dtype=torch.float64)
    wanted = rounded(layer.weight.detach())
    pack_layer(layer)
    given = torch.randn(4, 100, dtype=torch.float64, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = layer(given)
    (gradient,) = torch.autograd.grad(out.square().sum(), given)
    assert isinstance(layer, Packed) and [t.dtype for t in kept] == [torch.uint8]
    assert torch.equal(out, given @ wanted.t() + layer.bias)
    assert torch.allclose(gradient, 2 * out.detach() @ wanted)


@needs_nf4
def test_what_is_frozen_is_held_in_4_bits_and_published_as_what_it_means(tmp_path) -> None:
    path = tiny("llama", tmp_path, hidden_size=128, head_dim=32)
    plain = build_model(path, torch.float32, "cpu")
    with one_rank() as world:
        settings = PolicyConfig(lora=LoraConfig(rank=4, base="nf4"))
        model = build_model(path, torch.float32, "cpu")
        policy = fsdp2_policy(model, Layout(world), TrainConfig(), torch.float32, settings, 5)
        held = {name: p.to_local() for name, p in policy.model.module.named_parameters() if ".base_layer." in name}
        assert len(held) == 2 * 7 and {p.dtype for p in held.values()} == {torch.uint8}
        apart = {name: tensor.clone() for name, tensor in policy.weights("apart")}
        alone = [name for name, _ in policy.weights("alone")]
        merged = {name: tensor.clone() for name, tensor in policy.weights()}
    assert alone == [name for name in apart if name.startswith(PREFIX)] and len(alone) == 2 * 2 * 7
    for name, p in plain.named_parameters():
        is_packed = name.endswith("_proj.weight")
        wanted = rounded(p.detach()) if is_packed else p
        assert torch.equal(apart[name], wanted) and torch.equal(merged[name], wanted)
        if is_packed:
            bits = held[name.replace(".weight", ".base_layer.weight")]
            assert bits.nbytes * 8 == 4.25 * p.numel() and torch.equal(unpack(bits, p.shape[1], p.dtype), wanted)
