"""Drafts of the native engine: other steps, the same tokens, logprobs, candidates and experts to the bit."""

import random
from array import array

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from spmd_rl.engine.native import drafts
from spmd_rl.engine.native.drafts import draft
from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.module import empty_module
from spmd_rl.model import smollm2
from spmd_rl.model.build import build_model, weights_of
from spmd_rl.model.stored import stored_parts
from spmd_rl.types import Completion, Request
from tests.models import EXPERTS, tiny
from tests.unit.test_smollm2 import needs_model

KINDS = ("llama", "qwen2", "qwen3", "qwen3_moe")


@pytest.fixture(scope="module", params=KINDS)
def path(request, tmp_path_factory):
    sizes = EXPERTS.get(request.param, {}) | {"max_position_embeddings": 1024}
    return tiny(request.param, tmp_path_factory.mktemp("model"), **sizes)


def make(path, num_drafts: int, seed: int = 0, running: int = 8, **how) -> NativeEngine:
    how = {"text_of": lambda ids: "".join(chr(97 + id % 8) for id in ids), "drafts": num_drafts} | how
    module = empty_module(path, torch.float32)
    engine = NativeEngine(module, running, 8192, records_experts="moe" in module.config.model_type, **how)
    engine.load(weights(path, seed), 1)
    return engine


def weights(path, seed: int) -> list:
    model, generator = build_model(path, torch.float32, "cpu"), torch.Generator().manual_seed(seed)
    named = weights_of(model, stored_parts(model)).items()
    return [(name, weight + seed * 1e-2 * torch.randn(weight.shape, generator=generator)) for name, weight in named]


def same(found: dict[str, Completion], plain: dict[str, Completion]) -> bool:
    """All but logprobs alike, and these to rounding: kernels sum for few and for many tokens in orders of their own."""
    near = [one.logprobs.tolist() == pytest.approx(plain[id].logprobs.tolist(), abs=1e-5) for id, one in found.items()]
    return all(near) and {id: replace(one, logprobs=plain[id].logprobs) for id, one in found.items()} == plain


def run(engine: NativeEngine, requests: list[Request]) -> tuple[dict[str, Completion], int]:
    for request in requests:
        engine.add(request)
    return rest(engine)


def rest(engine: NativeEngine) -> tuple[dict[str, Completion], int]:
    """What is left, and in how many steps it came."""
    done, num_steps = {}, 0
    while engine.num_unfinished:
        done |= {completion.id: completion for completion in engine.step()}
        num_steps += 1
    return done, num_steps


def requests(seed: int, lengths=(5, 60, 123, 185, 250, 508)) -> list[Request]:
    """Of all kinds, with prompts that cross the borders at which tables are padded otherwise."""
    order, made = random.Random(seed), []
    for ticket, length in enumerate(lengths):
        prompt = array("i", ((n * n + ticket) % 11 for n in range(length)))
        for answer in range(2):
            made.append(
                Request(
                    f"{ticket}/{answer}",
                    prompt,
                    order.choice([1, 2, 9, 40]),
                    order.choice([0.0, 0.05, 0.3, 1.0]),
                    order.getrandbits(60),
                    (ticket, answer, 0),
                    stop_ids=order.choice([(), (7, 60)]),
                    stop=order.choice([(), ("abab", "hh")]),
                    num_begun=order.choice([0, 3]),
                )
            )
            if order.random() < 0.4 and made[-1].temperature:
                made[-1] = replace(made[-1], top_k=20, top_p=0.8, min_p=0.01)
    return made


def test_what_followed_before_is_drafted() -> None:
    def of(own, *others, most=4) -> list[int]:
        return draft(array("i", own).tobytes(), [array("i", other).tobytes() for other in others], most).tolist()

    assert of([1, 2, 3, 4, 5, 9, 1, 2, 3]) == [4, 5, 9, 1]
    assert of([7, 2, 3, 4, 9, 2, 3]) == [4, 9, 2, 3], "two tokens will do"
    assert of([8, 2, 3, 6, 1, 2, 3, 4, 1, 2, 3], most=1) == [4], "three are better, and the last time counts"
    assert of([5, 5, 5, 5]) == [5, 5, 5, 5] and of([1, 2, 1, 2, 1]) == [2, 1, 2, 1], "it goes on repeating"
    assert of([3, 4, 5], [9, 3, 4, 5, 6]) == [6] and of([3, 4, 5], [4, 5, 6]) == [6]
    assert of([1, 4, 5, 7, 4, 5], [1, 4, 5, 8], [7, 4, 5, 9]) == [9], "three of another's before two of its own"
    assert of([1, 2, 3]) == of([3]) == of([3], [3]) == []
    assert of([256, 1], [0x10000, 0x100, 0, 1, 2]) == [], "not at the border of a token"


