"""Models that multiply their logits by a number: the native engine's logprobs are those of plain transformers."""

from array import array

import pytest
import torch

from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.module import empty_module
from spmd_rl.model.build import build_model, weights_of
from spmd_rl.model.logprobs import logit_factor
from spmd_rl.model.stored import stored_parts
from spmd_rl.types import Request
from tests.models import tiny

SCALED = {"cohere": ({"logit_scale": 0.25}, 0.25), "granite": ({"logits_scaling": 8.0}, 0.125), "llama": ({}, 1.0)}


@pytest.mark.parametrize("kind", SCALED)
def test_the_engine_scales_too(kind: str, tmp_path) -> None:
    settings, factor = SCALED[kind]
    path, prompt = tiny(kind, tmp_path, **settings), list(range(30, 47))
    model = build_model(path, torch.float32, "cpu", attention="sdpa")
    assert logit_factor(model.config) == factor
    engine = NativeEngine(empty_module(path, torch.float32), 4, 512)
    engine.load(weights_of(model, stored_parts(model)).items(), 1)
    engine.add(Request("a", array("i", prompt), 8, 1.0, 1))
    done = [completion for _ in range(8) for completion in engine.step()]
    answer = torch.tensor(list(done[0].token_ids))
    logits = model(input_ids=torch.tensor([prompt + answer.tolist()])).logits[0]
    wanted = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(-1, answer[:, None])[:, 0]
    assert (torch.tensor(list(done[0].logprobs)) - wanted).abs().max() < 1e-5
