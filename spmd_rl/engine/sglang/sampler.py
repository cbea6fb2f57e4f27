"""`SeededSampler`: the native engine's sampling in SGLang's batches.

SGLang's sampler refuses `min_p` with a seed, truncates in another order, and takes logprobs of a truncated draw from
the whole distribution.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.sampler import Sampler
from torch import Tensor

from spmd_rl.engine.native.sampling import cut_off, draw
from spmd_rl.engine.sequence import SequenceState
from spmd_rl.engine.sglang.routing import RecordedExperts
from spmd_rl.model.constraint import Constraint


class Drawn(NamedTuple):
    """A token, logprob and candidates (none: all), and the previous token's experts."""

    token: int
    logprob: float
    candidate_ids: list[int]
    experts: Sequence[int]


class SeededSampler(Sampler):
    """Sampler that draws token t of a request from (seed, t)."""

    def __init__(self, constraint: Constraint | None = None, experts: RecordedExperts | None = None) -> None:
        """constraint: grammar of all answers. experts: their recorder, if any."""
        super().__init__()
        self._constraint, self.experts = constraint, experts
        self.rows: Mapping[str, SequenceState] = {}
        """Requests in progress, by SGLang's name"""
        self.batch: dict[str, int] = {}
        """Requests of the present batch, by row, with their last token's index"""
        self.drawn: dict[str, Drawn] = {}
        """Last draw of each request. SGLang drops the token after a partial prompt"""

    def forward(self, logits_output: Any, sampling_info: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return tokens int64 [R] from logits [R, V]."""
        logits = logits_output.next_token_logits
        # SGLang computes requests once more after their answer has ended; the tokens are dropped.
        kept = [(i, rid) for i, rid in enumerate(self.batch) if rid in self.rows]
        tokens = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
        self.drawn = {}
        if kept:
            index = torch.tensor([i for i, _ in kept], device=logits.device)
            rows, own = [self.rows[rid] for _, rid in kept], logits[index]
            if self._constraint:
                cut_off(own, rows, self._constraint)
            last = torch.tensor([self.batch[rid] for _, rid in kept], device=logits.device)
            experts = self.experts.at(last) if self.experts else [()] * len(kept)
            found = *draw(own, rows), experts
            self.drawn = {rid: Drawn(*one) for (_, rid), one in zip(kept, zip(*found, strict=True), strict=True)}
            tokens[index] = torch.tensor(found[0], device=logits.device)
        return tokens
