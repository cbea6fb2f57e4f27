"""Pictures in prompts: every engine against plain Hugging Face in fp32, and caches that keep pictures apart."""

from array import array
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from importlib.util import find_spec
from io import BytesIO
from random import Random

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.kv import BLOCK
from spmd_rl.engine.native.module import empty_module
from spmd_rl.model.build import weights_of
from spmd_rl.model.pictures import build_processor
from spmd_rl.types import Completion, Request, picture_ids
from tests.engines import answers, needs_vllm, vllm_engine
from tests.toy_vlm import VLM_KINDS, toy_vlm

SIZES = {"qwen2_5_vl": (84, 56), "qwen3_vl": (96, 64), "smolvlm": (64, 64)}
"""Pictures of six tokens for Qwen's models, and of five tiles of four for SmolVLM's"""
BLOCKS = {"native": BLOCK, "vllm": 32}
IMPORTED = {"smolvlm": ("torchvision", "num2words")}
"""Packages that vLLM's models with pictures import"""


def has_packages(kind: str) -> pytest.MarkDecorator:
    """Return the mark of a test with vLLM, which skips it without the packages of its model."""
    missing = [name for name in IMPORTED.get(kind, ("torchvision",)) if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"vLLM imports {' and '.join(missing)} for {kind}")


PAIRS = [
    *(pytest.param(("native", kind), id=f"native-{kind}") for kind in VLM_KINDS),
    *(
        pytest.param(("vllm", kind), id=f"vllm-{kind}", marks=[pytest.mark.slow, needs_vllm, has_packages(kind)])
        for kind in VLM_KINDS
    ),
]


@contextmanager
def native_engine(path):
    yield NativeEngine(empty_module(path, torch.float32), max_running=4, kv_tokens=2048)


@pytest.fixture(scope="module", params=PAIRS)
def seeing(request, tmp_path_factory):
    """Kind, processor, reference and engine of a small model."""
    name, kind = request.param
    # Weights of this size make answers depend on the pictures.
    folder, spread = tmp_path_factory.mktemp("model") / "vlm", {"initializer_range": 0.08}
    path = toy_vlm(kind, folder, tower=spread, **spread, **({"hidden_size": 128} if name == "vllm" else {}))
    reference = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    build = native_engine if name == "native" else partial(vllm_engine, max_running=4)
    with build(path) as engine:
        engine.load(weights_of(reference).items(), version=3)
        yield kind, build_processor(path), reference, engine, BLOCKS[name]


def draw(kind: str, seed: int, width: int = 0, height: int = 0) -> bytes:
    """A picture of noise as PNG."""
    rng, size = Random(seed), (width, height) if width else SIZES[kind]
    image = Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1]))
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def text(length: int, seed: int = 0) -> array:
    rng = Random(seed)
    return array("i", [rng.randrange(256) for _ in range(length)])


def ask(id: str, processor, *parts: array | bytes, new: int = 6, seed: int = 0, temperature: float = 1.0) -> Request:
    """A request of texts and pictures in turns."""
    ids, pictures = array("i"), []
    for part in parts:
        if isinstance(part, bytes):
            pictures.append(part)
            part = picture_ids(part, processor.count(part))
        ids += part
    return Request(id, ids, new, temperature, seed, pictures=tuple(pictures))


def expected(model, processor, request: Request, completion: Completion) -> torch.Tensor:
    """Logprobs of an answer by Hugging Face's own forward over prompt and answer, without a cache.

    Up to the first sampled placeholder, which Hugging Face would take for a picture once it is fed.
    """
    answer = completion.token_ids.tolist()
    answer = answer[: [*answer, processor.placeholder].index(processor.placeholder) + 1]
    ids = torch.tensor([[*request.prompt_ids, *answer[:-1]]])
    inputs = {}
    if request.pictures:
        inputs = processor.batch(request.pictures)
        if processor.axes > 1:
            inputs["mm_token_type_ids"] = (ids < 0).long()
    with torch.no_grad():
        logits = model(processor.model_ids(ids), use_cache=False, **inputs).logits[0].float()
    logprobs = logits[len(request.prompt_ids) - 1 :].log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(answer)[:, None])[:, 0]


def worst(model, processor, requests, done) -> float:
    """Greatest distance of a logprob from Hugging Face's, in nats."""
    found = 0.0
    for request in requests:
        wanted = expected(model, processor, request, done[request.id])
        own = torch.tensor(done[request.id].logprobs)[: len(wanted)]
        found = max(found, (own - wanted).abs().max().item())
    return found


def test_logprobs_are_those_of_hugging_face(seeing):
    kind, processor, reference, engine, block = seeing
    one, two, wide = draw(kind, 1), draw(kind, 2), draw(kind, 3, 168, 56)
    requests = [
        ask("first", processor, one, text(5)),
        ask("middle", processor, text(7), two, text(9), seed=2),
        ask("last", processor, text(3), wide, seed=3),
        ask("two", processor, text(6), one, text(2), two, text(4), seed=4),
        ask("twice", processor, text(6, 1), one, text(2), one, text(4), seed=5),
        ask("close", processor, text(2), one, text(1), wide, text(1), seed=6),
        ask("text alone", processor, text(20), seed=7),
    ]
    done = answers(engine, *requests)
    assert worst(reference, processor, requests, done) < 1e-5
    assert all(len(completion.token_ids) == 6 for completion in done.values())


