"""`SequenceState`: a request's tokens so far, and its stop conditions."""

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from spmd_rl.base.errors import RunFailed
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.types import CandidateIds, Completion, FinishReason, Request

TextOf = Callable[[Iterable[int]], str]
"""Function from token ids to text, without special tokens"""

# Special tokens have no text, and a text's first token may decode differently.
SPARE_TOKENS = 8
"""Tokens decoded before those that may hold a stop string"""


@dataclass(eq=False, slots=True)
class SequenceState:
    """Tokens of a request so far."""

    request: Request
    token_ids: array = field(default_factory=lambda: array("i"))
    logprobs: array = field(default_factory=lambda: array("f"))
    versions: array = field(default_factory=lambda: array("i"))
    candidate_ids: CandidateIds = field(default_factory=lambda: CandidateIds(array("i"), array("i")))
    experts: array = field(default_factory=lambda: array("h"))
    """experts of the tokens fed so far, see `Completion.experts`"""
    num_experts: int = 0
    matcher: Any = None
    """xgrammar's matcher of a constrained answer, once its first token was requested"""
    num_matched: int = 0

    def append(self, token: int, logprob: float, version: int, candidate_ids: Sequence[int] = ()) -> None:
        """Add a sampled token. RunFailed for a non-finite logprob."""
        if not math.isfinite(logprob):
            raise RunFailed(f"the engine computed a logprob of {logprob} for request {self.request.id}")
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if self.request.truncated:
            self.candidate_ids.counts.append(len(candidate_ids))
            self.candidate_ids.ids.extend(candidate_ids)

    def completion(self, reason: FinishReason) -> Completion:
        """Return the completion of a request that ends now."""
        candidate_ids = self.candidate_ids if self.request.truncated else None
        experts = None
        if self.num_experts:
            experts = self.experts + array("h", [-1]) * (self.num_experts * len(self.token_ids) - len(self.experts))
        return Completion(self.request.id, self.token_ids, self.logprobs, self.versions, reason, candidate_ids, experts)


def no_text(ids: Iterable[int]) -> str:
    """Raise ValueError: this engine has no tokenizer."""
    raise ValueError("stop strings need a tokenizer")


def text_of_model(path: str | Path, trust_remote_code: bool) -> TextOf:
    """Return the decoder of a model's tokenizer, loaded on first use."""
    tokenizer = cache(lambda: load_tokenizer(path, trust_remote_code))
    return lambda ids: tokenizer().decode(ids)


def has_stop(answer: SequenceState, text_of: TextOf) -> bool:
    """Return True if the answer's last token completes a stop string."""
    # Every token has at least one byte of text, except up to `SPARE_TOKENS` special ones, so only the last few tokens
    # can complete a stop string.
    request = answer.request
    if not request.stop:
        return False
    size = max(len(text.encode()) for text in request.stop) + SPARE_TOKENS
    tail = answer.token_ids[-size:]
    if len(tail) < size:
        tail = request.begun[len(tail) - size :] + tail
    text = text_of(tail)
    return any(stop in text for stop in request.stop)


def check(request: Request, max_tokens: int, processor: Any = None) -> None:
    """Raise ValueError for a request that no engine can answer.

    max_tokens: of prompt and answer. processor: the model's `model.pictures.Processor`, if any.
    """
    r, num_tokens = request, len(request.prompt_ids) + request.max_new_tokens
    if not r.prompt_ids or r.max_new_tokens < 1:
        raise ValueError(f"request {r.id}: needs at least one prompt token and one new token")
    if num_tokens > max_tokens:
        raise ValueError(f"request {r.id}: {num_tokens} tokens exceed {max_tokens}")
    if not (r.top_k >= 0 and 0 < r.top_p <= 1 and 0 <= r.min_p <= 1):
        raise ValueError(f"request {r.id}: top_k {r.top_k}, top_p {r.top_p} or min_p {r.min_p} is out of its range")
    if r.top_k == 0 and (r.top_p < 1 or r.min_p > 0):
        raise ValueError(f"request {r.id}: top_p and min_p need a top_k, which bounds what is recorded")
    if r.pictures and processor is None:
        raise ValueError(f"request {r.id}: has pictures, and the model takes text alone")
    wanted = sum(processor.count(data) for data in r.pictures) if processor else 0
    if processor and (given := sum(id < 0 for id in r.prompt_ids)) != wanted:
        raise ValueError(f"request {r.id}: has {given} ids of pictures, and pictures of {wanted}")
