"""A probe of the published weights: what the engine generates must look to the trainer as it looked to the engine.

Hashes prove that the engine holds what it was given; the probe proves that it *means* the same: a name exchanged on
the way, a layout misread, an engine that serves another version's weights. It is blunt in bf16, where numbers of the
two roads differ by themselves, and the only proof where an engine keeps no plain tensors.
"""

from array import array

import torch

from spmd_rl.batch import Batch, pack
from spmd_rl.engine.base import Engine
from spmd_rl.errors import RunFailed
from spmd_rl.types import Completion, Request, Sample, Turn, Verdict

PROMPTS = (array("i", range(24, 64)), *(array("i", range(begin, begin + 4)) for begin in range(52, 64, 4)))
"""Ids any vocabulary has. The first, longer than an engine's KV block, would meet its own keys of the last publish in a
stale prefix cache. Several at once, since a decode step of few rows costs what one row costs."""
NEW_TOKENS = 2
"""The second token reads what the first one stored."""

LIMITS = {torch.float32: 3e-4, torch.bfloat16: 0.2}
"""Largest mean absolute difference of logprobs, by dtype. Measured on a 135M Llama over 40 sets of weights: at most
1e-5 in float32 and 0.08 in bfloat16. Each pair of neighbouring layers exchanged gives 0.1 to 10, half of them above
0.45; one update missed (lr 2e-5) gives 1e-3, which only float32 can see."""


def ask(engine: Engine, version: int) -> tuple[Batch, str]:
    """Greedy answers of the engine as a batch for the trainer, and what is wrong with them (empty: nothing).

    The batch is empty where something is: the trainer's pass meets all ranks, so none may stay away.
    """
    for index, prompt in enumerate(PROMPTS):
        engine.add(Request(f"probe-{version}-{index}", prompt, NEW_TOKENS, 0.0, seed=0, order=(0, index, 0)))
    completions: dict[str, Completion] = {}
    try:
        while engine.num_unfinished:
            completions |= {completion.id: completion for completion in engine.step()}
    except RunFailed as error:
        return pack([]), str(error)
    answers = [completions[f"probe-{version}-{index}"] for index in range(len(PROMPTS))]
    served = sorted({v for answer in answers for v in answer.versions})
    if served != [version]:
        return pack([]), f"the engine serves version {', '.join(map(str, served))}"
    return pack(_sample(index, answer) for index, answer in enumerate(answers)), ""


def _sample(index: int, answer: Completion) -> Sample:
    turn = Turn(PROMPTS[index], answer.token_ids, answer.logprobs, answer.versions, answer.finish_reason)
    return Sample(0, index, (turn,), Verdict("ok"))
