"""What Megatron-core needs on ranks without CUDA: it asks for a CUDA device in many places, whatever it runs on.

    with on_cpu(world.device): ...Megatron's code...

Inside, on a CPU and nowhere else, tensors that it asks for on `cuda` are on the CPU, and streams and random states of
devices are those of the CPU. On a device it does nothing at all, so that no run on one depends on it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode


class _NoStream:
    """In place of a stream of a device, and of its events."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


_REPLACED = {
    "current_device": lambda: torch.device("cpu"),
    "set_device": lambda *_: None,
    "synchronize": lambda *_: None,
    "get_rng_state": lambda *_, **__: torch.default_generator.get_state(),
    "set_rng_state": lambda state, *_, **__: torch.default_generator.set_state(state),
    "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    "Stream": lambda *_, **__: _NoStream(),
    "current_stream": lambda *_: _NoStream(),
    "stream": lambda *_: nullcontext(),
}
"""Of `torch.cuda`"""


class _OnCPU(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        device = (kwargs or {}).get("device")
        if device is not None and not isinstance(device, int) and torch.device(device).type == "cuda":
            kwargs = {**kwargs, "device": "cpu"}
        found = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(found, str):  # it tells dtypes apart by such names
            return found.replace("torch.", "torch.cuda.", 1)
        return found


@contextmanager
def on_cpu(device: torch.device) -> Iterator[None]:
    """Let Megatron's code run inside, if `device` is a CPU; else do nothing."""
    if device.type != "cpu":
        yield
        return
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    states = {"_get_cuda_rng_state": _REPLACED["get_rng_state"], "_set_cuda_rng_state": _REPLACED["set_rng_state"]}
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **_REPLACED))
        stack.enter_context(patch.multiple(random, **states))
        stack.enter_context(patch.multiple(moe_utils, te_general_gemm=None, create=True))
        stack.enter_context(patch.multiple(token_dispatcher, maybe_move_tensor_to_cpu=_as_numpy))
        stack.enter_context(_OnCPU())
        yield


def _as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
