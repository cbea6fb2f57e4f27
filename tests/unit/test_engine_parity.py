"""Every engine against plain Hugging Face + torch in fp32: tokens, logprobs within 1e-5, and what all refuse."""

from array import array
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from spmd_rl.base.errors import RunFailed
from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.module import empty_module
from spmd_rl.engine.sequence import text_of_model
from spmd_rl.types import Completion, Request
from tests.engines import VLLM_SIZES, needs_sglang, needs_vllm, sglang_engine, vllm_engine
from tests.models import KINDS, tiny

STARTED = [("vllm", kind) for kind in ("qwen2", "qwen3", "tied")]
"""Slow, since each starts vLLM; a publish's probe compares a tied Llama's and a Qwen2's logprobs with the trainer's."""
LENGTHS = (1, 2, 16, 17, 18, 40, 33, 5)
"""prompt lengths around the block size, and a prompt of one token"""


@contextmanager
def native_engine(path):
    text_of = text_of_model(path, False)
    yield NativeEngine(empty_module(path, torch.float32), max_running=4, kv_tokens=1024, text_of=text_of)


BUILDERS = {
    "native": (native_engine, {}),
    "vllm": (partial(vllm_engine, max_running=4, kv_tokens=1024), VLLM_SIZES),
    "sglang": (partial(sglang_engine, max_running=4, kv_tokens=1024), {}),
}
"""name -> a context with the engine of a model directory, sizes it needs"""

MARKS = {"native": [], "vllm": [needs_vllm], "sglang": [needs_sglang]}
PAIRS = [
    pytest.param((name, kind), marks=MARKS[name] + [pytest.mark.slow] * ((name, kind) in STARTED), id=f"{name}-{kind}")
    for name in BUILDERS
    for kind in (*KINDS, "tied")
]


@pytest.fixture(scope="module", params=PAIRS)
def pair(request, tmp_path_factory):
    """A reference module and an engine that holds its weights."""
    name, kind = request.param
    builder, sizes = BUILDERS[name]
    path = tiny("llama" if kind == "tied" else kind, tmp_path_factory.mktemp("model"), tie=kind == "tied", **sizes)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with builder(path) as engine:
        engine.load(reference.named_parameters(), version=3)
        yield reference, engine


def prompt(length: int, seed: int = 0) -> array:
    """Random token ids."""
    return array("i", torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def drain(engine) -> dict[str, Completion]:
    """Step until nothing is left."""
    done = {}
    while engine.num_unfinished:
        done |= {completion.id: completion for completion in engine.step()}
    return done


def reference_logprobs(model, request: Request, completion: Completion) -> torch.Tensor:
    """One full forward over prompt and answer, no cache: float32 [answer tokens]."""
    ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0].float()
    at = torch.arange(len(request.prompt_ids) - 1, ids.shape[1] - 1)
    logits = logits[at] / (request.temperature or 1.0)
    if completion.candidate_ids is not None:
        logits = logits.masked_fill(~kept(completion, logits.shape[-1]), -torch.inf)
    return logits.log_softmax(-1).gather(-1, ids[0, at + 1, None])[:, 0]


def kept(completion: Completion, vocabulary: int) -> torch.Tensor:
    """bool [answer tokens, vocabulary]: the tokens that each was drawn among."""
    counts = torch.tensor(completion.candidate_ids.counts)
    rows = torch.arange(len(counts)).repeat_interleave(counts)
    mask = torch.zeros(len(counts), vocabulary, dtype=torch.bool)
    mask[rows, torch.tensor(completion.candidate_ids.ids, dtype=torch.int64)] = True
    assert torch.equal(mask.sum(-1), counts)
    return mask


def test_greedy_tokens_are_generates(pair):
    reference, engine = pair
    requests = [Request(f"g{n}", prompt(n, n), 20, 0.0, 0) for n in LENGTHS]
    for request in requests:
        engine.add(request)
    done = drain(engine)
    for request in requests:
        ids = torch.tensor([request.prompt_ids.tolist()])
        expected = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
        assert done[request.id].token_ids.tolist() == expected[0, len(request.prompt_ids) :].tolist()
        assert done[request.id].finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
