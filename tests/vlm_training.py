"""Samples that see pictures, for tests of training, and plain Hugging Face on them."""

from array import array
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from spmd_rl.batch import Batch, pack
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.types import ImagePart, Message, Sample, TextPart, Turn, Verdict
from tests.drawn_shapes import draw, scene
from tests.training import TEMPERATURE, loss

WORDS = "Which of these are red, and how many are circles"


def png(seed: int, size: tuple[int, int] = (112, 112)) -> bytes:
    """Return a drawn picture, which another seed draws otherwise."""
    from io import BytesIO

    file = BytesIO()
    draw(scene(Random(seed))).resize(size).save(file, "PNG")
    return file.getvalue()


def asked(*parts: str | bytes) -> Message:
    """Return a question of texts and encoded pictures."""
    content = [TextPart(part) if isinstance(part, str) else ImagePart("image/png", part) for part in parts]
    return Message("user", tuple(content))


def answer(rng: Random, count: int) -> array:
    """Return sampled tokens."""
    return array("i", [rng.randrange(256) for _ in range(count)])


def turn(given: array, learnt: array, pictures: tuple[bytes, ...] = ()) -> Turn:
    """Return a turn with nothing known of its logprobs."""
    zeros = bytes(4 * len(learnt))
    return Turn(given, learnt, array("f", zeros), array("i", zeros), "stop", pictures=pictures)


def samples_with_pictures(tokenizer: Tokenizer) -> list[Sample]:
    """Return groups that share one and two pictures, a text alone, an agent that sees new pictures, and answers of one
    ticket with different pictures under one text."""
    rng, render = Random(0), tokenizer.render
    one, two, wide, tall = png(1), png(2), png(3, (112, 56)), png(4, (40, 90))
    found: list[Sample] = []

    def add(ticket: int, *turns: Turn) -> None:
        number = sum(sample.ticket == ticket for sample in found)
        found.append(Sample(ticket, number, turns, Verdict("ok")))

    for length in (5, 9, 2):
        add(0, turn(render([asked("See ", one, " and ", wide, WORDS)]), answer(rng, length), (one, wide)))
    for length in (4, 3):
        add(1, turn(render([asked(WORDS, one)]), answer(rng, length), (one,)))
    add(2, turn(render([asked(WORDS)]), answer(rng, 6)))
    for later, length in ((two, 4), (tall, 7)):
        reply = tokenizer.bridge([asked("Now ", later)]).token_ids
        first = turn(render([asked(wide, "Go")]), array("i", range(40, 44)), (wide,))
        add(3, first, turn(reply, answer(rng, length), (later,)))
    add(4, turn(render([asked(tall, WORDS)]), answer(rng, 8), (tall,)))
    for data in (one, two):
        add(5, turn(render([asked(data, WORDS)]), answer(rng, 6), (data,)))
    return found


def batch_with_pictures(tokenizer: Tokenizer) -> Batch:
    """Return the samples as a batch, with columns for `tests.training.loss`."""
    batch = pack(samples_with_pictures(tokenizer), seen=True)
    noise = torch.randn(3, batch.num_tokens, generator=torch.Generator().manual_seed(0))
    mask = batch.loss_mask
    batch.advantages, batch.old_logprobs = noise[0] * mask, (-5.5 + 0.3 * noise[2]) * mask
    batch.weights = (0.5 + noise[1].abs()) * mask / mask.sum()
    return batch


def plain_forward(model: torch.nn.Module, batch: Batch, tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """Return logprob and entropy [T] by Hugging Face's own forward and positions, sample by sample."""
    processor, zero, found = tokenizer.processor, torch.zeros(1), []
    for (begin, end), pictures in zip(pairwise(batch.starts.tolist()), batch.encoded_pictures, strict=True):
        ids = batch.token_ids[begin:end]
        known, inputs = ids.masked_fill(ids < 0, processor.placeholder), {}
        if pictures:
            every = [processor.pixels(data) for data in pictures]
            inputs = {name: torch.cat([one[name] for one in every], int(processor.stacked)) for name in every[0]}
            inputs |= {"mm_token_type_ids": (ids < 0).long()[None]} if processor.axes > 1 else {}
        logits = model(input_ids=known[None], **inputs).logits[0, :-1] / TEMPERATURE
        full = torch.log_softmax(logits, -1)
        logprobs, entropy = full.gather(-1, known[1:, None])[:, 0], -(full.exp() * full).sum(-1)
        found.append((torch.cat([zero, logprobs]), torch.cat([zero, entropy])))
    return torch.cat([row[0] for row in found]), torch.cat([row[1] for row in found])


def plain_backward(model: torch.nn.Module, batch: Batch, tokenizer: Tokenizer) -> float:
    """Set the gradients of the whole batch's loss; return the loss."""
    logprobs, entropy = plain_forward(model, batch, tokenizer)
    mask = batch.loss_mask
    total = (loss(logprobs[mask], entropy[mask], batch)[0] * batch.weights[mask]).sum()
    total.backward()
    return total.item()
