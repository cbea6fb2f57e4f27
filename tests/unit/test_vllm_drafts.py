"""Drafts in vLLM: fewer steps, the model's distribution and its logprobs."""

from array import array
from itertools import count

import pytest
import torch

from spmd_rl.model.build import build_model
from spmd_rl.types import Completion, Request
from tests.engines import VLLM_SIZES, needs_vllm, vllm_engine
from tests.models import tiny
from tests.unit.test_engine_parity import drain, reference_logprobs

pytestmark = needs_vllm
PATTERN = (5, 9, 200, 9, 31, 77)
names = count()


def text_of(ids) -> str:
    return "".join(chr(97 + id % 8) for id in ids)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A model whose distributions are neither flat nor certain, and a vLLM with drafts that holds its weights."""
    path = tiny("llama", tmp_path_factory.mktemp("model"), tie=True, **VLLM_SIZES, initializer_range=0.08)
    model = build_model(path, torch.float32, "cpu", attention="sdpa")
    with vllm_engine(path, max_running=8, kv_tokens=4096, drafts=4) as engine:
        engine.text_of = text_of
        engine.load(model.named_parameters(), version=3)
        yield model, engine


def ask(engine, num: int, max_new_tokens: int = 24, **how) -> list[tuple[Request, Completion]]:
    """`num` answers to a prompt that repeats itself."""
    prompt = array("i", PATTERN * 4)
    made = [Request(f"{next(names)}", prompt, max_new_tokens, seed=n, **{"temperature": 1.0} | how) for n in range(num)]
    for request in made:
        engine.add(request)
    done = drain(engine)
    return [(request, done[request.id]) for request in made]


def distribution(model, request: Request, completion: Completion) -> torch.Tensor:
    """Of each token of an answer, by one full forward: float64 [answer tokens, vocabulary]."""
    ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1]
    return (logits.double() / request.temperature).softmax(-1)


def test_greedy_answers_are_the_models_in_fewer_steps(pair):
    model, engine = pair
    counts, num_steps = engine.token_counts, 0
    counts.verified = counts.accepted = 0
    request = Request("greedy", array("i", PATTERN * 4), 100, 0.0, 0)
    engine.add(request)
    while not (done := engine.step()):
        num_steps += 1
    best = distribution(model, Request("", request.prompt_ids, 1, 1.0, 0), done[0]).argmax(-1)
    assert done[0].token_ids.tolist() == best.tolist() and len(best) == 100
    assert num_steps < 80 and 0 <= counts.accepted + num_steps + 1 - 100 < 5 and counts.verified <= num_steps


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_logprobs_are_those_of_a_full_forward(pair, temperature):
    model, engine = pair
    for request, completion in ask(engine, 6, temperature=temperature):
        got = torch.tensor(completion.logprobs.tolist())
        assert len(got) == 24 and set(completion.versions) == {3}
        torch.testing.assert_close(got, reference_logprobs(model, request, completion), atol=1e-5, rtol=0)


def test_tokens_are_distributed_as_the_model_says(pair):
    """Where each token falls in the distribution, what is drafted first, is uniform: chi-squared, 19 degrees."""
    from spmd_rl.engine.vllm.drafts import draft

    model, engine = pair
    counts, noise = engine.token_counts, torch.Generator().manual_seed(1)
    counts.verified = counts.accepted = 0
    bins, num_drafted = torch.zeros(20), 0
    for request, completion in ask(engine, 150, 32, temperature=0.25):
        shares, text = distribution(model, request, completion), array("i", request.prompt_ids)
        for token, share in zip(completion.token_ids, shares, strict=True):
            if found := draft(text.tobytes(), 1):
                share = share.roll(-found[0])  # the drafted token first: below its share lies what is accepted
                token, num_drafted = (token - found[0]) % len(share), num_drafted + 1
                place = share[:token].sum() + share[token] * torch.rand((), generator=noise)
                bins[int(place.clamp(max=1 - 1e-9) * 20)] += 1
            text.append(completion.token_ids[len(text) - len(request.prompt_ids)])
    chi = float(((bins - bins.mean()) ** 2 / bins.mean()).sum())
    assert num_drafted > 500 and counts.accepted > 100 and counts.verified > 300, (num_drafted, counts)
    assert chi < 43.8, chi  # one in a thousand


def test_an_answer_ends_within_what_is_accepted(pair):
    """Where a limit, a stop token or a stop string comes, whatever else a step has accepted."""
    _, engine = pair
    whole = ask(engine, 1, temperature=0.0)[0][1].token_ids.tolist()
    for num in range(1, 12):
        ((_, limited),) = ask(engine, 1, num, temperature=0.0)
        assert limited.token_ids.tolist() == whole[:num] and limited.finish_reason == "length"
        ((_, ended),) = ask(engine, 1, temperature=0.0, stop_ids=(whole[num],))
        assert ended.token_ids.tolist() == whole[: whole.index(whole[num]) + 1] and ended.finish_reason == "stop"
        string = text_of(whole)[num : num + 3]
        ((_, ended),) = ask(engine, 1, temperature=0.0, stop=(string,))
        assert ended.token_ids.tolist() == whole[: text_of(whole).index(string) + 3] and ended.finish_reason == "stop"
    assert engine.num_unfinished == 0 and not engine.llm.has_unfinished_requests()


def test_what_cuts_tokens_off_is_refused(pair):
    _, engine = pair
    with pytest.raises(ValueError, match="vLLM verifies no drafts among tokens that top_k has left"):
        engine.add(Request("cut", array("i", PATTERN), 4, 1.0, 0, top_k=5))
