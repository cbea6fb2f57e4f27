"""A forward, a loss and (on `meta`) a backward on tensors without content: one on the wrong device fails, and so does
a look at one.

On `meta` everywhere, with padded attention; on a fake `cuda`, with that of variable length, where torch is a build for
CUDA. Neither needs a GPU. Whatever reads a number back from the device (a mask's `nonzero`, `float()`) raises on both.
"""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from spmd_rl import batch as batches
from spmd_rl.algo import POLICY_LOSSES
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.config.sections.algorithm import CorrectionConfig
from spmd_rl.learn.losses import bind_loss
from spmd_rl.model import attention
from spmd_rl.model.build import build_model
from spmd_rl.model.logprobs import TokenHead
from spmd_rl.train.sharing import share_prefixes
from tests.models import tiny
from tests.training import global_batch

needs_cuda_build = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="torch is built without CUDA")
KINDS = ["meta", pytest.param("cuda", marks=needs_cuda_build)]


class Nowhere:
    """A device whose tensors have no content."""

    def __init__(self, kind):
        self.device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
        self.mode = FakeTensorMode() if kind == "cuda" else nullcontext()

    def __call__(self, tensor, device=None):
        """A tensor like this one, there."""
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)


@pytest.fixture(params=KINDS)
def nowhere(request, monkeypatch):
    nowhere = Nowhere(request.param)
    for module in (attention, batches):  # torch would look for a driver before it copied to a fake device
        monkeypatch.setattr(module, "to_device", nowhere)
    return nowhere


def moved(model, nowhere):
    """The model with its parameters and buffers there."""
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            module._parameters[name] = torch.nn.Parameter(nowhere(p.detach()))
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = nowhere(buffer)
    return model


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
def test_a_micro_batch_stays_on_its_device_and_nobody_waits_for_it(kind, loss, nowhere, tmp_path):
    device, dtype = nowhere.device, torch.bfloat16
    model = build_model(tiny(kind, tmp_path), dtype, "cpu")
    head = TokenHead(model.get_output_embeddings())
    model.set_output_embeddings(head)
    model, batch = moved(model, nowhere), global_batch()
    batch.marked = torch.zeros(batch.num_tokens, dtype=torch.bool)
    tree, targets = share_prefixes(batch), batch.sampled.index
    head.targets = nowhere(batch.token_ids[targets])
    given = {
        "input_ids": nowhere(tree.token_ids[None]),
        "position_ids": nowhere(tree.position_ids[None]),
        "packing": attention.Packing.of(tree.starts, tree.parents, device, dtype),
        "logits_to_keep": nowhere(tree.gather_index[targets - 1]),
    }
    there, settings = batch.to(device), AlgorithmConfig(loss=loss, correction=CorrectionConfig("token", upper=2.0))
    with nowhere.mode:
        out = model(**given, use_cache=False).logits[0]
        assert out.device == device and out.dtype == torch.float32
        per_token, quantities = bind_loss(settings)(*out.unbind(-1), there)
        total = (per_token * there.weights[there.sampled.index]).sum()
        assert total.device == device and all(values.device == device for values in quantities.values())
        if device.type == "cuda":  # autograd's engine looks for a driver
            return
        total.backward()
    assert {p.grad.device for p in model.parameters()} == {device}


def test_a_look_at_the_device_raises(nowhere):
    """What the test above leans on."""
    mask = nowhere(torch.ones(3, dtype=torch.bool))
    with nowhere.mode:
        for look in (lambda: mask.nonzero(), lambda: float(mask.sum()), lambda: bool(mask.any())):
            with pytest.raises((RuntimeError, NotImplementedError)):
                look()