def test_logprobs_are_those_of_a_full_forward(pair, temperature):
    reference, engine = pair
    requests = [Request(f"s{n}", prompt(n, n), 12 + n % 5, temperature, n) for n in LENGTHS]
    for request in requests:
        engine.add(request)
    done = drain(engine)
    for request in requests:
        completion = done[request.id]
        expected = reference_logprobs(reference, request, completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


CUTS = {
    "top_k": {"top_k": 7},
    "top_p": {"top_k": 256, "top_p": 0.6},
    "min_p": {"top_k": 256, "min_p": 0.3, "temperature": 0.5},
    "all": {"top_k": 40, "top_p": 0.8, "min_p": 0.1, "temperature": 1.5},
}


def test_survivors_and_logprobs_are_those_of_the_truncated_distribution(pair):
    """Beside each other, and beside requests that draw among all tokens."""
    reference, engine = pair
    cuts = {f"{cut}{n}": (n, settings) for cut, settings in (CUTS | {"whole": {}}).items() for n in (3, 17)}
    requests = [Request(id, prompt(n, n), 10, **{"temperature": 1.0, "seed": n} | cut) for id, (n, cut) in cuts.items()]
    for request in requests:
        engine.add(request)
    done, most = drain(engine), 0
    for request in requests:
        completion = done[request.id]
        expected = reference_logprobs(reference, request, completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)
        assert (completion.candidate_ids is not None) == request.truncated
        if request.truncated:
            ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
            with torch.no_grad():
                logits = reference(ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1]
            wanted = survivors_of(logits / request.temperature, request)
            assert torch.equal(kept(completion, logits.shape[-1]), wanted)
            assert wanted.sum(-1).float().mean() < 0.9 * logits.shape[-1]
            most = max(most, int(wanted.sum(-1).max()))
    assert most > 1


def survivors_of(logits: torch.Tensor, request: Request) -> torch.Tensor:
    """By transformers' own processors, in vLLM's order: bool [tokens, vocabulary]."""
    logits = MinPLogitsWarper(request.min_p)(None, logits) if request.min_p else logits
    return TopPLogitsWarper(request.top_p)(None, TopKLogitsWarper(request.top_k)(None, logits)) > -torch.inf


def test_a_stop_string_ends_an_answer_with_the_token_that_completes_it(pair):
    reference, engine = pair
    text_of = text_of_model(reference.name_or_path, False)
    free = Request("free", prompt(5), 20, 1.0, 11)
    engine.add(free)
    ids = drain(engine)["free"].token_ids
    stop = text_of(ids)[8:10]
    engine.add(Request("stopped", prompt(5), 20, 1.0, 11, stop=("never said", stop)))
    engine.add(Request("beside", prompt(5), 20, 1.0, 11, stop=("never said",)))
    done = drain(engine)
    stopped = done["stopped"]
    assert stopped.finish_reason == "stop" and stopped.token_ids == ids[: len(stopped.token_ids)]
    assert stop in text_of(stopped.token_ids) and stop not in text_of(stopped.token_ids[:-1])
    assert (done["beside"].token_ids, done["beside"].finish_reason) == (ids, "length")


def test_staggered_adds_and_groups(pair):
    """Requests that come while others run, and answers that share a prompt admitted steps apart."""
    reference, engine = pair
    requests = [Request(f"t{i}", prompt(21, seed=i // 3), 6 + i, 1.0, i, order=(i // 3, i % 3)) for i in range(9)]
    done = {}
    for request in requests:
        engine.add(request)
        done |= {completion.id: completion for completion in engine.step()}
    done |= drain(engine)
    assert len({bytes(done[f"t{i}"].token_ids) for i in range(9)}) == 9
    for request in requests:
        expected = reference_logprobs(reference, request, done[request.id])
        torch.testing.assert_close(torch.tensor(done[request.id].logprobs), expected, atol=1e-5, rtol=0)


def test_held_are_the_loaded_weights(pair):
    reference, engine = pair
    given, held = dict(reference.named_parameters()), dict(engine.loaded_weights())
    assert given.keys() == held.keys()
    plain = {name: tensor for name, tensor in held.items() if tensor is not None}
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= plain.keys()
    assert all(torch.equal(given[name], tensor) for name, tensor in plain.items())
    assert all(given[name].data_ptr() != tensor.data_ptr() for name, tensor in plain.items())


def test_stop_ids_end_an_answer_and_stay_in_it(pair):
    _, engine = pair
    free = Request("free", prompt(5), 12, 1.0, 3)
    engine.add(free)
    ids = drain(engine)["free"].token_ids
    end = ids.index(ids[5]) + 1
    engine.add(replace(free, id="stopped", stop_ids=(ids[5], 9999)))
    engine.add(replace(free, id="at its end", stop_ids=(ids[5],), max_new_tokens=end))
    for done in drain(engine).values():
        assert (done.token_ids, done.finish_reason) == (ids[:end], "stop")
        assert len(done.logprobs) == len(done.versions) == end


FAULTS = {
    "missing": (lambda w: [*w[:3], *w[4:]], 3),
    "twice": (lambda w: [*w, w[3]], 3),
    "unknown": (lambda w: [("model.extra", w[0][1]), *w], "model.extra"),
    "another shape": (lambda w: [(w[0][0], w[0][1][:-1]), *w[1:]], 0),
    "none at all": (lambda w: [], 0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_weights_are_named_and_refused(pair, fault):
    reference, engine = pair
    weights, (broken, which) = list(reference.named_parameters()), FAULTS[fault]
    stream = iter(broken(weights))
    with pytest.raises(RunFailed, match=rf"version 5: {which if isinstance(which, str) else weights[which][0]} "):
        engine.load(stream, version=5)
    assert next(stream, None) is None, "other ranks gather the rest: the stream must be read to its end"
    with pytest.raises(AssertionError, match="no weights"):
        engine.add(Request("a", prompt(5), 3, 1.0, 0))
    engine.load(weights, version=6)
    engine.add(Request("a", prompt(5), 3, 1.0, 0))
    assert set(drain(engine)["a"].versions) == {6}


def test_not_a_number_stops_the_run(pair):
    reference, engine = pair
    weights = list(reference.named_parameters())
    engine.load([(n, w * float("nan") if n == "model.norm.weight" else w) for n, w in weights], 2)
    engine.add(Request("poor", prompt(5), 8, 1.0, 0))
    with pytest.raises(RunFailed, match="nan for request poor"):
        drain(engine)
    engine.abort(["poor"])
    drain(engine)
    engine.load(weights, version=3)
