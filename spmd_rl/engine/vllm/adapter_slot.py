"""`AdapterSlot`: the only adapter in vLLM, replaced in place at each publish, over frozen weights.

vLLM reads it from a peft directory in memory, as it documents.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine

from spmd_rl.engine.given_adapters import GivenAdapters
from spmd_rl.engine.vllm.start import model_of
from spmd_rl.model.lora import PREFIX, A, B

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `max_lora_rank` that vLLM accepts"""
MEMORY = Path("/dev/shm")


def engine_args(rank: int) -> dict[str, object]:
    """Return vLLM's arguments for one adapter of this rank."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": min(n for n in RANKS if n >= rank),
    }


class AdapterSlot(GivenAdapters):
    """Adapter of this process's vLLM engine."""

    def __init__(self, llm: LLMEngine) -> None:
        super().__init__()
        self._llm = llm
        self._folder = tempfile.TemporaryDirectory(prefix="spmd_rl-adapter-", dir=MEMORY if MEMORY.is_dir() else None)
        self.request = LoRARequest("policy", 1, self._folder.name)

    def put(self) -> list[str]:
        """Replace the adapter, see `GivenAdapters`."""
        if fault := self.fault():
            return [fault]
        folder = Path(self._folder.name)
        save_file(self.given, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(self.config), encoding="utf-8")
        taken = self._llm.add_lora(LoRARequest("policy", 1, self._folder.name, load_inplace=True))
        return [] if taken else ["vLLM did not take the adapter"]

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors that the engine computes with."""
        model = model_of(self._llm)
        packed = getattr(model, "packed_modules_mapping", {})
        for name, module in model.named_modules():
            stacked = getattr(module, "lora_a_stacked", ())
            stem, _, kind = name.rpartition(".")
            parts = packed.get(kind, [kind])
            for part, a, b in zip(parts, stacked, getattr(module, "lora_b_stacked", ()), strict=False):
                key = f"{PREFIX}{stem}.{part}"
                if key + A in self.given:
                    rank = self.given[key + A].shape[0]
                    yield key + A, a[0, 0, :rank]
                    yield key + B, b[0, 0, :, :rank]
                elif bool(torch.count_nonzero(b)):
                    # Nonzero although never published: yielded so that the comparison fails.
                    yield key + B, b[0, 0]

    def close(self) -> None:
        """Remove the adapter's directory; idempotent."""
        self._folder.cleanup()
