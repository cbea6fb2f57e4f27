"""`ChosenExperts`: experts of each token in the last forward, for router replay in training.

chosen = ChosenExperts(module)
module(...)
chosen.at([4, 9])          # of two tokens of the forward
"""

from functools import partial

import torch
from torch import Tensor, nn

from spmd_rl.base.errors import UserError
from spmd_rl.model.moe import router_class


class ChosenExperts:
    """Recorder on a module's routers, in order of layers."""

    def __init__(self, module: nn.Module) -> None:
        """Raise UserError if transformers knows no routers of it."""
        kind = router_class(module)
        routers = [m for m in module.modules() if kind and isinstance(m, kind)]
        if not routers:
            raise UserError("policy.router_replay: the model is not a mixture of experts; must be false")
        self._found: list[Tensor] = [torch.empty(0)] * len(routers)
        for place, router in enumerate(routers):
            router.register_forward_hook(partial(self._watch, place))
        self.per_token = len(routers) * module.config.get_text_config().num_experts_per_tok
        """Numbers per token in `at`: chosen experts of all layers"""

    def _watch(self, place: int, router: nn.Module, args: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._found[place] = output[2]

    def at(self, tokens: Tensor) -> list[list[int]]:
        """Return the experts of these tokens, int64 [n], layer by layer."""
        found = torch.stack([chosen.index_select(0, tokens) for chosen in self._found], 1)
        return found.flatten(1).tolist()
