"""How a mixture's routers spread tokens over experts: statistics, and two ways to keep the load even.

    routing = Routing(model, layout, settings)  # before the model is sharded
    routing.begin(num_microbatches)
    ...forward and backward passes, whose forwards are given `routed`...
    routing.balance()                           # [all]
    metrics = routing.metrics()                 # [all]

One is an auxiliary loss, the other a bias of each expert's score, which counts only for who is chosen: after every
update it moves by a constant, up where the expert had less than the mean load and down where it had more (Wang et al.,
arXiv 2408.15664, as in DeepSeek-V3). It has no gradient, and is a saved buffer of the models that have it.

The loss is that of Switch Transformers (Fedus et al., arXiv 2101.03961), summed over layers: experts x the sum over
them of f x P, where f is an expert's share of all choices and P its mean probability. Both are over the tokens of all
ranks in one round of micro-batches: as if one rank computed the round alone. The loss is 1 where the load is even.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmd_rl.config.sections.models import TrainedModelConfig
from spmd_rl.distributed import Layout
from spmd_rl.errors import UserError
from spmd_rl.model.moe import probabilities, router_class
from spmd_rl.train.fsdp2.shard import decoder_layers

BIAS = "e_score_correction_bias"
METRICS = ("moe/load_max_mean", "moe/entropy", "moe/aux_loss")


class Routing:
    """Watches the routers of the layers that are here, in forward passes that keep a graph."""

    def __init__(self, model: nn.Module, layout: Layout, settings: TrainedModelConfig) -> None:
        """UserError if the load is to be kept even and the model has no routers, or no biases, to do it with.

        Of the layers of a pipeline, `model` holds this stage's alone.
        """
        self._layout, self._coef, self._scale = layout, settings.router_aux_coef, 0.0
        self._speed = settings.router_bias_update_speed
        self._groups = [group for axis in ("fsdp", "tp", "dp_replicate") if (group := layout.group(axis)) is not None]
        self._totals: list[Tensor | float] = []
        self._is_real: Tensor | None = None
        kind, name = router_class(model), model.config.name_or_path or type(model).__name__
        if self._coef and kind is None:
            raise UserError(f"policy.router_aux_coef: {name} has no routers that transformers tells of; must be 0")
        self._biased = {key: m for key, m in model.named_modules() if kind and isinstance(m, kind) and hasattr(m, BIAS)}
        if self._speed and not self._biased:
            raise UserError(f"policy.router_bias_update_speed: the routers of {name} have no {BIAS}; must be 0")
        self._is_mixture = kind is not None
        for layer in decoder_layers(model) if kind else ():
            for router in (module for module in layer.modules() if isinstance(module, kind)):
                layer.register_forward_pre_hook(self._before, with_kwargs=True)
                router.register_forward_hook(self._after(len(self._totals)))
                self._totals.append(0.0)

    def begin(self, num_microbatches: int) -> None:
        """Start to count anew; this rank is about to compute so many, as many as all others."""
        self._scale, self._totals = self._coef / num_microbatches, [0.0] * len(self._totals)

    def _before(self, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        # of each layer: it may be computed a second time, for the backward pass, when other tokens have come by since
        routed = kwargs.get("routed")
        if routed is not None:  # between the blocks of a layer each rank along `tp` has a run of the tokens
            routed = routed.view(self._layout.size("tp"), -1)[self._layout.rank("tp")]
        self._is_real = routed

    def _after(self, place: int) -> Callable[..., tuple | None]:
        def watch(router: nn.Module, args: tuple, output: tuple[Tensor, Tensor, Tensor]) -> tuple | None:
            if self._is_real is None or not torch.is_grad_enabled():
                return None
            logits, weights, chosen = output
            shares = probabilities(router, logits) * self._is_real[:, None]
            real = self._is_real.to(shares.dtype)
            load = torch.zeros_like(shares[0])
            load.index_add_(0, chosen.flatten(), real.repeat_interleave(chosen.shape[1]))
            sums, known = shares.sum(0), shares.detach()
            entropy = -torch.xlogy(known, known).sum()
            found = torch.cat([load, sums.detach(), torch.stack([entropy, real.sum()])])
            self._totals[place] = self._totals[place] + found.double()
            if not self._coef or not weights.requires_grad:
                return None
            self._sum(found)  # [all]
            num_experts, num_tokens = len(load), found[-1].clamp(min=1)
            share = found[:num_experts] / (num_tokens * chosen.shape[1])
            loss = num_experts * (share * sums).sum() / num_tokens  # this rank's term: the other factors are global
            return logits, _AddLoss.apply(weights, self._scale * loss), chosen

        return watch

    def _sum(self, values: Tensor) -> None:
        """[all] In place, over the ranks that have the same layers, each of which has tokens of its own."""
        for group in self._groups:
            dist.all_reduce(values, group=group)

    @torch.no_grad()
    def balance(self) -> None:
        """[all] Move the biases of experts by what their load has been since `begin`."""
        if not self._speed:
            return
        totals = torch.stack(self._totals)
        load = totals[:, : totals.shape[1] // 2 - 1].contiguous()
        self._sum(load)  # [all]
        for router, own in zip(self._biased.values(), load, strict=True):
            getattr(router, BIAS).add_(self._speed * torch.sign(own.mean() - own))

    def biases(self) -> dict[str, Tensor]:
        """The live biases that training changes, by name; none unless `balance` moves them."""
        return {f"{key}.{BIAS}": getattr(m, BIAS) for key, m in self._biased.items()} if self._speed else {}

    def metrics(self) -> dict[str, float]:
        """[all] Means over layers, of the tokens of all micro-batches since `begin`: `METRICS`, and the share dropped.

        Empty of a model that is no mixture.
        """
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
        # Each stage of a pipeline has layers of its own, and all its ranks the same numbers
        found = self._layout.world.reduce("update: routing", sums, op="sum")  # [all]
        return {name: found[name] / found["layers"] for name in METRICS} | {"moe/dropped": 0.0}


class _AddLoss(torch.autograd.Function):
    """The first argument; its gradient brings that of the second, a loss, of which nothing else depends."""

    @staticmethod
    def forward(ctx, values: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.detach()
        return values.view_as(values)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones_like(ctx.like)
