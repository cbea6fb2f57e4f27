"""`SglangAdapter`: the only adapter in SGLang, overwritten at each publish, over frozen weights."""

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.lora_registry import LoRARef
from torch import Tensor

from spmd_rl.config.sections.lora import LoraConfig
from spmd_rl.engine.given_adapters import GivenAdapters
from spmd_rl.engine.sglang.guest import unpinned
from spmd_rl.model.lora import PREFIX, A, B

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Linear layers of a decoder layer, the default of `policy.lora.targets`"""


def engine_args(lora: LoraConfig, device_type: str) -> dict[str, object]:
    """Return SGLang's arguments for one adapter."""
    slots = {"enable_lora": True, "max_loras_per_batch": 1, "max_lora_rank": lora.rank}
    # While it sleeps, SGLang keeps no other copy of the weights below the adapters.
    slots["enable_weights_cpu_backup"] = True
    backend = {"lora_backend": "torch_native"} if device_type == "cpu" else {}
    return slots | backend | {"lora_target_modules": lora.targets or TARGETS}


class SglangAdapter(GivenAdapters):
    """Adapter of this process's SGLang engine, at tp=1."""

    def __init__(
        self, manager: LoRAManager, shapes: Mapping[str, torch.Size], fusions: Mapping[str, Sequence[str]]
    ) -> None:
        """shapes: frozen weights by Hugging Face name. fusions: see `plain_weights`."""
        super().__init__()
        self._manager, self._shapes = manager, shapes
        self._fused = {part: (one, parts) for one, parts in fusions.items() for part in parts}
        self.ref = LoRARef(lora_id="policy", lora_name="policy", lora_path="policy", pinned=False)
        """Adapter reference, whose id each request has"""

    def put(self) -> list[str]:
        """Replace the adapter, see `GivenAdapters`."""
        if fault := self.fault():
            return [fault]
        manager = self._manager
        own = {name: tensor.clone() for name, tensor in self.given.items()}
        with unpinned():
            if self.ref.lora_id in manager.loras:
                manager.unload_lora_adapter(self.ref)
            done = manager.load_lora_adapter_from_tensors(self.ref, own, self.config)
            if not done.success:
                return [f"SGLang did not take the adapter: {done.error_message}"]
            # SGLang would load the adapter only with the first request.
            manager.fetch_new_loras({self.ref.lora_id})
        return []

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors that the engine computes with."""
        pool = self._manager.memory_pool
        slot = pool.uid_to_buffer_id[self.ref.lora_id]
        for layer in self.layers:
            stem, _, kind = layer.rpartition(".")
            one, parts = self._fused.get(kind, (kind, [kind]))
            number = int(re.search(r"\.layers\.(\d+)\.", layer)[1])
            a, b = pool.A_buffer[one][number][slot], pool.B_buffer[one][number][slot]
            lines = [self._shapes[f"{stem}.{part}.weight"][0] for part in parts]
            for place, rows in enumerate(b.split(lines)):
                key = f"{PREFIX}{stem}.{parts[place]}"
                if parts[place] == kind:
                    rank = self.given[key + A].shape[0]
                    yield key + A, a[place * rank : (place + 1) * rank]
                    yield key + B, rows[:, :rank]
                elif key + B not in self.given and bool(torch.count_nonzero(rows)):
                    # Nonzero although never published: yielded so that the comparison fails.
                    yield key + B, rows
