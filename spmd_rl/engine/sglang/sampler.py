"""`CountedSampler`: draws the tokens of SGLang's batches as the native engine draws them.

SGLang's own refuses `min_p` with a seed, cuts by `top_k`, `top_p` and `min_p` in another
order, and takes the logprobs of a truncated draw from the whole distribution.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.sampler import Sampler
from torch import Tensor

from spmd_rl.engine.native.sampling import draw
from spmd_rl.engine.sequence import SequenceState


class Drawn(NamedTuple):
    """A token, its logprob, and among which tokens it was drawn (nothing: among all)."""

    token: int
    logprob: float
    candidate_ids: list[int]


class CountedSampler(Sampler):
    """Token t of a request is drawn from (seed, t), whatever it is computed beside."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: Mapping[str, SequenceState] = {}
        """The requests under way, by SGLang's name for each."""
        self.rids: list[str] = []
        """Those of the batch that is being computed, row by row."""
        self.drawn: dict[str, Drawn] = {}
        """What was drawn last for each of them. SGLang throws the token away where it has computed part of a prompt."""

    def forward(self, logits_output: Any, sampling_info: Any, *args: Any, **kwargs: Any) -> Tensor:
        """int64 [R], from logits [R, V] in which tokens that a grammar forbids have none."""
        logits = logits_output.next_token_logits
        # Those whose answer has ended are computed once more, and thrown away
        kept = [(i, rid) for i, rid in enumerate(self.rids) if rid in self.rows]
        tokens = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
        self.drawn = {}
        if kept:
            index = torch.tensor([i for i, _ in kept], device=logits.device)
            found = draw(logits[index], [self.rows[rid] for _, rid in kept])
            self.drawn = {rid: Drawn(*one) for (_, rid), one in zip(kept, zip(*found, strict=True), strict=True)}
            tokens[index] = torch.tensor(found[0], device=logits.device)
        return tokens
