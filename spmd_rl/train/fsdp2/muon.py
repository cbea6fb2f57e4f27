"""Muon over sharded matrices: momentum whose singular values are all made about 1 (Jordan et al., 2024).

Muon trains layers' matrices, in mixtures those of each expert; AdamW embeddings, output embedding, norms and biases.
Steps have AdamW's root mean square, so one learning rate serves both (Liu et al., arXiv 2502.16982). A copy's ranks
gather matrices in bfloat16, orthogonalise every n-th one each, and broadcast it.
"""

import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spmd_rl.config.sections.models import TrainedModelConfig
from spmd_rl.distributed import Layout
from spmd_rl.model.load import local, owned_region
from spmd_rl.model.moe import stacked_experts
from spmd_rl.train.fsdp2.gather import Gather
from spmd_rl.train.fsdp2.shard import decoder_layers

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the odd polynomial that moves singular values near 1 when iterated"""
ITERATIONS, EPS = 5, 1e-7
ADAMW_RMS = 0.2
"""Root mean square of AdamW's step, in learning rates"""


def matrices(model: nn.Module) -> dict[str, int]:
    """Return the parameters that Muon trains, with their numbers of stacked matrices.

    The model must be unsharded. Stacked experts count once; gate and up projections are two.
    """
    stacked = {
        id(p): (experts, key) for experts in stacked_experts(model).values() for key, p in experts.named_parameters()
    }
    inside = {id(p) for layer in decoder_layers(model) for p in layer.parameters()}
    found = {}
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) in inside and (p.ndim == 2 or (p.ndim == 3 and id(p) in stacked)):
            experts, key = stacked.get(id(p), (None, ""))
            found[name] = 2 if p.ndim == 3 and experts.has_gate and key.startswith("gate_up") else 1
    return found


def orthogonalized(stack: Tensor) -> Tensor:
    """Return the matrices of [n, A, B] with singular values near 1, by Newton-Schulz iteration, in bfloat16."""
    a, b, c = COEFFICIENTS
    is_tall = stack.shape[1] > stack.shape[2]
    x = stack.bfloat16()
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


class Muon:
    """Muon on some parameters, sharded by FSDP."""

    def __init__(
        self,
        parameters: Mapping[str, DTensor],
        pieces: Mapping[str, int],
        layout: Layout,
        settings: TrainedModelConfig,
    ) -> None:
        """pieces: see `matrices`. Momentum exists from the start."""
        self._parameters, self._pieces, self._layout = parameters, pieces, layout
        self._momentum, self._weight_decay = settings.muon_momentum, settings.weight_decay
        self.buffers = {name: torch.zeros_like(p) for name, p in parameters.items()}
        """Running means of gradients, sharded as parameters"""

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """[all] Update from gradients, which become the step's direction."""
        known = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        for name, grad in known.items():
            buffer = local(self.buffers[name]).lerp_(local(grad), 1 - self._momentum)
            # Nesterov momentum.
            local(grad).lerp_(buffer, self._momentum)
        for name, direction in self._directions(known):
            p = self._parameters[name]
            rows, columns = direction.shape[-2] // self._pieces[name], direction.shape[-1]
            rate = lr * ADAMW_RMS * math.sqrt(max(rows, columns))
            local(p).detach().mul_(1 - lr * self._weight_decay).add_(direction[owned_region(p)], alpha=-rate)

    def _directions(self, gradients: Mapping[str, DTensor]) -> Iterator[tuple[str, Tensor]]:
        """[all] Yield gradients whole and orthogonalised, in bfloat16; a copy's ranks share the work."""
        group, size, rank = self._layout.group("fsdp"), self._layout.size("fsdp"), self._layout.rank("fsdp")
        gather = Gather(gradients, torch.bfloat16, self._layout)
        turn: list[tuple[str, torch.Size]] = []
        mine = torch.empty(0)
        for number, (name, whole) in enumerate(gather.whole(gradients)):  # [all]
            if number % size == rank:
                # The gather's buffer is overwritten by the next parameter.
                mine = whole.clone()
            turn.append((name, whole.shape))
            if len(turn) == size or number == len(gradients) - 1:
                yield from self._dealt_out(turn, mine, group, rank)  # [all]
                turn = []

    def _dealt_out(
        self, turn: list[tuple[str, torch.Size]], mine: Tensor, group: dist.ProcessGroup | None, rank: int
    ) -> Iterator[tuple[str, Tensor]]:
        """[all] Yield one turn's parameters, at most one per rank, broadcast by the rank that orthogonalised each."""
        device = self._layout.world.device
        if rank < len(turn):
            name, shape = turn[rank]
            mine = orthogonalized(mine.view(-1, shape[-2] // self._pieces[name], shape[-1])).reshape(shape).contiguous()
        for owner, (name, shape) in enumerate(turn):
            found = mine if owner == rank else torch.empty(shape, dtype=torch.bfloat16, device=device)
            if group is not None:
                with self._layout.collective("update: Muon", kind="compute"):
                    dist.broadcast(found, group=group, group_src=owner)  # [all]
            yield name, found