def test_a_cached_prefix_ends_inside_of_a_picture(seeing):
    kind, processor, reference, engine, block = seeing
    one, counts, inside = draw(kind, 11), engine.token_counts, 0
    size = processor.count(one)
    for begin in range(2 * block - 5, 2 * block):
        first = ask(f"{begin}", processor, text(begin, 3), one, new=4, seed=begin)
        other = ask(f"{begin} again", processor, text(begin, 3), one, text(1, begin), new=4, seed=begin)
        done, before = answers(engine, first), counts.cached
        done |= answers(engine, other)
        inside += begin < counts.cached - before < begin + size
        assert worst(reference, processor, [first, other], done) < 1e-5
    assert inside >= 3


def test_different_pictures_under_one_text_share_nothing(seeing):
    kind, processor, reference, engine, block = seeing
    parts = text(block, 8), text(2 * block + 3, 9)
    one, two = (ask(f"{seed}", processor, parts[0], draw(kind, seed), parts[1]) for seed in (21, 22))
    counts = engine.token_counts
    hits = []
    for request in (one, two, one, two):
        before = counts.cached
        found = answers(engine, request)
        hits.append(counts.cached - before)
        assert worst(reference, processor, [request], found) < 1e-5
    whole = (len(one.prompt_ids) - 1) // block * block
    assert hits == [0, block, whole, whole], "the text before the picture, then all of it"


def test_equal_ids_of_different_pictures_would_share_a_prefix(seeing, monkeypatch):
    kind, processor, reference, engine, block = seeing
    if block != BLOCK:
        # vLLM's keys are names of pictures, not ids.
        monkeypatch.setattr("spmd_rl.engine.vllm.pictures.blake2b", lambda *_, **how: blake2b(b"same", **how))
    one = ask("one", processor, text(4, 13), draw(kind, 31), text(2 * block, 14))
    answers(engine, one)
    # The planted fault: ids that do not tell the two pictures apart.
    fault = Request("two", one.prompt_ids, 6, 1.0, 0, pictures=(draw(kind, 32),))
    assert worst(reference, processor, [fault], answers(engine, fault)) > 1e-2


def test_features_are_dropped_with_the_weights(seeing):
    kind, processor, reference, engine, block = seeing
    request = ask("one", processor, text(4, 40), draw(kind, 41), text(5, 42))
    before = answers(engine, request)["one"]
    changed = AutoModelForImageTextToText.from_pretrained(reference.config.name_or_path, dtype=torch.float32).eval()
    tower = [weight for name, weight in changed.named_parameters() if "vis" in name and "weight" in name]
    with torch.no_grad():
        for weight in tower:
            weight.mul_(1.25)
    try:
        engine.load(weights_of(changed).items(), version=4)
        done = answers(engine, request)
        assert worst(changed, processor, [request], done) < 1e-5
        assert before.logprobs != done["one"].logprobs and set(done["one"].versions) == {4}
    finally:
        engine.load(weights_of(reference).items(), version=5)


def test_a_picture_of_a_group_is_computed_once(seeing):
    kind, processor, reference, engine, block = seeing
    one = draw(kind, 51)
    group = [ask(f"{n}", processor, text(4, 50), one, text(5, 52), seed=n) for n in range(4)]
    computed = []
    parts = engine.model.named_modules()
    tower = next(module for name, module in parts if name.endswith(("visual", "vision_model")))
    handle = tower.register_forward_hook(lambda *_: computed.append(1))
    try:
        done = answers(engine, *group)
    finally:
        handle.remove()
    assert len(computed) == 1
    assert worst(reference, processor, group, done) < 1e-5


def test_a_sampled_placeholder_is_a_token_like_others(seeing):
    kind, processor, reference, engine, block = seeing
    one = draw(kind, 61)
    first = ask("one", processor, text(4, 60), one, text(5, 62), new=1)
    # As if the model had sampled the placeholder in an earlier turn.
    sampled = array("i", [processor.placeholder])
    later = ask("later", processor, text(4, 60), one, text(5, 62), sampled, text(3, 63), new=3)
    again = ask("again", processor, text(4, 60), one, text(5, 62), sampled, text(3, 63), new=3)
    done = answers(engine, first)
    done |= answers(engine, later)
    # Fresh, without the cached prefix.
    engine.load(weights_of(reference).items(), version=6)
    done |= answers(engine, again)
    assert torch.allclose(torch.tensor(done["later"].logprobs), torch.tensor(done["again"].logprobs), atol=1e-5)


def test_requests_whose_ids_do_not_match_their_pictures_are_refused(seeing):
    kind, processor, reference, engine, block = seeing
    request = ask("one", processor, text(4), draw(kind, 71))
    with pytest.raises(ValueError, match="ids of pictures"):
        engine.add(Request("two", request.prompt_ids[:-1], 4, 1.0, 0, pictures=request.pictures))
    with pytest.raises(ValueError, match="ids of pictures"):
        engine.add(Request("three", request.prompt_ids, 4, 1.0, 0))
