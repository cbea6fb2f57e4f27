"""Model directories: what loads, and the one line that says why another does not. Logprobs against log_softmax."""

import json

import pytest
import torch

from spmd_rl.errors import UserError
from spmd_rl.model.build import build_model
from spmd_rl.model.logprobs import token_logprobs
from tests.models import KINDS, tiny


@pytest.mark.parametrize("kind", KINDS)
def test_builds_in_the_dtype_asked_for(kind, tmp_path):
    model = build_model(tiny(kind, tmp_path), torch.bfloat16, "cpu")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not model.training


def test_tied_weights_stay_tied(tmp_path):
    model = build_model(tiny("llama", tmp_path, tie=True), torch.float32, "cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def break_nothing_there(path):
    (path / "model.safetensors").unlink()


def break_pickle(path):
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def break_torn(path):
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def break_config(path):
    (path / "config.json").write_text("{")


def break_type(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "nonesuch"}))


def break_layers(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "layer_types": None}))


def break_shape(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 32}))


def break_remote(path):
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "x.Y", "AutoModelForCausalLM": "x.Z"}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "x.py").write_text("raise SystemExit('remote code ran')")


BREAKS = {
    break_nothing_there: "no .*safetensors .no weights",
    break_pickle: "pickled",
    break_torn: "does not load",
    break_config: "does not load",
    break_type: "does not load.*nonesuch",
    break_layers: "lacks 9 weights, among them model.layers.2",
    break_shape: "does not load",
    break_remote: "does not load",
}


@pytest.mark.parametrize("breakage", BREAKS, ids=lambda f: f.__name__)
def test_a_broken_directory_is_one_line(breakage, tmp_path):
    breakage(tiny("llama", tmp_path))
    with pytest.raises(UserError, match=BREAKS[breakage]) as caught:
        build_model(tmp_path, torch.float32, "cpu")
    assert "\n" not in str(caught.value)


def test_a_missing_directory_is_one_line(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        build_model(tmp_path / "nowhere", torch.float32, "cpu")
    with pytest.raises(UserError, match="config.json"):
        build_model(tmp_path, torch.float32, "cpu")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rows", [1, 0, 23])
def test_logprobs_and_entropy(rows, temperature, monkeypatch):
    monkeypatch.setattr("spmd_rl.model.logprobs.SLICE", 300)  # several slices, the last one short
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, 40, generator=generator, dtype=torch.float64) * 4).requires_grad_()
    targets = torch.randint(0, 40, (rows,), generator=generator)
    weights = torch.randn(rows, generator=generator, dtype=torch.float64)
    logprobs, entropy = token_logprobs(logits, targets, temperature)
    (got,) = torch.autograd.grad((logprobs * weights).sum(), logits)
    full = torch.log_softmax(logits / temperature, -1)
    wanted = full.gather(-1, targets[:, None])[:, 0]
    (want,) = torch.autograd.grad((wanted * weights).sum(), logits)
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1), rtol=0, atol=1e-12)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert not entropy.requires_grad


def test_logprobs_of_bfloat16_logits_are_float32():
    logits = torch.randn(3, 50).bfloat16().requires_grad_()
    logprobs, entropy = token_logprobs(logits, torch.tensor([1, 2, 3]))
    assert logprobs.dtype == entropy.dtype == torch.float32
    wanted = torch.log_softmax(logits.float(), -1)[range(3), [1, 2, 3]]
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=1e-6)
    logprobs.sum().backward()
    assert logits.grad.dtype == torch.bfloat16
