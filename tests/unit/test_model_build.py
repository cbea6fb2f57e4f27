"""Model directories: what loads, and the one line that says why another does not. Logprobs against log_softmax."""

import json
import math
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spmd_rl.base.errors import UserError
from spmd_rl.model.build import build_model
from spmd_rl.model.constraint import Allowed
from spmd_rl.model.logprobs import Candidates, token_logprobs
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


@pytest.mark.parametrize("truncated", ["", "listed", "masked"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rows", [1, 0, 23])
def test_logprobs_and_entropy(rows, temperature, truncated, monkeypatch):
    monkeypatch.setattr("spmd_rl.model.logprobs.CHUNK", 300)  # several parts of the vocabulary, the last one short
    draw = torch.Generator().manual_seed(0)
    hidden = (torch.randn(rows, 8, generator=draw, dtype=torch.float64) * 2).requires_grad_()
    weight = torch.randn(300, 8, generator=draw, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, 300, (rows,), generator=draw)
    weights = torch.randn(rows, generator=draw, dtype=torch.float64)
    logits, support, cut = hidden @ weight.T / temperature, None, torch.zeros(rows, 300, dtype=torch.bool)
    if truncated:
        cut = torch.rand(rows, 300, generator=draw) < torch.arange(1, rows + 1)[:, None] / (rows + 1)
        cut[torch.arange(rows), targets] = False
        cut[7:8] = False  # a row that was drawn from all tokens
        support = Candidates(*(~cut & cut.any(-1, keepdim=True)).nonzero().T)
        if truncated == "masked":
            bits = torch.nn.functional.pad(~cut, (0, 20)).view(rows, 10, 32).long()
            words = (bits << torch.arange(32)).sum(-1).int()
            support = Allowed(words, torch.arange(rows))
    full = torch.log_softmax(logits.masked_fill(cut, -torch.inf), -1)
    entropy = -(full.exp() * full.masked_fill(cut, 0.0)).sum(-1)
    wanted = full.gather(-1, targets[:, None])[:, 0], entropy
    got = token_logprobs(hidden, weight, targets, temperature, support)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for a, b in ((1.0, None), (None, 1.0), (1.0, -0.3)):
        ours, theirs = (
            torch.autograd.grad(
                sum((x * values * weights).sum() for x, values in zip((a, b), pair, strict=True) if x is not None),
                (hidden, weight),
                retain_graph=True,
            )
            for pair in (got, wanted)
        )
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_logprobs_of_a_bfloat16_model_are_float32():
    hidden, weight = torch.randn(3, 8).bfloat16().requires_grad_(), torch.randn(50, 8).bfloat16().requires_grad_()
    logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([1, 2, 3]))
    assert logprobs.dtype == entropy.dtype == torch.float32
    wanted = torch.log_softmax((hidden @ weight.T).float(), -1)[range(3), [1, 2, 3]]
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=1e-6)
    logprobs.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_products_of_the_head_have_aligned_rows():
    """Products of another width are several times slower on GPUs."""
    widths = set()

    class Widths(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.mm.default and out.shape[0] == 5000:
                widths.add(out.shape[1])
            return out

    hidden, weight = torch.randn(5000, 8, requires_grad=True), torch.randn(1280, 8, requires_grad=True)
    with Widths():
        token_logprobs(hidden, weight, torch.zeros(5000, dtype=torch.int64))[0].sum().backward()
    assert widths == {8, 128, 384}  # 2**21 // 5000 is 419


def test_logprobs_stay_finite_at_the_edges():
    hidden = torch.tensor([[0.0], [300.0], [-300.0]])
    weight = torch.arange(8.0)[:, None]
    logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([0, 7, 7]))
    assert logprobs.tolist() == pytest.approx([-math.log(8), 0.0, -2100.0])
    assert entropy.tolist() == pytest.approx([math.log(8), 0.0, 0.0], abs=1e-6)


PEAK = """
import resource, sys, torch
from spmd_rl.model.logprobs import token_logprobs
tokens, vocabulary = map(int, sys.argv[1:])
hidden = torch.randn(tokens, 16, requires_grad=True)
weight = torch.randn(vocabulary, 16, requires_grad=True)
torch.mm(hidden[:64], weight[:64].T).sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
token_logprobs(hidden, weight, torch.zeros(tokens, dtype=torch.int64))[0].sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_peak_memory_is_not_tokens_times_vocabulary():
    """4,096 tokens of a vocabulary of 65,536: their logits alone would be 1 GiB in float32."""
    command = [sys.executable, "-c", PEAK, "4096", "65536"]
    assert int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) < 200  # MiB