@pytest.mark.parametrize("seed", range(3))
def test_every_token_is_as_without(path, seed: int) -> None:
    plain, num_steps = run(make(path, 0, seed), requests(seed))
    engine = make(path, 5, seed)
    drafted, fewer = run(engine, requests(seed))
    assert same(drafted, plain)
    assert fewer <= num_steps and engine.token_counts.verified


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_drafted(path, seed: int, monkeypatch) -> None:
    """Drafts that are right for a while, or from the first token on, and go wrong somewhere."""
    monkeypatch.setattr(drafts, "FORWARD_COST", 10**9)  # all pay
    asked, without = requests(seed), make(path, 0)
    plain, num_steps = run(without, asked)
    texts = {(one.prompt_ids + plain[one.id].token_ids).tobytes(): one.id for one in asked}
    chance = random.Random(seed)

    def proposed(text: bytes, others, most: int) -> array:
        right = array("i", next((whole for whole in texts if whole.startswith(text)), text)[len(text) :])
        right = (right + array("i", [1] * most))[: chance.randint(0, most)]
        return array("i", [token if chance.random() < 0.8 else token ^ 1 for token in right])

    monkeypatch.setattr(drafts, "draft", proposed)
    engine = make(path, 7)
    done, fewer = run(engine, asked)
    assert same(done, plain) and fewer < 0.7 * num_steps
    assert engine.pool.num_used == 0
    again = [replace(one, prompt_ids=one.prompt_ids + plain[one.id].token_ids, max_new_tokens=5) for one in asked]
    assert same(run(engine, again)[0], run(without, again)[0]), "what was kept of the first turn is right"


def test_weights_that_change_under_way(path) -> None:
    ask = Request("a", array("i", [1, 2, 3]), 40, 0.0, 3)
    engine = make(path, 4)
    for _ in range(5):
        engine.step() if engine.num_unfinished else engine.add(ask)
    engine.load(weights(path, 1), 2)
    found = rest(engine)[0]["a"]
    num_before = found.versions.tolist().count(1)
    plain = make(path, 0)
    plain.add(ask)
    for _ in range(num_before):
        plain.step()
    plain.load(weights(path, 1), 2)
    assert same(rest(plain)[0], {"a": found}) and 4 <= num_before < 40


def test_an_aborted_answer_goes_on_as_it_would_have(path) -> None:
    ask = Request("a", array("i", [1, 2, 3]), 30, 0.05, 3)
    whole = run(make(path, 0), [ask])[0]["a"]
    engine = make(path, 4)
    engine.add(ask)
    for _ in range(4):
        engine.step()
    engine.abort(["a"])
    begun = engine.step()[0].token_ids
    left = replace(ask, prompt_ids=ask.prompt_ids + begun, max_new_tokens=30 - len(begun), num_begun=len(begun))
    assert begun + run(engine, [left])[0]["a"].token_ids == whole.token_ids


def test_a_group_drafts_from_each_other_and_a_crowd_does_without(path) -> None:
    def at(crowd: int, drafts_from: int) -> tuple[int, int]:
        """Steps and verified drafts of answers with the same noise as one of this ticket, which is ahead of them."""
        engine, first = make(path, 4, running=64), Request("a", array("i", [1, 2, 3]), 20, 1.0, 3, (drafts_from, 0, 0))
        engine.add(first)
        for _ in range(12):
            engine.step()
        engine.token_counts.verified = 0
        crowd = [replace(first, id=f"{n}", max_new_tokens=16, order=(0, n, 0)) for n in range(1, crowd)]
        return run(engine, crowd)[1], engine.token_counts.verified

    assert at(2, drafts_from=0)[0] <= 10, "what the other has is there, and stays when it has ended"
    assert at(2, drafts_from=9)[0] >= 15, "it is of another group"
    assert at(8, drafts_from=0)[1] > 20 and at(64, drafts_from=0)[1] == 0, "see `FORWARD_COST`"


@needs_model
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_real_model(temperature: float) -> None:
    model = smollm2.default_dir()
    named = list(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())
    found = []
    for num_drafts in (0, 4):
        engine = NativeEngine(empty_module(model, torch.float32), 4, 1024, drafts=num_drafts)
        engine.load(named, 1)
        prompt = array("i", [504, 2390, 28, 216, 33, 28, 216, 34, 28, 216, 35, 28, 216, 33, 28, 216, 34, 28])
        asked = [Request(f"{i}", prompt, 20, temperature, i, (0, i, 0)) for i in range(2)]
        found.append(run(engine, asked))
    assert same(found[1][0], found[0][0])
    assert found[1][1] < found[0][1]
