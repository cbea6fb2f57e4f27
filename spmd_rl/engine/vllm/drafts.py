"""Drafts in vLLM: tokens that followed an answer's last ones before in its own text, verified by vLLM's sampler.

It accepts a drafted token with the probability that the model gives it, and else draws from the rest of the
distribution: tokens are distributed as without drafts, and their logprobs are the model's, but they are other tokens
than without, for draws are spent otherwise.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.sample import rejection_sampler

from spmd_rl.engine.base import EngineCounts

LENGTHS = (3, 2)
"""Numbers of last tokens that are looked up, the first that is found counts"""
SIZE = array("i").itemsize
MOST_ROWS = 8
"""With more requests drafts cost more than they save on the CPU: lab/2026-11-26-drafts-and-priorities.md."""


def engine_args(num_tokens: int, cpu: bool) -> dict[str, Any]:
    """Arguments of vLLM's for drafts of up to so many tokens; none for 0."""
    if not num_tokens:
        return {}
    lookup: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": max(LENGTHS), "prompt_lookup_min": min(LENGTHS)}
    if cpu:  # where it lacks numba; elsewhere it looks up on the device, whatever the number of requests
        lookup = {"method": "custom_class", "model": f"{Lookup.__module__}.{Lookup.__qualname__}"}
        rejection_sampler.expand_batch_to_tokens = _expanded
    return {"speculative_config": {"num_speculative_tokens": num_tokens, **lookup}}


def count_drafts(llm: LLMEngine, counts: EngineCounts) -> None:
    """Let the scheduler of a started vLLM note each verified draft in `counts`."""

    def note(_: None, num_draft_tokens: int, num_accepted_tokens: int, **others: Any) -> None:
        counts.verified += num_draft_tokens > 0
        counts.accepted += num_accepted_tokens

    llm.engine_core.engine_core.scheduler.make_spec_decoding_stats = note


def _expanded(values: Tensor, ends: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """Each request's value for each of its drafted tokens. vLLM's own on the CPU fills a copy, and returns noise."""
    values = values.masked_fill(values == replace_from, replace_to)
    return values.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)))


class Lookup:
    """Proposes for vLLM's runner on the CPU."""

    def __init__(self, config: Any) -> None:
        """config: vLLM's."""
        self._num_tokens = config.speculative_config.num_speculative_tokens

    def propose(
        self, sampled: Sequence[Sequence[int]], lengths: np.ndarray, token_ids: np.ndarray, **others: Any
    ) -> list[list[int]]:
        """What may follow each request's text; `sampled`: its new tokens, none while its prompt is computed."""
        if len(sampled) > MOST_ROWS:
            return [[] for _ in sampled]
        texts = [token_ids[row, : lengths[row]].tobytes() if new else b"" for row, new in enumerate(sampled)]
        return [draft(text, self._num_tokens).tolist() for text in texts]

    def load_model(self, model: Any) -> None:
        """Nothing: it has none."""


def draft(text: bytes, most: int) -> array:
    """Return up to `most` token ids ('i') that followed a text's last ones before, the text as bytes of ids.

    A text that repeats itself goes on repeating. Empty where nothing is alike.
    """
    for length in LENGTHS:
        if (end := _find(text[-length * SIZE :], text)) is not None:
            return (array("i", text[end : end + most * SIZE]) * most)[:most]
    return array("i")


def _find(tokens: bytes, text: bytes) -> int | None:
    """Where `tokens` end in a text for the last time, with something behind them."""
    at = text.rfind(tokens, 0, -SIZE)
    while at > 0 and at % SIZE:  # not at the border of a token
        at = text.rfind(tokens, 0, at + len(tokens) - 1)
    return None if at < 0 else at + len(tokens)
