"""`Pipeline`: this rank's stage, and the messages between stages.

Hidden states go down, gradients up; with several chunks, from the last stage on to the first's next chunk. A block's
ranks hold the same batch, so each knows all shapes. Each direction, and the wrap-around, has a process group, which
keeps messages in order; sends do not block, so stages cannot deadlock.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmd_rl.distributed import Layout, shared_group
from spmd_rl.train.fsdp2.stages import Held, cut
from spmd_rl.train.pipeline import Step, forward_only, one_forward_one_backward


class Pipeline:
    """One stage, without messages if `pp` is 1."""

    def __init__(self, model: nn.Module, layout: Layout, dtype: torch.dtype, vpp: int = 1) -> None:
        """[all] Reduce `model`, in place, to this stage's `vpp` chunks. dtype: of hidden states. UserError: see
        `cut`."""
        self.held: dict[str, Held]
        self.held, self._chunks = cut(model, layout, vpp)
        self.stage, self.num_stages = layout.rank("pp"), layout.size("pp")
        self.has_end = self.stage == self.num_stages - 1
        """True if the model's output is on this rank"""
        self.elsewhere = [name for name, held in self.held.items() if self.stage not in held.stages]
        """Names of parameters on other stages"""
        self._layout, self._dtype, self._vpp = layout, dtype, vpp
        self._width = model.config.get_text_config().hidden_size
        self._received: Tensor | None = None
        self._in_flight: list[list[tuple[Tensor | None, Tensor]]] = [[] for _ in range(vpp)]
        self._sends: list[tuple[dist.Work, Tensor]] = []
        self._groups: dict[tuple[str, bool], dist.ProcessGroup | None] = {}
        self._tied_group = None
        if self.num_stages > 1:
            world, line = layout.world, layout.ranks("pp")
            # Groups of ranks on one machine are formed over shared memory, in which nothing is sent to one rank alone.
            backend = "gloo" if world.device.type == "cpu" and dist.get_backend() == shared_group.NAME else None
            for way, goes_around in product(("down", "up"), (False, True)[:vpp]):
                name = f"pp {way} around" if goes_around else f"pp {way}"
                self._groups[way, goes_around] = world.process_group(name, backend, line)  # [all]
            if self._tied() and (self.stage == 0 or self.has_end):
                self._tied_group = world.process_group("pp tied", ranks=[line[0], line[-1]])  # [the two]

    def steps(self, count: int, is_trained: bool) -> Iterator[Step]:
        """Yield this stage's steps over `count` micro-batches."""
        if not is_trained:
            return forward_only(self.num_stages, count, self._vpp)
        return one_forward_one_backward(self.stage, self.num_stages, count, self._vpp)

    def begin(self, step: Step) -> None:
        """Set the step, hence the chunk of calls until the next `begin`."""
        self._chunks.current, self._received = step.chunk, None

    @property
    def is_first(self) -> bool:
        """True if the chunk begins with the input embedding."""
        return self.stage == 0 and self._chunks.current == 0

    @property
    def is_last(self) -> bool:
        """True if the chunk ends with the model's output."""
        return self.has_end and self._chunks.current == self._vpp - 1

    def receive(self, num_tokens: int) -> Tensor:
        """[stage] Return the next micro-batch's hidden states from the previous chunk: [1, num_tokens, hidden]."""
        hidden = torch.empty(1, num_tokens, self._width, dtype=self._dtype, device=self._layout.world.device)
        self._receive(hidden, "down")
        # A leaf of this stage's graph, whose gradient goes back to the previous chunk.
        self._received = hidden.requires_grad_(torch.is_grad_enabled())
        return self._received

    def forwarded(self, output: Tensor) -> None:
        """[stage] Take a forward's output: the loss in the last chunk, else hidden states to send."""
        if torch.is_grad_enabled():
            self._in_flight[self._chunks.current].append((self._received, output))
        if not self.is_last:
            assert output.dtype == self._dtype and output.shape[2:] == (self._width,), "no hidden states"
            self._send(output.detach(), "down")

    def backward(self) -> None:
        """[stage] Run backward for the chunk's oldest micro-batch in flight."""
        received, output = self._in_flight[self._chunks.current].pop(0)
        gradient = None
        if not self.is_last:
            gradient = torch.empty_like(output)
            self._receive(gradient, "up")
        # No gradient if all layers before are frozen.
        if output.requires_grad:
            output.backward(gradient)
        if received is not None:
            self._send(received.grad, "up")

    def finish(self) -> None:
        """[stage] Wait for all sends; nothing may be in flight."""
        assert not any(self._in_flight)
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    def _receive(self, tensor: Tensor, way: str) -> None:
        source = self.stage + (-1 if way == "down" else 1)
        group = self._groups[way, not 0 <= source < self.num_stages]
        dist.recv(tensor, group=group, group_src=source % self.num_stages)

    def _send(self, tensor: Tensor, way: str) -> None:
        # A sent tensor must stay alive until the send is complete.
        self._sends = [(work, sent) for work, sent in self._sends if not work.is_completed()]
        tensor, target = tensor.contiguous(), self.stage + (1 if way == "down" else -1)
        group = self._groups[way, not 0 <= target < self.num_stages]
        self._sends.append((dist.isend(tensor, group=group, group_dst=target % self.num_stages), tensor))

    def of_owners(
        self, own: Iterable[tuple[str, Tensor]], dtype: torch.dtype, trained_alone: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """[all] Yield every parameter of the model by name, in order, from the first stage that holds it; valid until
        the next.

        own: this stage's, whole, in order, of `dtype`. trained_alone: without frozen ones.
        """
        if self.num_stages == 1:
            yield from own
            return
        mine = iter(own)
        for name, held in self.held.items():
            if trained_alone and not held.is_trained:
                continue
            if self.stage in held.stages:
                found, tensor = next(mine)
                assert found == name, (found, name)
            else:
                tensor = torch.empty(held.shape, dtype=dtype, device=self._layout.world.device)
            if len(held.stages) < self.num_stages:
                with self._layout.world.collective("weights: from their stage", "copy", written=False):
                    tensor = self._of(tensor, held.stages[0])  # [all]
            yield name, tensor

    def _of(self, tensor: Tensor, stage: int) -> Tensor:
        tensor = tensor.to(self._layout.world.device).contiguous()
        dist.broadcast(tensor, group=self._layout.group("pp"), group_src=stage)  # [all] of the line
        return tensor

    def _tied(self) -> set[str]:
        return {name for name, held in self.held.items() if len(held.stages) > 1}

    def counts_here(self, name: str) -> bool:
        """Return True if a parameter counts on this stage in sums over stages."""
        return self.held[name].stages[0] == self.stage

    def sum_tied(self, gradients: Mapping[str, Tensor]) -> None:
        """[all] Sum the gradient of a weight on two stages over both, in place."""
        # Both stages must run these collectives in the same order.
        for name in sorted(self._tied() & gradients.keys()):
            dist.all_reduce(gradients[name], group=self._tied_group)
