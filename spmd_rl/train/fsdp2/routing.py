"""Load of a mixture's routers in transformers' modules, and two ways to even it.

One is an auxiliary loss (`train/expert_load.py`), the other a bias on each expert's score that affects only the choice:
every update moves it by a constant, up below the mean load, else down (Wang et al., arXiv 2408.15664, as in
DeepSeek-V3). It is a saved buffer. `Routing` is made before the model is sharded.
"""

from collections.abc import Callable

from torch import Tensor, nn

from spmd_rl.base.errors import UserError
from spmd_rl.config.sections.models import TrainedModelConfig
from spmd_rl.distributed import Layout
from spmd_rl.model.moe import probabilities, router_class
from spmd_rl.train.expert_load import ExpertLoad
from spmd_rl.train.fsdp2.shard import decoder_layers

BIAS = "e_score_correction_bias"


class Routing:
    """Observer of this rank's routers in training forwards."""

    def __init__(self, model: nn.Module, layout: Layout, settings: TrainedModelConfig) -> None:
        """Raise UserError if the settings balance the load of a model without routers, or biases.

        model: this stage's layers.
        """
        self._speed = settings.router_bias_update_speed
        kind, name = router_class(model), model.config.name_or_path or type(model).__name__
        if settings.router_aux_coef and kind is None:
            raise UserError(
                f"policy.router_aux_coef: {name} has no routers whose logits transformers returns; must be 0"
            )
        self._biased = {key: m for key, m in model.named_modules() if kind and isinstance(m, kind) and hasattr(m, BIAS)}
        if self._speed and not self._biased:
            raise UserError(f"policy.router_bias_update_speed: the routers of {name} have no {BIAS}; must be 0")
        num_routers = 0
        for layer in decoder_layers(model) if kind else ():
            for router in (module for module in layer.modules() if isinstance(module, kind)):
                layer.register_forward_pre_hook(self._before, with_kwargs=True)
                router.register_forward_hook(self._after(num_routers))
                num_routers += 1
        self._load = ExpertLoad(layout, settings.router_aux_coef, num_routers if kind else None)
        self.begin, self.metrics = self._load.begin, self._load.metrics

    def _before(self, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        self._load.take(kwargs.get("routed"))

    def _after(self, place: int) -> Callable[..., tuple | None]:
        def watch(router: nn.Module, args: tuple, output: tuple[Tensor, Tensor, Tensor]) -> tuple | None:
            logits, weights, chosen = output
            changed = self._load.observe(place, probabilities(router, logits), chosen, weights)  # [all]
            return None if changed is None else (logits, changed, chosen)

        return watch

    def balance(self) -> None:
        """[all] Move experts' biases by the load since `begin`."""
        self._load.balance([getattr(router, BIAS) for router in self._biased.values()], self._speed)  # [all]

    def biases(self) -> dict[str, Tensor]:
        """Return live biases by name; none unless `balance` moves them."""
        return {f"{key}.{BIAS}": getattr(m, BIAS) for key, m in self._biased.items()} if self._speed else {}
