"""`DeepSpeedModel`: a module of transformers whose state ZeRO shares out; or frozen, and forward-only.

Under stage 3 a parameter is gathered for the module that computes with it; under 1 and 2 each rank has all weights.
"""

from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from spmd_rl.batch import Batch
from spmd_rl.config.sections.models import RoleConfig
from spmd_rl.devices import to_device
from spmd_rl.distributed import Layout
from spmd_rl.model.logprobs import TokenHead, logit_factor
from spmd_rl.model.size import ModelSize
from spmd_rl.model.stored import stored_parts
from spmd_rl.model.value_head import with_value_head
from spmd_rl.train.accumulate import Critic, Policy, alone, walk
from spmd_rl.train.base import ForwardArgs, Metrics, MicrobatchLoop
from spmd_rl.train.deepspeed.optimizer import MOMENTS, GatedAdamW
from spmd_rl.train.deepspeed.partition import Partition, boxes
from spmd_rl.train.deepspeed.start import DataParallel, meeting_in, settings, start
from spmd_rl.train.dither import dither
from spmd_rl.train.pipeline import Step
from spmd_rl.train.recompute import recompute
from spmd_rl.train.row import aim, filled_up, row_of
from spmd_rl.train.state import MODEL, OPTIMIZER, Shard, shards_of
from spmd_rl.train.stored_model import Source, materialize


