"""`ExpertLoad`: tokens per expert, and an auxiliary loss to balance them.

The loss, summed over layers, is Switch Transformers' (Fedus et al., arXiv 2101.03961): experts x the sum over them of f
x P, with an expert's share f of choices and mean probability P, over all ranks' tokens in one round of micro-batches.
It is 1 at even load. Calls: `begin`, `take` by each layer, `observe` by each router, `metrics`.
"""

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.distributed import Layout

METRICS = ("moe/load_max_mean", "moe/entropy", "moe/aux_loss")


class ExpertLoad:
    """Counts of this rank's routers in training forwards."""

    def __init__(self, layout: Layout, coef: float, num_routers: int | None) -> None:
        """coef: of the loss. num_routers: on this rank; None for a dense model."""
        self._layout, self._coef, self._scale = layout, coef, 0.0
        self._groups = [group for axis in ("fsdp", "tp", "dp_replicate") if (group := layout.group(axis)) is not None]
        self._is_mixture = num_routers is not None
        self._totals: list[Tensor | float] = [0.0] * (num_routers or 0)
        self._is_real: Tensor | None = None

    def begin(self, num_microbatches: int) -> None:
        """Reset the counts before equally many micro-batches on all ranks."""
        self._scale, self._totals = self._coef / num_microbatches, [0.0] * len(self._totals)

    def take(self, routed: Tensor | None) -> None:
        """Set the mask of the row's tokens that count, bool [t]; each layer calls it before computing."""
        # Set again by each layer: when the backward pass recomputes a layer, the mask of a later row would be in place.
        # Between the blocks of a layer each tensor-parallel rank has a span of the tokens.
        if routed is not None:
            routed = routed.view(self._layout.size("tp"), -1)[self._layout.rank("tp")]
        self._is_real = routed

    def observe(self, place: int, probabilities: Tensor, chosen: Tensor, weights: Tensor) -> Tensor | None:
        """[all] Count the choices of router number `place`: probabilities [T, E], experts int64 [T, k].

        Returns the routing weights `weights` with the loss's gradient attached; None without a loss.
        """
        if self._is_real is None or not torch.is_grad_enabled():
            return None
        shares = probabilities * self._is_real[:, None]
        real = self._is_real.to(shares.dtype)
        load = torch.zeros_like(shares[0])
        load.index_add_(0, chosen.flatten(), real.repeat_interleave(chosen.shape[1]))
        sums, known = shares.sum(0), shares.detach()
        entropy = -torch.xlogy(known, known).sum()
        # Per router: tokens per expert [E], summed probabilities [E], entropy, number of tokens.
        found = torch.cat([load, sums.detach(), torch.stack([entropy, real.sum()])])
        self._totals[place] = self._totals[place] + found.double()
        if not self._coef or not weights.requires_grad:
            return None
        self._sum(found)  # [all]
        num_experts, num_tokens = len(load), found[-1].clamp(min=1)
        share = found[:num_experts] / (num_tokens * chosen.shape[1])
        # This rank's term of the loss: the other factors are global.
        loss = num_experts * (share * sums).sum() / num_tokens
        return _AddLoss.apply(weights, self._scale * loss)

    def _sum(self, values: Tensor) -> None:
        """[all] Sum in place over ranks with the same layers and other tokens."""
        for group in self._groups:
            dist.all_reduce(values, group=group)

    @torch.no_grad()
    def balance(self, biases: Collection[Tensor], speed: float) -> None:
        """[all] Move the biases, [E], of this rank's routers by the load since `begin`."""
        if not speed or not biases:
            return
        totals = torch.stack(self._totals)
        load = totals[:, : totals.shape[1] // 2 - 1].contiguous()
        self._sum(load)  # [all]
        for bias, own in zip(biases, load, strict=True):
            bias.add_(speed * torch.sign(own.mean() - own))

    def metrics(self) -> dict[str, float]:
        """[all] Return means over layers and all tokens since `begin`: `METRICS` and the share dropped. Empty for a
        dense model."""
        if not self._is_mixture:
            return {}
        sums = dict.fromkeys((*METRICS, "layers"), 0.0)
        if self._totals:
            totals = torch.stack(self._totals)
            self._sum(totals)  # [all]
            num_experts = totals.shape[1] // 2 - 1
            load, shares, (entropy, num_tokens) = *totals[:, :-2].split(num_experts, 1), totals[:, -2:].unbind(1)
            even, num_tokens = load.mean(1).clamp(min=1 / num_experts), num_tokens.clamp(min=1)
            loss = (load * shares).sum(1) / (even * num_tokens)
            values = torch.stack([load.amax(1) / even, entropy / num_tokens, loss]).sum(1).tolist()
            sums = dict(zip(METRICS, values, strict=True)) | {"layers": len(totals)}
        # Each pipeline stage has other layers, and all its ranks the same numbers.
        found = self._layout.world.reduce("update: routing", sums, op="sum")  # [all]
        # A plan has this stage's layers alone, perhaps none.
        return {name: found[name] / max(found["layers"], 1) for name in METRICS} | {"moe/dropped": 0.0}


class _AddLoss(torch.autograd.Function):
    """Identity on the first argument that also propagates gradient to the second, an otherwise unused loss."""

    @staticmethod
    def forward(ctx, values: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.detach()
        return values.view_as(values)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones_like(ctx.like)
