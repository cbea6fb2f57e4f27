"""Which experts an engine says that it chose: those of plain transformers, packed as a batch's column."""

from array import array
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from spmd_rl.base.errors import UserError
from spmd_rl.batch import pack
from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.module import empty_module
from spmd_rl.model.build import build_model, weights_of
from spmd_rl.model.moe import router_class
from spmd_rl.model.stored import stored_parts
from spmd_rl.types import Completion, Request, Sample, Turn, Verdict
from tests.engines import needs_sglang, started_engine
from tests.models import EXPERTS, tiny

PROMPTS = {"a": range(30, 47), "b": range(40, 49), "c": range(30, 47)}
TOP_K = 2


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny("qwen3_moe", tmp_path_factory.mktemp("model"), **EXPERTS["qwen3_moe"])


@contextmanager
def native(path):
    yield NativeEngine(empty_module(path, torch.float32), 4, 512, records_experts=True)


sglang = partial(started_engine, "sglang", max_running=4, kv_tokens=512, router_replay=True)
in_pieces = partial(sglang, args={"chunked_prefill_size": 5})
ENGINES = [
    pytest.param((native, 3), id="native"),
    pytest.param((sglang, 3), marks=needs_sglang, id="sglang"),
    pytest.param((in_pieces, 8), marks=needs_sglang, id="sglang-in-pieces"),
]
"""Of each, after how many steps the second answer has three tokens."""


@pytest.fixture(scope="module", params=ENGINES)
def answers(request, path) -> dict[str, Completion]:
    """Of three prompts, two of them the same, one of which is given up after three tokens."""
    started, steps = request.param
    model, done = build_model(path, torch.float32, "cpu"), {}
    with started(path) as engine:
        engine.load(weights_of(model, stored_parts(model)).items(), 1)
        for number, (name, prompt) in enumerate(PROMPTS.items()):
            engine.add(Request(name, array("i", prompt), 8 + number, 1.0, number))
        for step in range(steps + 12):
            if step == steps:
                engine.abort(["b"])
            done |= {completion.id: completion for completion in engine.step()}
    return done


def plain_choices(path, ids: list[int]) -> torch.Tensor:
    """Of each token: [T, layers, k]."""
    model, seen = build_model(path, torch.float32, "cpu", attention="sdpa"), []
    for module in model.modules():
        if isinstance(module, router_class(model)):
            module.register_forward_hook(lambda m, args, out: seen.append(out[2]))
    model(input_ids=torch.tensor([ids]))
    return torch.stack(seen, 1)


def test_they_are_those_of_plain_transformers(path, answers) -> None:
    assert len(answers["b"].token_ids) == 3 and answers["b"].finish_reason == "abort"
    for name, answer in answers.items():
        prompt, length = list(PROMPTS[name]), len(answer.token_ids)
        wanted = plain_choices(path, prompt + list(answer.token_ids))[len(prompt) :]
        got = torch.tensor(answer.experts).view(length, 2, TOP_K)
        assert torch.equal(got[:-1].sort(-1).values, wanted[:-1].sort(-1).values), name
        assert (got[-1] == -1).all()


def test_a_batch_has_them_at_sampled_tokens(answers) -> None:
    samples = []
    for number, (name, c) in enumerate(sorted(answers.items())):
        turn = Turn(array("i", PROMPTS[name]), c.token_ids, c.logprobs, c.versions, "stop", experts=c.experts)
        samples.append(Sample(number, 0, (turn,), Verdict("ok", 1.0)))
    batch = pack(samples, replayed=True)
    lengths = batch.experts.offsets.diff()
    assert torch.equal(lengths > 0, batch.loss_mask) and set(lengths.tolist()) == {0, 2 * TOP_K}
    assert batch.experts.values.tolist() == [e for _, c in sorted(answers.items()) for e in c.experts]
    chosen = batch.select([2]).experts
    assert chosen.values.tolist() == list(answers["c"].experts)
    assert pack([], replayed=True).experts.values.dtype == torch.int16


def test_a_model_without_experts_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match=r"policy.router_replay: .* not a mixture"):
        NativeEngine(empty_module(tiny("llama", tmp_path), torch.float32), 4, 512, records_experts=True)
