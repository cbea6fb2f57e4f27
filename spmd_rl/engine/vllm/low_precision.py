"""Layer matrices in INT8 or FP8 in vLLM, and the check that it computes with them.

Kernels store them in other layouts, so instead of bytes each layer's output for a fixed input is compared.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm import _custom_ops as ops
from vllm.model_executor.kernels.linear import _POSSIBLE_INT8_KERNELS
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.platforms.interface import PlatformEnum
from vllm.utils.torch_utils import set_default_torch_dtype

from spmd_rl.base.errors import UserError
from spmd_rl.model.low_precision import SCALE, W8A8

# So few nonzero columns per row of the test input that one wrong weight changes a sum visibly.
COLUMNS = 64


def engine_args(form: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's arguments for the format of `low_precision.by_rows`."""
    kind = form.removeprefix("w8a8_").rstrip("8").replace("fp", "float")
    numbers = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": numbers | {"strategy": "channel", "dynamic": False},
        "input_activations": numbers | {"strategy": "token", "dynamic": True},
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"layers": group},
    }
    return {**args, "hf_overrides": {**args.get("hf_overrides", {}), "quantization_config": config}}


def check_int8() -> None:
    """Raise UserError on a CPU without VNNI, where oneDNN's INT8 sums of two products saturate."""
    # oneDNN reads the factors by their address: they must outlive the product.
    largest, ones = torch.full((64, 64), 127, dtype=torch.int8), torch.ones(64, 1)
    packed = ops.create_onednn_scaled_mm(largest.t(), ones, torch.float32, True, False, 32)
    given, factors, _ = ops.onednn_scaled_int8_quant(largest.float(), None, None, True)
    sums = torch.empty(64, 64)
    ops.onednn_scaled_mm(packed, given, sums, factors, None, None, None)
    if not (sums == 64 * 127 * 127).all():
        raise UserError(
            "engine.quantization: w8a8_int8 gives wrong sums on this CPU, which has no VNNI instructions; "
            "use w8a8_fp8, or int8, which rounds the weights alike and computes in policy.dtype"
        )


class Int8Kernel(CPUInt8ScaledMMLinearKernel):
    """vLLM's INT8 kernel on the CPU, extended to float32 outputs and reloads."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack a layer's weights for its dtype, and keep its rows' factors."""
        # vLLM takes the default dtype for the layer's, and a reload does not set it.
        with set_default_torch_dtype(layer.params_dtype):
            # The AMX kernel supports only bfloat16 and float16.
            if layer.params_dtype == torch.float32:
                self.linear_method = self._apply_weights_onednn
                self.process_weights_for_onednn(layer)
            else:
                super().process_weights_after_loading(layer)
        # vLLM frees the factors at the end of a reload, and oneDNN computes with them by their address
        self._scale = layer.weight_scale


# In the place of vLLM's list, which also has a kernel of AMD's that rounds the factors to bfloat16.
_POSSIBLE_INT8_KERNELS[PlatformEnum.CPU] = [Int8Kernel]


class Outputs:
    """Output of each 8-bit matrix for a fixed input: recorded on publish, then compared with vLLM's.

    Inputs fit 8 bits, so that no kernel rounds them.
    """

    def __init__(self, form: str, dtype: torch.dtype) -> None:
        (self._held, self._largest), self._dtype = W8A8[form], dtype
        self._wanted: dict[str, tuple[Tensor, Tensor]] = {}
        """Expected output of each layer's matrices, and the sum of its terms' sizes, which bounds the rounding"""

    def noted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights and record outputs; a matrix comes before its factors."""
        self._wanted.clear()
        of_matrix: dict[str, Tensor] = {}
        for name, tensor in weights:
            if tensor.dtype == self._held:
                of_matrix[name + SCALE] = tensor
            elif name in of_matrix:
                values = of_matrix.pop(name).float()
                terms = values * self._numbers(values.shape[1], values.device)
                terms = nn.functional.pad(terms, (0, -values.shape[1] % COLUMNS)).unflatten(1, (-1, COLUMNS))
                of_rows = (terms.sum(2) * tensor).t(), (terms.abs().sum(2) * tensor).t()
                self._wanted[name.removesuffix(".weight" + SCALE)] = of_rows
            yield name, tensor

    def faults(self, model: nn.Module) -> list[str]:
        """Return matrices whose outputs in vLLM differ from the recorded ones."""
        found = []
        fusions = getattr(model, "packed_modules_mapping", {})
        for name, module in model.named_modules():
            stem, _, kind = name.rpartition(".")
            parts = [f"{stem}.{part}" for part in fusions.get(kind, [kind])]
            if getattr(module, "scheme", None) is None or parts[0] not in self._wanted:
                continue
            wanted = {part: self._wanted.pop(part) for part in parts}
            given = self._input(module.input_size, wanted[parts[0]][0].device)
            computed = module.quant_method.apply(module, given).float()
            of_parts = computed.split([sums.shape[1] for sums, _ in wanted.values()], 1)
            for (part, (sums, sizes)), own in zip(wanted.items(), of_parts, strict=True):
                # Allowed: one rounding of the output to its dtype, and the inexact sums of FP8 kernels.
                slack = torch.finfo(self._dtype).eps * sums.abs() + 2**-13 * sizes * (self._held != torch.int8)
                if not ((own - sums).abs() <= slack).all():
                    found.append(f"the engine computes with another {part} than it was given")
        return found + [f"the engine does not hold {name} in 8 bits" for name in self._wanted]

    def _numbers(self, columns: int, device: torch.device) -> Tensor:
        return self._largest * (1 - 2 * (torch.arange(columns, device=device) * 7 // 5 % 2))

    def _input(self, columns: int, device: torch.device) -> Tensor:
        rows = nn.functional.one_hot(torch.arange(columns, device=device) // COLUMNS).t()
        return (rows * self._numbers(columns, device)).to(self._dtype).contiguous()
