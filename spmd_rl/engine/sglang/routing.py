"""`RecordedExperts`: experts of each token in SGLang's last forward, for router replay in training.

SGLang's own recorder keeps experts of every cache slot in pinned memory, which needs CUDA.
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
    """Replacement of SGLang's recorder of experts."""

    @staticmethod
    def create(
        *, model: nn.Module, model_config: Any, num_tokens: int, max_running_requests: int, device: str
    ) -> "RecordedExperts":
        """Make the recorder, called by SGLang. UserError if layers do not expose their choices."""
        layers = [module.layer_id for module in model.modules() if isinstance(module, TopK)]
        if not layers:
            raise UserError("policy.router_replay: for SGLang the model is not a mixture of experts; must be false")
        config, shared = model_config.hf_text_config, model.shared_experts_config.num_fused_shared_experts
        prompt = get_schedule().chunked_prefill_size or 0
        most = max(prompt if prompt > 0 else num_tokens, max_running_requests)
        return RecordedExperts(sorted(layers), config, most, shared, device)

    def __init__(self, layers: list[int], config: Any, most: int, shared: int, device: str) -> None:
        """layers: mixtures. most: tokens of a forward. shared: experts that SGLang adds for all tokens."""
        self.topk_size, self.num_fused_shared_experts = config.num_experts_per_tok, shared
        sizes = config.num_hidden_layers, self.topk_size + shared
        self.device_cache = BaseDeviceCache(most, *sizes, device, name="chosen experts")
        self._layers = torch.tensor(layers, device=device)
        self.per_token = len(layers) * self.topk_size
        """Numbers per token in `at`: chosen experts of all mixture layers"""

    def on_forward_end(self, *args: Any, **kwargs: Any) -> None:
        """[SGLang's] Do nothing: nothing more is kept."""

    def destroy(self) -> None:
        """[SGLang's] Do nothing: all memory is torch's."""

    def at(self, tokens: Tensor) -> list[list[int]]:
        """Return the experts of these tokens of the last forward, int64 [n], layer by layer."""
        found = self.device_cache.buffer[tokens][:, self._layers, : self.topk_size]
        return found.flatten(1).tolist()


@contextmanager
def recording_experts(wanted: bool) -> Iterator[None]:
    """Start SGLang inside; `wanted` equals its `enable_return_routed_experts`."""
    model_runner.RoutedExpertsCapturer = RecordedExperts if wanted else RoutedExpertsCapturer
    try:
        yield
    finally:
        model_runner.RoutedExpertsCapturer = RoutedExpertsCapturer


def recorded_experts() -> RecordedExperts | None:
    """Return the recorder of the last started SGLang."""
    found = get_global_experts_capturer()
    return found if isinstance(found, RecordedExperts) else None