class DeepSpeedModel:
    """See `train.base.ShardedModel`."""

    def __init__(self, module: nn.Module, layout: Layout, role: RoleConfig) -> None:
        """[all] Take over `module`, whole and on the CPU: float32 where it is trained, else in the compute dtype."""
        self._layout, self._world, self._role = layout, layout.world, role
        self._dtype, self._device = getattr(torch, role.dtype), layout.world.device
        config = module.config.get_text_config()
        self._parts, self.hidden_size, self.size = stored_parts(module), config.hidden_size, ModelSize.of(module)
        if role.name != "critic":
            module.set_output_embeddings(TokenHead(module.get_output_embeddings(), logit_factor(config)))
        self.module, self._optimizer = module, None
        self._shapes = {name: p.shape for name, p in module.named_parameters()}
        group = layout.mesh.get_group("fsdp")
        self._deepspeed, own, train = start(layout.world), role.optimizer, role.train
        masters: dict[str, Tensor] = {}
        if own is None:
            module.requires_grad_(False)
        else:
            recompute(module, train.activation_checkpointing)
            if own.dither:
                dither(module, self._dtype)
            masters = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
            self._optimizer = GatedAdamW([p for p in module.parameters() if p.requires_grad], own)
        for p in module.parameters():
            p.data = p.data.to(self._dtype)
        self._engine = module
        if own is not None or train.stage == 3:
            with self._world.collective(f"{role.name}: DeepSpeed"), meeting_in(self._deepspeed, group):
                self._engine, *_ = self._deepspeed.initialize(  # [all]
                    model=module,
                    optimizer=self._optimizer,
                    config=settings(train, self._dtype, on_device=self._device.type != "cpu"),
                    mpu=DataParallel(group),
                    dist_init_required=False,
                )
        module.to(self._device)
        self._partition = None if own is None else Partition(self._deepspeed.utils, self._engine, module, group)
        self._steps = torch.zeros(())
        if own is not None:
            self._optimizer.begin(self._partition.flats)
            self._partition.fill(masters)

    def run(self, loop: MicrobatchLoop) -> None:
        """See `ShardedModel`."""
        losses: list[Tensor] = []

        def forward(step: Step) -> None:
            if loop.is_trained:
                self._engine.set_gradient_accumulation_boundary(step.microbatch == loop.count - 1)
            micro = loop.select(step.microbatch)
            losses[:] = [loop.finish(step.microbatch, micro, self._outputs(micro, loop.args))]

        def backward(step: Step) -> None:
            self._engine.backward(losses.pop() * self._world.size)  # which divides by it

        walk(loop, self._layout, alone(loop), forward, backward)

    def _outputs(self, micro: Batch, args: ForwardArgs) -> tuple[Tensor, ...]:
        """[all] See `MicrobatchLoop.finish`."""
        row, head = row_of(micro, self._device, self._dtype), self.module.get_output_embeddings()
        if self._role.name == "critic":
            head.gives_fingerprint = args.is_fingerprint
        else:
            aim(head, micro, row, args.temperature, self._device)
        tokens = {"input_ids": row.token_ids[None], "position_ids": row.position_ids[None]}
        found = self._engine(
            **{name: to_device(ids, self._device) for name, ids in tokens.items()},
            packing=row.packing,
            use_cache=False,
            logits_to_keep=to_device(filled_up(row.keep), self._device),
        ).logits[0, : len(row.keep)]
        return (found[:, 0].float(),) if self._role.name == "critic" else found.unbind(-1)

    def grad_square(self) -> float:
        """See `ShardedModel`."""
        found = self._partition.gradients()
        return float(torch.stack(torch._foreach_norm(found)).double().square().sum()) if found else 0.0

    def step(self, lr: float, norm: float | None) -> None:
        """See `ShardedModel`."""
        most = self._role.optimizer.max_grad_norm
        self._optimizer.open(lr, None if norm is None else min(1.0, most / max(norm, most)))
        self._engine.step()  # [all]
        self._steps += norm is not None

    def metrics(self) -> Metrics:
        """See `ShardedModel`."""
        return {}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `ShardedModel`."""
        for name, p in self.module.named_parameters():
            with ExitStack() as stack:
                if hasattr(p, "ds_id"):
                    with self._world.collective("weights: gather"):  # [all]
                        stack.enter_context(self._deepspeed.zero.GatheredParameters([p]))  # [all]
                self._world.progress()
                yield from ((part.name, part.of(p.detach())) for part in self._parts[name])
        for name, buffer in self.module.named_buffers():
            yield from ((part.name, part.of(buffer)) for part in self._parts.get(name, ()))

    def state(self) -> list[Shard]:
        """See `ShardedModel`."""
        if self._partition is None:
            return []
        found = [Shard(f"{OPTIMIZER}step", (), (), self._steps, self._world.rank == 0)]
        prefixes = {MODEL: ""} | {f"{OPTIMIZER}{moment}/": moment for moment in MOMENTS}
        for name, own in self._partition.held.items():
            for prefix, moment in prefixes.items():
                tensor, begin = self._partition.tensor(name, moment), own.start
                regions = list(boxes(self._shapes[name], own.start, own.stop))
                if not regions:
                    found += shards_of(prefix, None, (), self._parts[name], False)
                for region in regions:
                    sizes = [part.stop - part.start for part in region]
                    end = begin + torch.Size(sizes).numel()
                    piece = tensor[begin - own.start : end - own.start].view(sizes)
                    found += shards_of(prefix, piece, region, self._parts[name], True)
                    begin = end
        return found

    def on_state_loaded(self) -> None:
        """See `ShardedModel`."""
        if self._partition is not None:
            for kept in self._optimizer.state.values():
                kept["step"].copy_(self._steps)
            self._partition.refresh()  # [all]

    def wake(self) -> None:
        """See `ShardedModel`: what leaves the device is DeepSpeed's to say."""

    def sleep(self) -> None:
        """See `ShardedModel`."""

    def close(self) -> None:
        """See `ShardedModel`."""
        if self._engine is not self.module:
            self._engine.destroy()
        self._engine = self.module = nn.Module()
        self._partition = self._optimizer = None


def role_of(module: nn.Module, layout: Layout, role: RoleConfig) -> Policy | Critic:
    """[all] The role of a whole model; a critic's is one `with_value_head`."""
    return (Critic if role.name == "critic" else Policy)(DeepSpeedModel(module, layout, role), layout, role)


def build(role: RoleConfig, layout: Layout, source: Source) -> Policy | Critic:
    """[all] See `Backend.build`."""
    held = getattr(torch, role.dtype if role.optimizer is None else "float32")
    module, load, num_bytes = source(role.model, held, role.trust_remote_code, layout.world.progress)
    if load is not None:
        materialize(module, torch.device("cpu"))
        module.tie_weights()  # which that undoes
        load(module)
    if role.name == "critic":
        with_value_head(module)
    built = role_of(module, layout, role)
    layout.world.journal.note("loaded", role=role.name, bytes=num_bytes())
    return built
