"""Pictures on their way through an episode: each turn has its own, and each request all of the conversation's."""

import asyncio
from array import array
from random import Random

import pytest

from spmd_rl.base.png import encode_png
from spmd_rl.model.tokenizer import Tokenizer, load_tokenizer
from spmd_rl.rollout.episode import Budget, Context, Sampling, SoftLimit, play, single_turn
from spmd_rl.types import Completion, ImagePart, Message, Prompt, Request, TextPart, Verdict, picture_ids
from tests.toy_vlm import toy_vlm


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(toy_vlm("qwen2_5_vl", tmp_path_factory.mktemp("model") / "vlm"))


def draw(seed: int, width: int = 56, height: int = 56) -> bytes:
    return encode_png([Random(seed).randbytes(3 * width * height)], width, height)


def asked(*parts: str | bytes, role: str = "user") -> Message:
    shown = [ImagePart("image/png", part) if isinstance(part, bytes) else TextPart(part) for part in parts]
    return Message(role, tuple(shown))


class Engine:
    """Answers with two tokens; aborts the first requests, with one token."""

    def __init__(self, tokenizer: Tokenizer, aborts: int = 0) -> None:
        self.requests: list[Request] = []
        self._end, self._aborts = tokenizer.stop_ids[0], aborts

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        if self._aborts:
            self._aborts -= 1
            return Completion(request.id, array("i", [65]), array("f", [-1.0]), array("i", [0]), "abort")
        return Completion(request.id, array("i", [66, self._end]), array("f", [-1.0] * 2), array("i", [0] * 2), "stop")


class Scorer:
    async def score(self, prompt, answer, info) -> Verdict:
        return Verdict("ok", 1.0)


def context(tokenizer: Tokenizer, engine: Engine, *messages: Message) -> Context:
    prompt, sampling = Prompt("0" * 32, messages, "toy", ""), Sampling(0, "train", 1.0, 8)
    return Context(prompt, 0, 0, lambda *_: 0, sampling, Budget(400), tokenizer, engine, Scorer())


def test_a_turn_and_its_request_have_the_pictures_of_the_prompt(tokenizer: Tokenizer) -> None:
    one, two, engine = draw(1), draw(2, 84, 56), Engine(tokenizer)
    ctx = context(tokenizer, engine, asked("see", one, "and", two, "and", one))
    [sample] = asyncio.run(play(single_turn, ctx))
    assert sample.verdict.status == "ok", sample.verdict.detail
    assert sample.turns[0].pictures == engine.requests[0].pictures == (one, two, one)
    ids = [id for id in sample.turns[0].prompt_ids if id < 0]
    assert ids == [*picture_ids(one, 4), *picture_ids(two, 6), *picture_ids(one, 4)]


def test_a_later_turn_has_its_own_pictures_and_its_request_all(tokenizer: Tokenizer) -> None:
    one, two, engine = draw(1), draw(2), Engine(tokenizer)

    async def two_turns(ctx: Context):
        await ctx.generate(ctx.render(ctx.prompt.messages))
        await ctx.generate(ctx.reply([asked("now", two, "?")]))
        ctx.begin_segment()
        await ctx.generate(ctx.render([asked(two, "alone")]))
        return ctx.sample(Verdict("ok", 1.0))

    samples = asyncio.run(play(two_turns, context(tokenizer, engine, asked(one, "first"))))
    assert [[turn.pictures for turn in sample.turns] for sample in samples] == [[(one,), (two,)], [(two,)]]
    assert [request.pictures for request in engine.requests] == [(one,), (one, two), (two,)]


@pytest.mark.parametrize("limit", [None, 2])
def test_an_answer_that_goes_on_keeps_its_pictures(tokenizer: Tokenizer, limit: int | None) -> None:
    one, engine = draw(1), Engine(tokenizer, aborts=2)

    async def limited(ctx: Context):
        soft = SoftLimit(limit, lambda ids: True) if limit else None
        await ctx.generate(ctx.render(ctx.prompt.messages), soft)
        return ctx.sample(Verdict("ok", 1.0))

    [sample] = asyncio.run(play(limited, context(tokenizer, engine, asked(one, "go on"))))
    assert len(engine.requests) > 1 and all(request.pictures == (one,) for request in engine.requests)
    assert [turn.pictures for turn in sample.turns] == [(one,)]


def test_a_picture_that_was_not_rendered_fails_its_sample_alone(tokenizer: Tokenizer) -> None:
    one, other = draw(1), draw(2)

    async def strange(ctx: Context):
        ctx.render(ctx.prompt.messages)
        await ctx.generate(array("i", [65]) + picture_ids(other, 4))
        return ctx.sample(Verdict("ok", 1.0))

    [sample] = asyncio.run(play(strange, context(tokenizer, Engine(tokenizer), asked(one, "?"))))
    assert sample.verdict.status == "error" and sample.turns[0].pictures == (one,)


def test_a_text_has_no_pictures(tokenizer: Tokenizer) -> None:
    engine = Engine(tokenizer)
    [sample] = asyncio.run(play(single_turn, context(tokenizer, engine, Message("user", "2+2?"))))
    assert sample.turns[0].pictures == engine.requests[0].pictures == ()
