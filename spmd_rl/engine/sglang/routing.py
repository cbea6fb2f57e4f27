"""`RecordedExperts`: which experts of a mixture each token went to in SGLang's last forward, for training to repeat.

with recording_experts(True):
    ...                                 # SGLang is started
recorded_experts().at(tokens)             # of these tokens of its last forward

SGLang's own recorder also keeps what it saw of every place of the cache, in memory that CUDA has pinned: a machine
without CUDA has none. What the last forward chose is all that is asked for here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.model_executor import model_runner
from sglang.srt.runtime_context import get_schedule
from sglang.srt.state_capturer.base import BaseDeviceCache
from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer, get_global_experts_capturer
from torch import Tensor, nn

from spmd_rl.base.errors import UserError


class RecordedExperts(RoutedExpertsCapturer):
    """In the place of SGLang's own."""

    @staticmethod
    def create(
        *, model: nn.Module, model_config: Any, num_tokens: int, max_running_requests: int, device: str
    ) -> "RecordedExperts":
        """[SGLang's] UserError for a model whose layers do not say what they choose."""
        layers = [module.layer_id for module in model.modules() if isinstance(module, TopK)]
        if not layers:
            raise UserError("policy.router_replay: SGLang knows the model as no mixture of experts; must be false")
        config, shared = model_config.hf_text_config, model.shared_experts_config.num_fused_shared_experts
        prompt = get_schedule().chunked_prefill_size or 0
        most = max(prompt if prompt > 0 else num_tokens, max_running_requests)
        return RecordedExperts(sorted(layers), config, most, shared, device)

    def __init__(self, layers: list[int], config: Any, most: int, shared: int, device: str) -> None:
        """layers: those that choose. most: tokens of a forward. shared: experts that SGLang adds for all tokens."""
        self.topk_size, self.num_fused_shared_experts = config.num_experts_per_tok, shared
        sizes = config.num_hidden_layers, self.topk_size + shared
        self.device_cache = BaseDeviceCache(most, *sizes, device, name="chosen experts")
        self._layers = torch.tensor(layers, device=device)
        self.per_token = len(layers) * self.topk_size
        """How many numbers `at` gives for each token: the chosen experts of all layers that choose."""

    def on_forward_end(self, *args: Any, **kwargs: Any) -> None:
        """[SGLang's] Nothing more is kept."""

    def destroy(self) -> None:
        """[SGLang's] Nothing is held beside torch's own memory."""

    def at(self, tokens: Tensor) -> list[list[int]]:
        """The experts of these tokens of the last forward (int64 [n]): of the first layer, of the second and so on."""
        found = self.device_cache.buffer[tokens][:, self._layers, : self.topk_size]
        return found.flatten(1).tolist()


@contextmanager
def recording_experts(wanted: bool) -> Iterator[None]:
    """Start SGLang inside, with `enable_return_routed_experts` saying the same."""
    model_runner.RoutedExpertsCapturer = RecordedExperts if wanted else RoutedExpertsCapturer
    try:
        yield
    finally:
        model_runner.RoutedExpertsCapturer = RoutedExpertsCapturer


def recorded_experts() -> RecordedExperts | None:
    """What records, in the SGLang that was started last."""
    found = get_global_experts_capturer()
    return found if isinstance(found, RecordedExperts) else None
