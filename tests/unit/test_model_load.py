"""Weights read part by part: what fits, and the one line that says why another directory does not."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmd_rl.base.errors import UserError
from spmd_rl.config.architectures import check_architecture
from spmd_rl.config.sections.models import ModelConfig, RoleConfig, TrainConfig
from spmd_rl.model.attention import Packing
from spmd_rl.model.build import build_model, build_on_meta, model_directory
from spmd_rl.model.load import WeightFiles, load_weights
from spmd_rl.train.stored_model import stored_model
from tests.models import KINDS, tiny
from tests.unit.test_model_build import BREAKS


def filled(path, dtype=torch.float32, **options):
    """The model of `path`, built without weights and then filled; and what was read."""
    model = build_on_meta(path, dtype)
    files = WeightFiles(model_directory(path))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu")
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    model.tie_weights()
    load_weights(model, files, **options)
    return model, files


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_filled_later_is_the_model_that_transformers_loads(kind, dtype, tmp_path):
    path = tiny(kind, tmp_path, tie=kind == "llama")
    model, files = filled(path, dtype)
    whole = build_model(path, dtype, "cpu")
    for (name, ours), (other, theirs) in zip(model.state_dict().items(), whole.state_dict().items(), strict=True):
        assert name == other and torch.equal(ours, theirs)
    ids, packing = torch.arange(9)[None], Packing.of(torch.tensor([0, 9]))
    assert torch.equal(model(input_ids=ids, packing=packing).logits, whole(input_ids=ids, packing=packing).logits)
    assert not model.training
    assert files.bytes_read == sum(t.nbytes for t in load_file(path / "model.safetensors").values())


def test_tied_weights_are_read_once_under_the_name_that_is_stored(tmp_path):
    path = tiny("llama", tmp_path, tie=True)
    stored = load_file(path / "model.safetensors")
    wanted = stored["model.embed_tokens.weight"]
    stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    model, files = filled(path)
    assert model.lm_head.weight is model.model.embed_tokens.weight and torch.equal(model.lm_head.weight, wanted)
    assert files.bytes_read == sum(t.nbytes for t in stored.values())


def test_several_files_and_another_dtype_on_disk(tmp_path):
    path = tiny("qwen2", tmp_path)
    stored = {name: tensor.bfloat16() for name, tensor in load_file(path / "model.safetensors").items()}
    (path / "model.safetensors").unlink()
    names = sorted(stored)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: stored[name] for name in held}, path / file, {"format": "pt"})
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    model, files = filled(path)
    assert all(torch.equal(p, stored[name].float()) for name, p in model.named_parameters())
    assert files.file_of(names[1]).name == "b.safetensors"
    assert files.bytes_read == sum(t.nbytes for t in stored.values())
    (path / "b.safetensors").unlink()
    with pytest.raises(UserError, match="does not load.*b.safetensors"):
        filled(path)


def critic(path, bias=True):
    """What `stored_model` makes of the directory for a critic, whole."""
    role = RoleConfig("critic", ModelConfig(), str(path), "float32", False, TrainConfig(), 1, value_bias=bias)
    stored = stored_model(role, torch.float32, lambda: None)
    if stored.load:
        stored.model.to_empty(device="cpu")
        stored.load(stored.model)
    return stored.model, stored.files


def test_a_value_head_is_zero_and_not_looked_for(tmp_path):
    path = tiny("llama", tmp_path)
    model, files = critic(path)
    assert not model.lm_head.weight.any() and not model.lm_head.bias.any() and model.model.embed_tokens.weight.any()
    stored = load_file(path / "model.safetensors")
    assert files.bytes_read == sum(t.nbytes for name, t in stored.items() if name != "lm_head.weight")


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_critic_begins_with_the_head_of_a_reward_model(kind, tmp_path):
    path = tiny(kind, tmp_path)
    score = torch.arange(64.0)[None]

    def become_scorer(stored):
        stored.pop("lm_head.weight")
        stored["score.weight"] = score

    spoil(path, become_scorer)
    config = json.loads((path / "config.json").read_text())
    scorer = config["architectures"][0].replace("CausalLM", "SequenceClassification")
    (path / "config.json").write_text(json.dumps(config | {"architectures": [scorer]}))
    model, _ = critic(path, bias=False)
    assert torch.equal(model.lm_head.weight, score) and model.lm_head.bias is None
    check_architecture("critic.model", path, 8, is_critic=True)
    with pytest.raises(UserError, match="policy.model: .* is not a causal language model but .*SequenceClassification"):
        check_architecture("policy.model", path, 8)
    spoil(path, lambda stored: stored.update({"score.weight": score.repeat(2, 1)}))
    with pytest.raises(UserError, match="has 2 outputs; a reward model has one"):
        critic(path)


def spoil(path, change):
    stored = load_file(path / "model.safetensors")
    change(stored)
    save_file(stored, path / "model.safetensors", {"format": "pt"})


def test_weights_that_do_not_fit_are_named_with_their_file(tmp_path):
    norm = "model.norm.weight"
    cases = {
        "lacks 1 weights, among them model.norm.weight": lambda stored: stored.pop(norm),
        "safetensors holds model.extra, which LlamaForCausalLM lacks": lambda s: s.update({"model.extra": s[norm] + 0}),
        r"safetensors: model.norm.weight has the shape \[63\], not \[64\]": lambda s: s.update(
            {norm: s[norm][:63] + 0}
        ),
    }
    whole = tiny("llama", tmp_path / "whole")
    for number, (told, change) in enumerate(cases.items()):
        path = shutil.copytree(whole, tmp_path / str(number))
        spoil(path, change)
        with pytest.raises(UserError, match=told) as caught:
            filled(path)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_rotary_tables_of_old_files_are_passed_over(tmp_path):
    path = tiny("llama", tmp_path)
    spoil(path, lambda stored: stored.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    filled(path)


@pytest.mark.parametrize("breakage", BREAKS, ids=lambda f: f.__name__)
def test_a_broken_directory_is_one_line(breakage, tmp_path):
    breakage(tiny("llama", tmp_path))
    with pytest.raises(
        UserError, match=BREAKS[breakage].replace("does not load", "(does not load|has the shape)")
    ) as c:
        filled(tmp_path)
    assert "\n" not in str(c.value)
