"""Mixtures of experts, whose weights transformers merges as it loads: what leaves us has the checkpoint's names."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from spmd_rl import weights
from spmd_rl.base.errors import UserError
from spmd_rl.checkpoint.export import ALONE, write_hf
from spmd_rl.distributed import solo
from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.module import empty_module
from spmd_rl.model.build import build_model, build_on_meta, weights_of
from spmd_rl.model.load import WeightFiles, load_weights, mismatch
from tests.models import EXPERTS, tiny
from tests.unit.test_publish import Policy


@pytest.fixture(params=sorted(EXPERTS))
def path(request, tmp_path):
    return tiny(request.param, tmp_path / "model", **EXPERTS[request.param])


def test_weights_are_those_of_the_checkpoint(path, tmp_path):
    stored, model = load_file(path / "model.safetensors"), build_model(path, torch.float32, "cpu", attention="sdpa")
    ours = weights_of(model)
    assert ours.keys() == stored.keys() and all(torch.equal(ours[name], stored[name]) for name in stored)
    assert any(".experts.3." in name for name in ours)
    assert all(ours[name].dtype == tensor.dtype for name, tensor in stored.items())
    write_hf(ours.items(), path, tmp_path / "out", ALONE, lambda: None)
    again, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == stored.keys()


def test_a_model_on_meta_is_filled_part_by_part(path):
    whole, model, files = build_model(path, torch.float32, "cpu"), build_on_meta(path, torch.float32), WeightFiles(path)
    assert mismatch(model, files) == ""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu")
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    load_weights(model, files)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), whole.parameters(), strict=True))
    assert files.bytes_read == sum(t.nbytes for t in load_file(path / "model.safetensors").values())


def test_the_road_into_an_engine(path):
    if "deepseek" in AutoConfig.from_pretrained(path).model_type:
        with pytest.raises(UserError, match="cannot run latent attention"):
            empty_module(path, torch.float32)
        return

    class Trainer(Policy):
        def weights(self):
            return ((name, tensor.detach()) for name, tensor in weights_of(self.model).items())

    engine = NativeEngine(empty_module(path, torch.float32), max_running=8, kv_tokens=512)
    with solo() as world:
        metrics = weights.build(Trainer(path, torch.float32), engine, world)(version=1)
    assert metrics["publish/probe_abs_diff"] < 1e-5
