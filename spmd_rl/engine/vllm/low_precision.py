"""Matrices of layers that vLLM holds and computes with in INT8 or FP8, and the proof that it does.

Kernels keep such a matrix in layouts of their own, so its bytes are compared with nothing. What each layer computes of
a fixed input is compared instead with what the numbers that were handed over give.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel

from spmd_rl.model.low_precision import SCALE, W8A8

COLUMNS = 64
"""Inputs that are not 0 in a row of the fixed input: so few that a sum shows each number that is another."""


def engine_args(form: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Further arguments of vLLM's, with which it expects what `model.low_precision.by_rows` hands over."""
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


def keep_scales(model: nn.Module) -> None:
    """Let INT8 kernels on the CPU keep the factors of their rows: they compute with them by their address.

    vLLM frees them at the end of a reload, and would compute with whatever comes to lie there, in silence.
    """
    for module in model.modules():
        kernel = getattr(getattr(module, "scheme", None), "kernel", None)
        if isinstance(kernel, CPUInt8ScaledMMLinearKernel):
            kernel.process_weights_after_loading = _Kept(kernel)


class _Kept:
    """A kernel's `process_weights_after_loading` that keeps what the packed matrix refers to."""

    def __init__(self, kernel: CPUInt8ScaledMMLinearKernel) -> None:
        self._process = kernel.process_weights_after_loading
        self._scale: Tensor | None = None

    def __call__(self, layer: nn.Module) -> None:
        self._process(layer)
        self._scale = layer.weight_scale


class Outputs:
    """What each matrix in 8 bits gives for a fixed input: noted as it passes, then asked of vLLM.

    The input are numbers that 8 bits hold, so that a kernel rounds none of them: each row of it has `COLUMNS` of them.
    """

    def __init__(self, form: str, dtype: torch.dtype) -> None:
        """dtype: in which layers hand on what they compute."""
        (self._held, self._largest), self._dtype = W8A8[form], dtype
        self._wanted: dict[str, tuple[Tensor, Tensor]] = {}

    def noted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The weights; each matrix comes before the factors of its rows."""
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
        """The matrices with which vLLM does not compute what was noted."""
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
                # one rounding of what is handed on; sums of FP8 need not be those of float32
                slack = torch.finfo(self._dtype).eps * sums.abs() + 2**-13 * sizes * (self._held != torch.int8)
                if not ((own - sums).abs() <= slack).all():
                    found.append(f"the engine computes with another {part} than it was given")
        return found + [f"the engine does not hold {name} in 8 bits" for name in self._wanted]

    def _numbers(self, columns: int, device: torch.device) -> Tensor:
        """What each column is multiplied by: the largest number, with a sign."""
        return self._largest * (1 - 2 * (torch.arange(columns, device=device) * 7 // 5 % 2))

    def _input(self, columns: int, device: torch.device) -> Tensor:
        """[rows, columns]: `_numbers`, a row for each `COLUMNS` of them."""
        rows = nn.functional.one_hot(torch.arange(columns, device=device) // COLUMNS).t()
        return (rows * self._numbers(columns, device)).to(self._dtype).contiguous()
