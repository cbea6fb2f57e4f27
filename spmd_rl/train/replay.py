"""Router replay: the trainer's forward sends tokens to the experts that the engine has chosen for them.

    replay = Replay(model, layout, True)       # of the whole model, before it is cut
    chosen = replay.of_row(micro, tree)        # given to each layer, which calls `replay.take`
    ... = replay.choose(place, own)            # by each router
    metrics = replay.metrics()                 # [all]

A small difference between engine and trainer may change who is chosen, and with it a token's probability by a lot. The
weights of the replayed experts are the trainer's own router's, and so is their gradient (R3: Ma et al., arXiv
2510.11370). Prompts, and whatever else the policy has not sampled, go where the trainer's router sends them.
"""

import torch
from torch import Tensor, nn

from spmd_rl.base.errors import UserError
from spmd_rl.batch import Batch
from spmd_rl.distributed import Layout
from spmd_rl.model.moe import router_class, weights_of_chosen
from spmd_rl.train.sharing import PrefixTree


class Replay:
    """Replaces what routers choose, for tokens of which the batch says whom the engine chose."""

    def __init__(self, model: nn.Module, layout: Layout, is_on: bool) -> None:
        """UserError if the model is no mixture, or if its routers weigh the chosen experts in an unknown way.

        is_on: else it does nothing.
        """
        self._layout, self._kind = layout, router_class(model)
        self.places: dict[str, int] = {}
        """Of the routers by name; none if it is off."""
        self._chosen: Tensor | None = None
        self._counts: Tensor | float = 0.0
        if not is_on:
            return
        routers = [name for name, m in model.named_modules() if self._kind and isinstance(m, self._kind)]
        self.places = {name: place for place, name in enumerate(routers)}
        name = model.config.name_or_path or type(model).__name__
        if not self.places:
            raise UserError(f"policy.router_replay: {name} is no mixture of experts; must be false")
        if not _weighs_as_known(self._kind, model.config.get_text_config()):
            raise UserError(f"policy.router_replay: how {name} weighs its experts is not known; must be false")

    def of_row(self, micro: Batch, tree: PrefixTree) -> Tensor | None:
        """The engine's choices for each token of the tree: int64 [F, layers, k], -1 where there is none; on the CPU."""
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
        """The choices for a row's tokens, int64 [t, layers, k], as each layer is about to compute it.

        Each layer: it may be computed a second time, for the backward pass, when other tokens have come by since.
        """
        if chosen is not None:  # between the blocks of a layer each rank along `tp` has a run of the tokens
            chosen = chosen.unflatten(0, (self._layout.size("tp"), -1))[self._layout.rank("tp")]
        self._chosen = chosen

    def choose(self, place: int, own: Tensor) -> tuple[Tensor, Tensor] | None:
        """Whom the router of the layer that is `place` among the mixtures uses, instead of `own` (int64 [T, k] each),
        and for which tokens that is the engine's choice (bool [T, 1]); None where the engine has made none.
        """
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
        """[all] Of the forwards with gradient since the last call: the share of tokens that have been replayed, and of
        the engine's choices for them the share that the trainer's routers would not have made. Empty if it is off.
        """
        if not self.places:
            return {}
        counts = self._counts.tolist() if isinstance(self._counts, Tensor) else (0.0, 0.0, 0.0)
        self._counts, sums = 0.0, dict(zip(("other", "replayed", "all"), counts, strict=True))
        sums = self._layout.world.reduce("update: router replay", sums, op="sum")  # [all]
        changed = sums["other"] / max(1.0, sums["replayed"])
        return {"moe/replayed": sums["replayed"] / max(1.0, sums["all"]), "moe/replay_changed": changed}


def _weighs_as_known(kind: type[nn.Module], config) -> bool:
    """Whether `weights_of_chosen` gives what a router of this kind gives for those that it chooses itself."""
    generator = torch.Generator().manual_seed(0)
    router = kind(config).float()
    router.weight.data.normal_(generator=generator)
    logits, weights, chosen = router(torch.randn(16, config.hidden_size, generator=generator))
    return torch.allclose(weights_of_chosen(router, logits, chosen), weights)
