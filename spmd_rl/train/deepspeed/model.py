"""`DeepSpeedModel`: a transformers module sharded by ZeRO; or frozen and forward-only.

Stage 3 gathers each parameter for the module that uses it; under 1 and 2 each rank has all weights.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from spmd_rl.base.devices import kind, to_device
from spmd_rl.batch import Batch
from spmd_rl.config.sections.models import RoleConfig, TrainedModelConfig
from spmd_rl.distributed import Layout
from spmd_rl.model.hybrid import stateful_layers
from spmd_rl.model.load import Fill
from spmd_rl.model.logprobs import TokenHead, logit_factor
from spmd_rl.model.size import ModelSize
from spmd_rl.model.stored import stored_parts
from spmd_rl.train.accumulate import Critic, Policy, alone, walk
from spmd_rl.train.adapters import Adapters
from spmd_rl.train.base import ForwardArgs, Metrics, MicrobatchLoop
from spmd_rl.train.deepspeed.partition import Partition, pieces, spread, weights_here, whole
from spmd_rl.train.deepspeed.start import DataParallel, meeting_in, settings, start
from spmd_rl.train.dither import dither_region
from spmd_rl.train.pipeline import Step
from spmd_rl.train.recompute import recompute
from spmd_rl.train.row import aim, filled_up, parts, row_of
from spmd_rl.train.state import MODEL, OPTIMIZER, Shard, shards_of
from spmd_rl.train.stored_model import Source

MOMENTS = ("exp_avg", "exp_avg_sq")


class GatedAdamW(AdamW):
    """AdamW over the flat float32 shards with which DeepSpeed replaces parameters; a step has no effect without
    `open`."""

    # DeepSpeed computes norm, clips and steps in one call, and masks a norm that is not finite. Here it only supplies
    # gradients.

    def __init__(self, parameters: Iterable[Tensor], own: TrainedModelConfig) -> None:
        betas = own.betas[0], own.betas[1]
        super().__init__(parameters, lr=own.lr, betas=betas, eps=own.eps, weight_decay=own.weight_decay, fused=True)
        self._scale: float | None = None

    def begin(self, shards: Iterable[Tensor]) -> None:
        """Create the flat shards' state before the first step, for loading a checkpoint."""
        for shard in shards:
            zeros = {name: torch.zeros_like(shard, requires_grad=False) for name in MOMENTS}
            self.state[shard] = {"step": torch.zeros((), device=shard.device), **zeros}

    def open(self, lr: float, scale: float | None) -> None:
        """Let DeepSpeed's next call update at this rate with gradients times `scale`; None: not at all."""
        self._scale = scale
        for group in self.param_groups:
            group["lr"] = lr

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the shards; DeepSpeed calls this once, or for some shards at a time."""
        if self._scale is None:
            return
        if self._scale < 1:
            torch._foreach_mul_([p.grad for group in self.param_groups for p in group["params"]], self._scale)
        super().step(closure)


class DeepSpeedModel:
    """A `train.base.ShardedModel` on DeepSpeed's ZeRO."""

    def __init__(self, module: nn.Module, layout: Layout, role: RoleConfig, read: Fill | None = None) -> None:
        """[all] Take over `module`: whole, float32 where trained; or on the meta device, with weights to `read`."""
        self._layout, self._world, self._role = layout, layout.world, role
        self._dtype, self._device = getattr(torch, role.dtype), layout.world.device
        config, own, train = module.config.get_text_config(), role.optimizer, role.train
        stored, fill = stored_parts(module), read or whole(module)
        self.hidden_size, self.size = config.hidden_size, ModelSize.of(module)
        self._is_hybrid = bool(stateful_layers(module))
        if role.name != "critic":
            module.set_output_embeddings(TokenHead(module.get_output_embeddings(), logit_factor(config)))
        if own is None:
            module.requires_grad_(False)
        head = module.get_output_embeddings() if role.name == "critic" else None
        self._adapters = Adapters(module, role.lora, layout.key, head)
        if own is not None:
            recompute(module, train.activation_checkpointing)
        self._parts, fill = self._adapters.stored(stored), self._adapters.reading(fill)
        self._shapes = {name: p.shape for name, p in module.named_parameters()}
        self.module, self._engine, self._optimizer, self._partition = module, module, None, None
        self._deepspeed, self._steps, group = start(layout.world), torch.zeros(()), layout.mesh.get_group("fsdp")
        config = settings(train, self._dtype, on_device=kind(self._device) != "cpu")
        with self._world.collective(f"{role.name}: DeepSpeed"), meeting_in(self._deepspeed, group):  # [all]
            spread(module, self._dtype, self._device, self._sharing(config, group))
            if own is not None:
                self._optimizer = GatedAdamW([p for p in module.parameters() if p.requires_grad], own)
            if own is not None or train.stage == 3:
                self._engine, *_ = self._deepspeed.initialize(
                    model=module,
                    optimizer=self._optimizer,
                    config=config,
                    mpu=DataParallel(group, layout.world.process_group("alone", None, [layout.world.rank])),
                    dist_init_required=False,
                )
            module.to(self._device)
        self._fill(fill, group)  # [all]

    def _sharing(self, config: dict[str, Any], group: dist.ProcessGroup) -> Callable[[nn.Parameter], None]:
        if self._role.train.stage < 3:
            return lambda p: None
        init = partial(self._deepspeed.zero.Init, config_dict_or_path=config, data_parallel_group=group)
        return lambda p: init(module=nn.ParameterList([p]), dtype=self._dtype)

    def _fill(self, read: Fill, group: dist.ProcessGroup) -> None:
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if self._optimizer is not None:
            self._partition = Partition(self._deepspeed.utils, self._engine, trained, group)
            # DeepSpeed creates optimizer state in the first step, too late for a checkpoint before it.
            self._optimizer.begin(self._partition.flats)
            for name, own in self._partition.held.items():
                for region, piece in pieces(self._shapes[name], own, self._partition.tensor(name)):
                    read(name, region, piece)
                    if self._role.optimizer.dither:
                        dither_region(piece, name, self._shapes[name], region, self._dtype)
                self._world.progress()
        for name, p in self.module.named_parameters():
            if name not in trained:
                own, flat = weights_here(p, group)
                for region, piece in pieces(self._shapes[name], own, flat):
                    read(name, region, piece)
                self._world.progress()
        for name, buffer in self.module.named_buffers():
            if name in self._parts:
                read(name, tuple(slice(0, size) for size in buffer.shape), buffer)
        if self._partition is not None:
            self._partition.refresh()  # [all]

    def run(self, loop: MicrobatchLoop) -> None:
        """Run all micro-batches, see `ShardedModel`."""
        losses: list[Tensor] = []
        num_steps = int(self._steps)

        def forward(step: Step) -> None:
            if loop.is_trained:
                # The boundary marks the last micro-batch, after which DeepSpeed may step.
                self._engine.set_gradient_accumulation_boundary(step.microbatch == loop.count - 1)
            micro = loop.select(step.microbatch)
            with self._adapters.drawn(num_steps, step.microbatch, self._layout):
                losses[:] = [loop.finish(step.microbatch, micro, self._outputs(micro, loop.args))]

        def backward(step: Step) -> None:
            # DeepSpeed divides the loss by the number of ranks; gradients here are sums.
            self._engine.backward(losses.pop() * self._world.size)

        self._adapters.set_dropout(loop.is_trained)
        with self._adapters.hidden(loop.args.is_base):
            walk(loop, self._layout, alone(loop), forward, backward)

    def _outputs(self, micro: Batch, args: ForwardArgs) -> tuple[Tensor, ...]:
        row, head = row_of(micro, self._device, self._dtype), self.module.get_output_embeddings()
        if self._role.name == "critic":
            head.gives_fingerprint = args.is_fingerprint
        else:
            aim(head, micro, row, args, self._device)
        tokens = {"input_ids": row.token_ids[None], "position_ids": row.position_ids[None]}
        found = self._engine(
            **{name: to_device(ids, self._device) for name, ids in tokens.items()},
            **row.apart(self._is_hybrid),
            use_cache=False,
            logits_to_keep=to_device(filled_up(row.keep), self._device),
        ).logits[0, : len(row.keep)]
        return (found[:, 0].float(),) if self._role.name == "critic" else parts(found, args)

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's gradients, see `ShardedModel`."""
        return self._partition.gradients()

    def step(self, lr: float, norm: float | None) -> None:
        """Clip and update, see `ShardedModel.step`."""
        most = self._role.optimizer.max_grad_norm
        self._optimizer.open(lr, None if norm is None else min(1.0, most / max(norm, most)))
        self._engine.step()  # [all]
        self._steps += norm is not None

    def metrics(self) -> Metrics:
        """Return no metrics, see `ShardedModel`."""
        return {}

    def weights(self, adapters: str = "merged") -> Iterator[tuple[str, Tensor]]:
        """Yield every weight whole. adapters: see `Adapters.published`."""
        for name, tensor in self._adapters.published(self._wholes(adapters == "alone"), adapters):  # [all]
            yield from ((part.name, part.of(tensor)) for part in self._parts[name])
        if adapters == "alone":
            return
        for name, buffer in self.module.named_buffers():
            yield from ((part.name, part.of(buffer)) for part in self._parts.get(name, ()))

    def _wholes(self, trained_alone: bool) -> Iterator[tuple[str, Tensor]]:
        """[all] Yield whole parameters in the compute dtype, each valid until the next."""
        for name, p in self.module.named_parameters():
            if trained_alone and not p.requires_grad:
                continue
            with ExitStack() as stack:
                if hasattr(p, "ds_id"):
                    with self._world.collective("weights: gather", written=False):  # [all]
                        stack.enter_context(self._deepspeed.zero.GatheredParameters([p]))  # [all]
                self._world.progress()
                yield name, p.detach()

    def state(self) -> list[Shard]:
        """Return the live tensors that training changes."""
        if self._partition is None:
            return []
        found = [Shard(f"{OPTIMIZER}step", (), (), self._steps, self._world.rank == 0)]
        found += self._adapters.state(self._world.rank == 0)
        prefixes = {MODEL: ""} | {f"{OPTIMIZER}{moment}/": moment for moment in MOMENTS}
        for name, own in self._partition.held.items():
            for prefix, moment in prefixes.items():
                # Every rank lists every tensor, also those without a part on this rank.
                found += shards_of(prefix, None, (), self._parts[name], False)
                for region, piece in pieces(self._shapes[name], own, self._partition.tensor(name, moment)):
                    found += shards_of(prefix, piece, region, self._parts[name], True)
        return found

    def held(self) -> dict[str, list[Tensor]]:
        """Return live memory, see `PlannedModel`."""
        weights = [getattr(p, "ds_tensor", p) for p in self.module.parameters()]
        if self._partition is None:
            return {"weights": weights}
        moments = [kept for state in self._optimizer.state.values() for kept in state.values()]
        return {"weights": [*weights, *self._partition.flats], "optimizer": moments}

    def on_state_loaded(self) -> None:
        """Refresh what derives from `state`."""
        self._adapters.check_scaling()
        if self._partition is not None:
            for kept in self._optimizer.state.values():
                kept["step"].copy_(self._steps)
            self._partition.refresh()  # [all]

    def wake(self) -> None:
        """Do nothing: DeepSpeed decides about offloading."""

    def sleep(self) -> None:
        """Offload weights and optimizer state, if set."""
        if self._partition is not None:
            self._partition.forget()

    def close(self) -> None:
        """Free device and host memory; idempotent."""
        if self._engine is not self.module:
            self._engine.destroy()
        self._engine = self.module = nn.Module()
        self._partition = self._optimizer = self._adapters = None


def role_of(module: nn.Module, layout: Layout, role: RoleConfig, read: Fill | None = None) -> Policy | Critic:
    """[all] Return a model's role; a critic's is one `with_value_head`."""
    return (Critic if role.name == "critic" else Policy)(DeepSpeedModel(module, layout, role, read), layout, role)


def build(role: RoleConfig, layout: Layout, source: Source) -> Policy | Critic:
    """[all] Build the role on this backend, see `Backend.build`."""
    stored = source(role, getattr(torch, role.held_dtype), layout.world.progress)
    read = stored.reader and stored.reader(stored.model)
    built = role_of(stored.model, layout, role, read)
    layout.world.journal.note("loaded", role=role.name, bytes=stored.num_bytes())
    return built
