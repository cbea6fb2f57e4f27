"""A probe of published weights: the trainer must find an engine's answers as likely as the engine did.

Hashes prove that the engine holds what it was given; the probe proves that it *means* the same, against exchanged names
or a misread layout. It is blunt in bfloat16, and the only proof where an engine keeps no plain tensors.
"""

from array import array
from functools import cache
from typing import NamedTuple

import torch

from spmd_rl.base.errors import RunFailed
from spmd_rl.base.png import encode_png
from spmd_rl.batch import pack
from spmd_rl.engine.base import Engine
from spmd_rl.train.base import PolicyRole
from spmd_rl.types import Completion, Request, Sample, Turn, Verdict, picture_ids

# The first prompt is longer than an engine's KV block, so that a prefix cache that was not reset would serve it keys of
# the last publish. Several are asked at once: a decode step of few rows costs what one of a single row costs.
PROMPTS = (array("i", range(24, 64)), *(array("i", range(begin, begin + 4)) for begin in range(52, 64, 4)))
"""Token ids that any vocabulary has"""
NEW_TOKENS = 2
"""Tokens per prompt; the second reads what the first stored"""

# Measured on a 135M Llama over 40 sets of weights: at most 1e-5 in float32 and 0.08 in bfloat16. Each pair of
# neighbouring layers exchanged gives 0.1 to 10, half of them above 0.45; one update missed (lr 2e-5) gives 1e-3, which
# only float32 can see.
LIMITS = {torch.float32: 3e-4, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Largest mean absolute difference of logprobs, in nats, by dtype"""
FIRST_QUANTIZED, LATER_FACTOR = 2.0, 3.0
"""Limits for rounded weights: nats at the first publish, of stored weights, where rounding alone counts; then a
multiple of that difference"""


class Answer(NamedTuple):
    """An engine's answer to one prompt, exchanged between ranks."""

    token_ids: list[int]
    logprobs: list[float]
    num_picture_ids: int = 0
    """Ids of the picture in its prompt"""


@cache
def picture() -> bytes:
    """Return the probe's picture, with colours that change in both directions."""
    size = 64
    return encode_png([bytes(v for y in range(size) for x in range(size) for v in (4 * x, 4 * y, 96))], size, size)


def prompt(index: int, num_picture_ids: int) -> tuple[array, tuple[bytes, ...]]:
    """Return a prompt's token ids ('i') and pictures."""
    if not num_picture_ids:
        return PROMPTS[index], ()
    return PROMPTS[1] + picture_ids(picture(), num_picture_ids) + PROMPTS[2], (picture(),)


def ask(engine: Engine, version: int) -> tuple[list[Answer], str]:
    """Return the engine's greedy answers, one per prompt, and a fault, if any."""
    counts = [0] * len(PROMPTS)
    if engine.processor and (size := engine.processor.count(picture())) + 32 < engine.capacity.max_tokens:
        counts.append(size)
    for index, count in enumerate(counts):
        ids, pictures = prompt(index, count)
        name, order = f"probe-{version}-{index}", (0, index, 0)
        engine.add(Request(name, ids, NEW_TOKENS, 0.0, seed=0, order=order, pictures=pictures))
    completions: dict[str, Completion] = {}
    try:
        while engine.num_unfinished:
            completions |= {completion.id: completion for completion in engine.step()}
    except RunFailed as error:
        return [], str(error)
    ordered = [completions[f"probe-{version}-{index}"] for index in range(len(counts))]
    served = sorted({v for completion in ordered for v in completion.versions})
    if served != [version]:
        return [], f"the engine serves version {', '.join(map(str, served))}"
    return [Answer(c.token_ids.tolist(), c.logprobs.tolist(), n) for c, n in zip(ordered, counts, strict=True)], ""


def judge(policy: PolicyRole, by_engine: dict[str, list[Answer]]) -> dict[str, float]:
    """[all] Return each engine's mean absolute difference of logprobs from the trainer's, in nats, by name.

    by_engine: equal on all ranks. Each data shard judges some engines, perhaps none, and returns only these.
    """
    data = policy.layout.data
    mine = list(by_engine)[data.rank :: data.size]
    samples = [
        _sample(ticket, index, answer)
        for ticket, engine in enumerate(mine)
        for index, answer in enumerate(by_engine[engine])
    ]
    batch = pack(samples, seen=policy.sees)
    logprobs, _ = policy.logprobs(batch, temperature=1.0)  # [all]
    differences = (logprobs - batch.rollout_logprobs)[batch.loss_mask].abs()
    of_engines = differences.split([sum(len(answer.token_ids) for answer in by_engine[engine]) for engine in mine])
    return {engine: difference.mean().item() for engine, difference in zip(mine, of_engines, strict=True)}


def _sample(ticket: int, index: int, answer: Answer) -> Sample:
    ids, logprobs = array("i", answer.token_ids), array("f", answer.logprobs)
    prompt_ids, pictures = prompt(index, answer.num_picture_ids)
    turn = Turn(prompt_ids, ids, logprobs, array("i", [0] * len(ids)), "length", pictures=pictures)
    return Sample(ticket, index, (turn,), Verdict("ok"))
