"""Which answers are masked out of the loss, and how much each of the others weighs in it.

A masked answer keeps its place in its group's baseline, unlike one without a score (`scores.py`).
"""

import numpy as np
import torch
from torch import Tensor

from spmd_rl.algo import masks
from spmd_rl.algo.groups import group_mean
from spmd_rl.batch import as_tensor
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.learn.binding import bind
from spmd_rl.learn.scores import Metadata


def mask(data: Metadata, settings: AlgorithmConfig) -> tuple[dict[int, str], Tensor]:
    """The answers that are masked out of the loss, in order, each with the first reason; and weights of the others.

    A weight, float64 of mean 1, is a factor of the answer's loss beside its share of the mean.
    """
    solved = group_mean(data.scores, data.groups) if settings.difficulty_loss_weight else None
    keep: dict[str, Tensor] = {}
    if settings.max_len_mask:
        keep["truncated"] = masks.max_len_mask(as_tensor(data.answers["truncated"], np.bool_))
    if settings.difficulty_mask:
        keep["too easy or too hard"] = bind(masks.difficulty_mask, settings)(data.scores, data.groups)
    if settings.variance_top_p is not None:
        keep["too little variance"] = bind(masks.variance_mask, settings)(data.scores, data.groups)
    if settings.error_max_len_clip:
        keep["long and wrong"] = bind(masks.error_max_len_mask, settings)(data.scores, data.lengths)
    kept = torch.ones(len(data.answers), dtype=torch.bool)
    reasons: dict[int, str] = {}
    for reason, passed in keep.items():
        kept &= passed
        for row in (~passed).nonzero().flatten().tolist():
            reasons.setdefault(row, reason)
    weights = torch.ones(len(data.answers), dtype=torch.float64)
    if solved is not None:
        weights = weights * masks.difficulty_weight(1 - solved)
    if settings.length_loss_weight:
        weights = weights * masks.length_weight(data.lengths)
    return dict(sorted(reasons.items())), masks.mean_one(weights[kept])
