"""Drafts in vLLM: tokens that earlier in the text followed the answer's last ones, verified by vLLM's sampler.

A drafted token is accepted with its probability under the model, else another is drawn from the rest. Distribution and
logprobs are the model's; tokens differ, because random draws are used differently.
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
"""Numbers of last tokens to look up; the first match counts"""
SIZE = array("i").itemsize
# Above it drafts cost more than they save on CPUs: lab/2026-11-26-drafts-and-priorities.md
MOST_ROWS = 8


def engine_args(num_tokens: int, cpu: bool) -> dict[str, Any]:
    """Return vLLM's arguments for drafts of up to `num_tokens` tokens."""
    if not num_tokens:
        return {}
    lookup: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": max(LENGTHS), "prompt_lookup_min": min(LENGTHS)}
    # vLLM's lookup lacks numba on the CPU; elsewhere it runs on the device, for any number of requests.
    if cpu:
        lookup = {"method": "custom_class", "model": f"{Lookup.__module__}.{Lookup.__qualname__}"}
        rejection_sampler.expand_batch_to_tokens = _expanded
    return {"speculative_config": {"num_speculative_tokens": num_tokens, **lookup}}


def count_drafts(llm: LLMEngine, counts: EngineCounts) -> None:
    """Count each draft that a started vLLM verifies, in `counts`."""

    def note(_: None, num_draft_tokens: int, num_accepted_tokens: int, **others: Any) -> None:
        counts.verified += num_draft_tokens > 0
        counts.accepted += num_accepted_tokens

    llm.engine_core.engine_core.scheduler.make_spec_decoding_stats = note


def _expanded(values: Tensor, ends: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    # vLLM's own function fills a copy on the CPU, and returns noise.
    values = values.masked_fill(values == replace_from, replace_to)
    return values.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)))


class Lookup:
    """Proposer of drafts for vLLM's CPU runner."""

    def __init__(self, config: Any) -> None:
        self._num_tokens = config.speculative_config.num_speculative_tokens

    def propose(
        self, sampled: Sequence[Sequence[int]], lengths: np.ndarray, token_ids: np.ndarray, **others: Any
    ) -> list[list[int]]:
        """Return drafts of each request's next tokens. sampled: new tokens, none during its prompt."""
        if len(sampled) > MOST_ROWS:
            return [[] for _ in sampled]
        texts = [token_ids[row, : lengths[row]].tobytes() if new else b"" for row, new in enumerate(sampled)]
        return [draft(text, self._num_tokens).tolist() for text in texts]

    def load_model(self, model: Any) -> None:
        """Do nothing: drafts need no model."""


def draft(text: bytes, most: int) -> array:
    """Return up to `most` ids ('i') that followed the last ones earlier in a text, given as bytes of ids.

    A repetition continues; empty without a match.
    """
    for length in LENGTHS:
        if (end := _find(text[-length * SIZE :], text)) is not None:
            return (array("i", text[end : end + most * SIZE]) * most)[:most]
    return array("i")


def _find(tokens: bytes, text: bytes) -> int | None:
    at = text.rfind(tokens, 0, -SIZE)
    # A match of bytes that does not begin at a token is none.
    while at > 0 and at % SIZE:
        at = text.rfind(tokens, 0, at + len(tokens) - 1)
    return None if at < 0 else at + len(tokens)
