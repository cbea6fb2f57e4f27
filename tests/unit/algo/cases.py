"""Samples as plain lists, for references written as loops; and the same samples as `Tokens`."""

from dataclasses import dataclass, field

import numpy as np
import torch

from spmd_rl.algo.inputs import Tokens

KEYS: dict[str, dict[str, float]] = {
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.28},
    "dual_clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.4},
    "segment_clip": {"clip_low": 0.1, "clip_high": 0.15},
    "gspo": {"clip_low": 0.08, "clip_high": 0.1},
    "gspo_token": {"clip_low": 0.08, "clip_high": 0.1},
    "raft_pp": {"clip_low": 0.2, "clip_high": 0.28},
    "vanilla_pg": {},
    "tis": {},
    "cispo": {"clip_low": 0.3, "clip_high": 0.28},
    "topr": {},
    "dppo_tv": {"clip_low": 0.06, "clip_high": 0.05, "dppo_cap": 1.4},
    "dppo_kl": {"clip_low": 0.02, "clip_high": 0.015, "dppo_cap": 1.4},
    "sapo": {"sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05},
    "gmpo": {"clip_low": 0.3, "clip_high": 0.4},
    "kimi": {"kimi_tau": 0.1},
    "clip_cov": {"clip_low": 0.3, "clip_high": 0.4},
    "kl_cov": {"kl_cov_coef": 0.7},
    "sft": {"sft_coef": 0.3},
    "entropy": {"entropy_coef": 0.5},
}
"""Settings under which some tokens of the cases below meet a bound and others do not."""


@dataclass
class Sample:
    """One sample of T tokens; lists of T floats."""

    new: list[float]
    old: list[float]
    engine: list[float]
    advantages: list[float]
    entropy: list[float]
    marked: list[bool]
    right: list[float]
    turns: list[int] = field(default_factory=list)
    """Turn of each token, counted from 0."""


def samples(seed: int, lengths: tuple[int, ...], *, drift: float = 0.3, per_token: bool = False) -> list[Sample]:
    """Random samples; log ratios are normal with deviation `drift`; `per_token`: an advantage a token."""
    rng = np.random.default_rng(seed)
    out = []
    for length in lengths:
        old = -rng.exponential(1.0, length) - 0.05
        shift = rng.normal(0, drift / 3)
        advantages = rng.normal(0, 1, length) if per_token else np.full(length, rng.normal(0, 1))
        out.append(
            Sample(
                new=(old + shift + rng.normal(0, drift, length)).tolist(),
                old=old.tolist(),
                engine=(old + rng.normal(0, drift, length)).tolist(),
                advantages=advantages.tolist(),
                entropy=rng.uniform(0, 3, length).tolist(),
                marked=(rng.uniform(0, 1, length) < 0.3).tolist(),
                right=[float(max(0.0, advantages[0]))] * length,
                turns=np.sort(rng.integers(0, 3, length)).tolist(),
            )
        )
    return out


def tokens(rows: list[Sample], dtype: torch.dtype = torch.float64) -> Tokens:
    """The samples joined; `logprobs` and `entropy` are leaves with a gradient."""

    def column(name: str, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.tensor([value for row in rows for value in getattr(row, name)], dtype=kind)

    places = [(i, turn) for i, row in enumerate(rows) for turn in row.turns]
    order = {place: number for number, place in enumerate(dict.fromkeys(places))}
    return Tokens(
        logprobs=column("new").requires_grad_(),
        old_logprobs=column("old"),
        rollout_logprobs=column("engine"),
        advantages=column("advantages"),
        entropy=column("entropy").requires_grad_(),
        samples=torch.tensor([i for i, _ in places], dtype=torch.int64),
        segments=torch.tensor([order[place] for place in places], dtype=torch.int64),
        marked=column("marked", torch.bool),
        right=column("right"),
    )
