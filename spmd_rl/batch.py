"""The packed columnar `Batch`: the tensors of many samples laid end to end, without padding.

A *segment* is a run of tokens that attends causally to itself and to its ancestors. Today every sample is one root
segment (prompt and answer); a segment may name a parent so that the answers of a group can share one computation of
their prompt. Three columns, each with its own length:

    tokens    T    one entry per token
    segments  S    one entry per segment; segment s owns tokens [starts[s], starts[s+1])
    samples   S    keys and weights of the sample a segment carries

Left out: padding (a backend's own affair) and anything that is not a tensor.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from spmd_rl.types import Sample


@dataclass(slots=True)
class Batch:
    """Samples of one rank, packed. All tensors live on one device; log-probabilities are natural logarithms."""

    token_ids: Tensor
    """int64 [T]"""
    position_ids: Tensor
    """int64 [T]: 0, 1, ... within each root-to-segment path"""
    starts: Tensor
    """int64 [S+1]: first token of each segment, then T"""
    parents: Tensor
    """int64 [S]: index of the parent segment, -1 for a root"""
    keys: Tensor
    """int64 [S, 2]: (ticket, answer) of the sample; (-1, -1) for a shared prompt"""
    loss_mask: Tensor
    """bool [T]: the token was sampled by the policy (its logprob comes from the token before it)"""
    rollout_logprobs: Tensor
    """float32 [T]: the engine's logprob of each sampled token, 0 elsewhere"""
    versions: Tensor
    """int64 [T]: policy version that sampled the token, -1 elsewhere"""
    advantages: Tensor
    """float32 [T]: 0 outside the loss mask"""
    weights: Tensor
    """float32 [T]: weight of the token's loss; the weights of the *global* batch make the aggregation (token-mean:
    1 / global token count), so that a sum over any split of the batch is the loss"""
    old_logprobs: Tensor | None = None
    """float32 [T]: the trainer's logprobs before the first update; None where they equal the current ones"""
    ref_logprobs: Tensor | None = None
    """float32 [T]: the reference policy's logprobs; None where nothing needs them"""

    @property
    def num_tokens(self) -> int:
        """T"""
        return int(self.token_ids.numel())

    @property
    def num_segments(self) -> int:
        """S"""
        return int(self.parents.numel())

    def to(self, device: torch.device) -> "Batch":
        """A copy on `device`."""
        moved = {f.name: v.to(device) for f in fields(self) if (v := getattr(self, f.name)) is not None}
        return replace(self, **moved)

    def select(self, segments: Sequence[int]) -> "Batch":
        """A batch of these root segments, in this order."""
        assert bool((self.parents < 0).all()), "select() does not split shared prompts"
        bounds = self.starts.tolist()
        index = torch.cat([torch.arange(bounds[s], bounds[s + 1]) for s in segments] or [torch.arange(0)])
        index = index.to(self.token_ids.device)
        rows = torch.tensor(list(segments), dtype=torch.int64, device=index.device)
        lengths = [0] + [bounds[s + 1] - bounds[s] for s in segments]
        columns = {"starts": torch.tensor(lengths, device=index.device).cumsum(0)}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "starts" or value is None:
                continue
            columns[f.name] = value[rows] if f.name in ("parents", "keys") else value[index]
        return Batch(**columns)


def pack(samples: Iterable[Sample]) -> Batch:
    """Samples laid end to end in the order given; advantages and weights are zero. Legal with no sample at all."""
    ids: list[int] = []
    positions: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    starts, keys = [0], []
    for sample in samples:
        begin = len(ids)
        for turn in sample.turns:
            blank = len(turn.prompt_ids)
            ids += turn.prompt_ids.tolist() + turn.token_ids.tolist()
            mask += [False] * blank + [True] * len(turn.token_ids)
            logprobs += [0.0] * blank + turn.logprobs.tolist()
            versions += [-1] * blank + turn.versions.tolist()
        positions += range(len(ids) - begin)
        starts.append(len(ids))
        keys.append(sample.key)
    num_tokens = len(ids)
    return Batch(
        token_ids=torch.tensor(ids, dtype=torch.int64),
        position_ids=torch.tensor(positions, dtype=torch.int64),
        starts=torch.tensor(starts, dtype=torch.int64),
        parents=torch.full((len(keys),), -1, dtype=torch.int64),
        keys=torch.tensor(keys, dtype=torch.int64).reshape(-1, 2),
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        versions=torch.tensor(versions, dtype=torch.int64),
        advantages=torch.zeros(num_tokens),
        weights=torch.zeros(num_tokens),
    )
