"""Shim for Megatron-core on CPUs, since it uses CUDA devices unconditionally.

    with on_cpu(world.device): ...Megatron's code...

Inside, tensors for `cuda` are on the CPU, as are streams and random states. On a device the shim does nothing.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class _NoStream:
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


class _Messages:
    """Messages between pipeline stages, sent without waiting for the receiver, as on devices."""

    # Gloo's sends block, so an interleaved schedule, whose stages pair sends and receives differently, would deadlock.
    # Each direction has its tag: with two stages both are between the same ranks.

    def __init__(self) -> None:
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []

    def exchange(
        self,
        *,
        tensor_send_prev: torch.Tensor | None,
        tensor_recv_prev: torch.Tensor | None,
        tensor_send_next: torch.Tensor | None,
        tensor_recv_next: torch.Tensor | None,
        group: dist.ProcessGroup,
        prev_pipeline_rank: int,
        next_pipeline_rank: int,
    ) -> list[dist.Work]:
        """Replace Megatron's exchange; return works to wait for."""
        sent = (tensor_send_prev, prev_pipeline_rank, 0), (tensor_send_next, next_pipeline_rank, 1)
        for tensor, rank, tag in sent:
            if tensor is not None:
                # The schedule frees a tensor's data after it was sent.
                copy = tensor.detach().clone()
                self._sent.append((dist.isend(copy, rank, group, tag), copy))
        received = (tensor_recv_prev, prev_pipeline_rank, 1), (tensor_recv_next, next_pipeline_rank, 0)
        return [dist.irecv(tensor, rank, group, tag) for tensor, rank, tag in received if tensor is not None]

    def shapes(self, communicator: Any, send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool) -> tuple:
        """Replace a communicator's method; return the previous and next stage's shapes."""
        own = [None if tensor is None else torch.tensor(tensor.shape) for tensor in (send_prev, send_next)]
        found = [torch.zeros(3, dtype=torch.int64) if wanted else None for wanted in (recv_prev, recv_next)]
        for request in self.exchange(
            tensor_send_prev=own[0],
            tensor_recv_prev=found[0],
            tensor_send_next=own[1],
            tensor_recv_next=found[1],
            group=communicator.pp_group,
            prev_pipeline_rank=communicator.prev_rank,
            next_pipeline_rank=communicator.next_rank,
        ):
            request.wait()
        return tuple([0, 0, 0] if shape is None else shape.tolist() for shape in found)

    def end(self) -> None:
        """Wait until all messages have been received."""
        for request, _ in self._sent:
            request.wait()


class _OnCPU(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        device = (kwargs or {}).get("device")
        if device is not None and not isinstance(device, int) and torch.device(device).type == "cuda":
            kwargs = {**kwargs, "device": "cpu"}
        found = func(*args, **(kwargs or {}))
        # Megatron compares dtypes by these names.
        if func is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.", 1)
        return found


@contextmanager
def on_cpu(device: torch.device) -> Iterator[None]:
    """Let Megatron's code run on a CPU inside."""
    if device.type != "cpu":
        yield
        return
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    messages = _Messages()
    states = {"_get_cuda_rng_state": _REPLACED["get_rng_state"], "_set_cuda_rng_state": _REPLACED["set_rng_state"]}
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **_REPLACED))
        stack.enter_context(patch.multiple(random, **states))
        stack.enter_context(patch.multiple(moe_utils, te_general_gemm=None, create=True))
        stack.enter_context(patch.multiple(token_dispatcher, maybe_move_tensor_to_cpu=_as_numpy))
        stack.enter_context(patch.multiple(p2p_communication, _batched_p2p_ops=messages.exchange))
        # A function, not a bound method, so that the communicator comes as its first argument.
        shapes = lambda *args: messages.shapes(*args)  # noqa: E731
        stack.enter_context(patch.object(p2p_communication.P2PCommunicator, "_communicate_shapes", shapes))
        stack.enter_context(_OnCPU())
        yield
        messages.end()


def _as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
