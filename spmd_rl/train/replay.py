"""Router replay: the trainer's forward routes tokens to the experts that the engine chose.

    replay = Replay(model, layout, True)  # of the whole model, before it is cut
    chosen = replay.of_row(micro, tree)  # passed to each layer, which calls `replay.take`
    ... = replay.choose(place, own)  # by each router

Small differences can change chosen experts, hence probabilities by a lot. Routing weights, and experts of tokens not
sampled, are the trainer's (R3: Ma et al., arXiv 2510.11370).
"""

import torch
from torch import Tensor, nn

from spmd_rl.base.errors import UserError
from spmd_rl.batch import Batch
from spmd_rl.distributed import Layout
from spmd_rl.model.moe import router_class, weights_of_chosen
from spmd_rl.train.sharing import PrefixTree


class Replay:
    """Replacement of routers' choices by the engine's recorded ones."""

    def __init__(self, model: nn.Module, layout: Layout, is_on: bool) -> None:
        """Raise UserError if the model is no mixture, or if its routers weigh experts in an unknown way.

        is_on: False for no replay.
        """
        self._layout, self._kind = layout, router_class(model)
        self.places: dict[str, int] = {}
        """Positions of routers by name; empty without replay"""
        self._chosen: Tensor | None = None
        self._counts: Tensor | float = 0.0
        if not is_on:
            return
        routers = [name for name, m in model.named_modules() if self._kind and isinstance(m, self._kind)]
        self.places = {name: place for place, name in enumerate(routers)}
        name = model.config.name_or_path or type(model).__name__
        if not self.places:
            raise UserError(f"policy.router_replay: {name} is not a mixture of experts; must be false")
        if not _weighs_as_known(self._kind, model.config.get_text_config()):
            raise UserError(f"policy.router_replay: how {name} weighs its experts is unknown; must be false")

    def of_row(self, micro: Batch, tree: PrefixTree) -> Tensor | None:
        """Return the engine's choices by token of the tree, int64 [F, layers, k] on the CPU, -1 if unknown."""
        if not self.places or micro.experts is None or not len(micro.experts.values):
            return None
        lengths = micro.experts.offsets.diff()
        tokens = lengths.nonzero()[:, 0]
        listed = micro.experts.values.long().view(len(tokens), len(self.places), -1)
        known = listed[:, 0, 0] >= 0
        chosen = listed.new_full((len(tree.token_ids), *listed.shape[1:]), -1)
        chosen[tree.gather_index[tokens[known]]] = listed[known]
        return chosen

    def take(self, chosen: Tensor | None) -> None:
        """Set the choices for a row's tokens, int64 [t, layers, k]; each layer calls it before computing."""
        # Not once per row: recomputation in the backward pass runs a layer again after other rows.
        # Between the blocks of a layer each tensor-parallel rank has a span of the tokens.
        if chosen is not None:
            chosen = chosen.unflatten(0, (self._layout.size("tp"), -1))[self._layout.rank("tp")]
        self._chosen = chosen

    def choose(self, place: int, own: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return experts for router number `place` instead of `own` (int64 [T, k] each), and the mask of tokens with
        the engine's choice (bool [T, 1]); None without any."""
        if self._chosen is None:
            return None
        forced = self._chosen[:, place]
        known = forced[:, :1] >= 0
        if torch.is_grad_enabled():
            other = ((forced[:, :, None] != own[:, None]).all(-1) & known).sum()
            counts = torch.stack([other / own.shape[1], known.sum(), torch.ones_like(known).sum()])
            self._counts = self._counts + counts.double()
        return torch.where(known, forced, own), known

    def metrics(self) -> dict[str, float]:
        """[all] Return, since the last call, the share of replayed tokens, and of the engine's choices that differ from
        the trainer's. Empty without replay."""
        if not self.places:
            return {}
        counts = self._counts.tolist() if isinstance(self._counts, Tensor) else (0.0, 0.0, 0.0)
        self._counts, sums = 0.0, dict(zip(("other", "replayed", "all"), counts, strict=True))
        sums = self._layout.world.reduce("update: router replay", sums, op="sum")  # [all]
        changed = sums["other"] / max(1.0, sums["replayed"])
        return {"moe/replayed": sums["replayed"] / max(1.0, sums["all"]), "moe/replay_changed": changed}


def _weighs_as_known(kind: type[nn.Module], config) -> bool:
    generator = torch.Generator().manual_seed(0)
    router = kind(config).float()
    router.weight.data.normal_(generator=generator)
    logits, weights, chosen = router(torch.randn(16, config.hidden_size, generator=generator))
    return torch.allclose(weights_of_chosen(router, logits, chosen), weights)
