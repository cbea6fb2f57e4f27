"""`FSDP2Model`: a module sharded over its layout, with an optimizer; or frozen and forward-only.

Trainable parameters are float32 shards, gathered in the compute dtype layer by layer.
"""

import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spmd_rl.base.devices import kind, to_device
from spmd_rl.batch import Batch
from spmd_rl.config.sections.lora import LoraConfig
from spmd_rl.config.sections.models import TrainConfig, TrainedModelConfig
from spmd_rl.distributed import Layout
from spmd_rl.model.build import materialize
from spmd_rl.model.context import context_of
from spmd_rl.model.differentiable import collect
from spmd_rl.model.hybrid import stateful_layers
from spmd_rl.model.load import Region, local, owned_region
from spmd_rl.model.moe import weights_of_chosen
from spmd_rl.model.size import ModelSize
from spmd_rl.model.stored import is_stacked, of_experts, stored_parts
from spmd_rl.train.accumulate import walk
from spmd_rl.train.adapters import Adapters
from spmd_rl.train.base import ForwardArgs, Metrics, MicrobatchLoop
from spmd_rl.train.dither import dither
from spmd_rl.train.fsdp2 import shard
from spmd_rl.train.fsdp2.deterministic import deterministic
from spmd_rl.train.fsdp2.experts import spread_experts
from spmd_rl.train.fsdp2.gather import Gather
from spmd_rl.train.fsdp2.muon import matrices
from spmd_rl.train.fsdp2.optimizer import Optimizer, counts_once
from spmd_rl.train.fsdp2.pipeline import Pipeline
from spmd_rl.train.fsdp2.routing import Routing
from spmd_rl.train.fsdp2.shard import decoder_layers
from spmd_rl.train.fsdp2.tensor_parallel import parallelize
from spmd_rl.train.offload import Offload
from spmd_rl.train.pipeline import Step
from spmd_rl.train.recompute import recompute
from spmd_rl.train.replay import Replay
from spmd_rl.train.row import Row, filled_up, row_of
from spmd_rl.train.state import MODEL, OPTIMIZER, Shard, shards_of

FIRST, GROWS_AFTER = 2.0**15, 200
"""Initial factor, and good updates before it doubles"""


class LossScale:
    """Factor on the loss that keeps float16 gradients in range (Micikevicius et al., arXiv 1710.03740); equal on all
    ranks.

    An overflow skips its update and halves the factor; many good updates double it. In other dtypes it is 1.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.is_used = dtype == torch.float16
        self.state: Tensor = torch.tensor([FIRST if self.is_used else 1.0, 0.0])
        """float32 [2], live: factor, and good updates since its last change"""

    @property
    def factor(self) -> float:
        """Present factor, a power of two, which rounds nothing."""
        return float(self.state[0])

    def update(self, skipped: bool) -> None:
        """Adapt the factor. skipped: the gradient was not finite."""
        if not self.is_used:
            return
        self.state[1] = 0 if skipped else self.state[1] + 1
        if skipped or self.state[1] == GROWS_AFTER:
            self.state.copy_(torch.tensor([max(1.0, self.factor * (0.5 if skipped else 2.0)), 0.0]))


def watch(replay: Replay, model: nn.Module) -> None:
    """Hook this rank's layers and routers before FSDP shards them."""
    for layer in decoder_layers(model) if replay.places else ():
        layer.register_forward_pre_hook(partial(_before, replay), with_kwargs=True)
    for name, module in model.named_modules():
        if name in replay.places:
            module.register_forward_hook(partial(_replace, replay, replay.places[name]))


def _before(replay: Replay, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    replay.take(kwargs.get("chosen"))


def _replace(
    replay: Replay, place: int, router: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor] | None:
    logits, weights, own = output
    if (found := replay.choose(place, own)) is None:
        return None
    chosen, known = found
    return logits, torch.where(known, weights_of_chosen(router, logits, chosen), weights), chosen


def freeze(model: nn.Module, optimizer: TrainedModelConfig | None) -> None:
    """Freeze a model without optimizer, or a vision tower not to train."""
    if optimizer is None:
        model.requires_grad_(False)
    elif hasattr(model, "tower") and optimizer.freeze_vision_tower:
        for p in model.tower.parameters:
            p.requires_grad_(False)


# Seconds without progress that compiling one shape may take.
COMPILE_SECONDS = 3600.0


class FSDP2Model(ABC):
    """A `train.base.ShardedModel` on FSDP2."""

    size_of = staticmethod(ModelSize.of)
    """Function that counts an unsharded model's weights"""
    trains_head = False
    """True if adapters leave the output embedding trained: a value head starts at 0"""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        train: TrainConfig,
        dtype: torch.dtype,
        optimizer: TrainedModelConfig | None = None,
        load: Callable[[nn.Module], None] | None = None,
    ) -> None:
        """[all] Take over `model`: whole, or on the meta device with `load` to fill this rank's shards.

        dtype: of computation. Trained parameters are float32, frozen ones (all without `optimizer`) of any dtype.
        """
        self._layout, self._world, self._train, self._dtype = layout, layout.world, train, dtype
        self.device = layout.world.device
        parts = stored_parts(model)
        self.hidden_size, self.size = model.config.get_text_config().hidden_size, self.size_of(model)
        self.module, self._is_hybrid = model, bool(stateful_layers(model))
        self._context = None
        if (group := layout.group("cp")) is not None:
            config, tp = model.config.get_text_config(), layout.size("tp")
            heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
            self._context = context_of(group, heads // tp, max(1, (kv_heads or heads) // tp))
        self._tower = getattr(model, "tower", None)
        freeze(model, optimizer)
        head = model.get_output_embeddings() if self.trains_head else None
        self._adapters = Adapters(model, optimizer.lora if optimizer else LoraConfig(), layout.key, head)
        self._parts = self._adapters.stored(parts)
        self._num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        for_muon = matrices(model) if optimizer is not None and optimizer.optimizer == "muon" else {}
        self._replay = Replay(model, layout, getattr(optimizer, "router_replay", False))
        self._pipeline = Pipeline(model, layout, dtype, train.vpp)  # [all]
        recomputed = "none" if optimizer is None else train.activation_checkpointing
        # Gathered weights stay valid until the next update: with enough memory they need no second gather.
        on_device = kind(self.device) != "cpu"
        costly = not on_device or layout.size("pp") > 1
        self._keep_gathered = costly if train.reshard_after_forward is None else not train.reshard_after_forward
        watch(self._replay, model)  # before the load counters, which must see the replayed choices
        self._routing = Routing(model, layout, optimizer) if optimizer is not None else None
        spread_experts(model, layout)  # [all]
        parallelize(model, layout)  # [all]
        # Before sharding, so that FSDP's hooks stay outside of checkpoints and graphs.
        recompute(model, recomputed, train.compile)
        shard.shard(model, layout, dtype, self._keep_gathered)
        if load is not None:
            materialize(model, self.device)
            with self._adapters.hidden():
                load(model)
        self._adapters.initialize()
        if optimizer is not None and optimizer.dither:
            dither(model, dtype)
        self._optimizer, self._loss_scale = None, LossScale(dtype)
        if optimizer is not None:
            self._optimizer = Optimizer(model, optimizer, layout, dtype, self._pipeline, for_muon)
        self._changed, self._gathers = 0.0, dict[bool, Gather]()
        self.offloads = train.offload and on_device
        self._weights = Offload(model.parameters())
        self._moments = Offload(self._optimizer.moments() if self._optimizer else ())
        self.sleep()

    def run(self, loop: MicrobatchLoop) -> None:
        """Run all micro-batches, see `ShardedModel`."""
        stage, scales = self._pipeline, loop.is_trained and self._loss_scale.is_used
        num_steps = self._optimizer.num_steps if loop.is_trained else 0
        if loop.is_trained:
            self._routing.begin(loop.count)

        def forward(step: Step) -> None:
            stage.begin(step)
            micro = loop.select(step.microbatch)
            with self._adapters.drawn(num_steps, step.microbatch, self._layout):
                compute(step, micro)

        def compute(step: Step, micro: Batch) -> None:
            if stage.is_last:
                found = loop.finish(step.microbatch, micro, self.outputs(micro, loop.args))
                stage.forwarded(found * self._loss_scale.factor if scales else found)
            else:
                stage.forwarded(self._run(self.row(micro), 0))

        def backward(step: Step) -> None:
            stage.begin(step)
            # Copies of the model sum once an update.
            shard.sum_over_copies(self.module, now=step.microbatch == loop.count - 1)
            stage.backward()

        self._adapters.set_dropout(loop.is_trained)
        steps = stage.steps(loop.count, loop.is_trained)
        with self._adapters.hidden(loop.args.is_base):
            walk(loop, self._layout, steps, forward, backward, self._around)
        if loop.is_trained or not self._keep_gathered:
            # After training gathered copies are stale; else they would only take memory.
            shard.reshard(self.module)
        with self._world.collective(f"{loop.name}: sends"):  # [all]
            stage.finish()

    @abstractmethod
    def outputs(self, micro: Batch, args: ForwardArgs) -> tuple[Tensor, ...]:
        """[stage] Return the last chunk's outputs, see `MicrobatchLoop.finish`."""

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's gradients, see `ShardedModel`."""
        # Only now: the memory of the micro-batches is free again.
        self._moments.to_device()
        return self._optimizer.counted_grads(1 / self._loss_scale.factor)  # [all]

    def step(self, lr: float, norm: float | None) -> None:
        """Clip and update, see `ShardedModel.step`."""
        self._changed = 0.0
        if norm is not None:
            self._changed = self._optimizer.step(lr, norm)
            self._routing.balance()  # [all]
            self._weights.changed()
            self._moments.changed()
        self._loss_scale.update(skipped=norm is None)
        self._optimizer.zero_grad()
        # The next update's micro-batches may need the memory.
        if self.offloads:
            with self._world.journal.kind("copy"):
                self._moments.to_host()

    def metrics(self) -> Metrics:
        """Return metrics of the last update."""
        found: Metrics = {}
        # Equal on all ranks, so the collective is safe.
        if self._optimizer.rounds:
            changed = self._world.reduce("update: changed weights", {"changed": self._changed}, op="sum")  # [all]
            found["changed_share"] = changed["changed"] / self._num_trained
        if self._loss_scale.is_used:
            found["loss_scale"] = self._loss_scale.factor
        return found | self._routing.metrics() | self._replay.metrics()  # [all]

    def row(self, micro: Batch) -> Row:
        """Return a micro-batch as this rank's row."""
        tp, processor = self._layout.size("tp"), self._tower and self._tower.processor
        return row_of(micro, self.device, self._dtype, tp, self._context, self._replay.of_row, processor)

    def _run(self, row: Row, kept: Tensor | int) -> Tensor:
        """[stage] Run the step's chunk on a row; return its output, at the end for `kept` tokens, [1, n, ..]."""
        device = self.device
        if self._pipeline.is_first:
            tokens = {"input_ids": to_device(row.token_ids[None], device)}
        else:
            tokens = {"inputs_embeds": self._pipeline.receive(len(row.token_ids) // self._layout.size("tp"))}
        positions, routed = to_device(row.position_ids[..., None, :], device), to_device(row.routed, device)
        common = {"position_ids": positions, "routed": routed, "use_cache": False} | row.apart(self._is_hybrid)
        if row.chosen is not None:
            common["chosen"] = to_device(row.chosen, device)
        seen = nullcontext()
        if row.shown is not None:
            common |= {name: to_device(pixels, device) for name, pixels in row.shown.pixels.items()}
            seen = self._tower.showing(to_device(row.shown.index, device))
        with seen:
            return self.module(**tokens, **common, logits_to_keep=kept).logits

    def predictions(self, micro: Batch, row: Row) -> Tensor:
        """[stage] Return the output embedding's results for the loss mask's tokens, [N, ..]; last chunk only.

        Its input is hidden states of `row.keep`, padded by `filled_up`.
        """
        device = self.device
        # The output's projection runs only where a target is predicted.
        found = self._run(row, to_device(filled_up(row.keep), device))[0, : len(row.keep)]
        if row.own is None:
            return found
        group = self._layout.group("cp")
        return collect(found, to_device(row.own, device), len(micro.sampled.index), group)  # [all]

    @contextmanager
    def _around(self) -> Iterator[None]:
        # Any new shape may have to be compiled.
        patience = self._world.journal.extend_timeout(COMPILE_SECONDS) if self._train.compile else nullcontext()
        with patience, deterministic() if self._train.deterministic else nullcontext():
            yield

    def weights(self, adapters: str = "merged") -> Iterator[tuple[str, Tensor]]:
        """Yield every weight whole, bitwise as in the forward pass. adapters: see `Adapters.published`."""
        wholes, seen = self.whole_parameters(trained_alone=adapters == "alone"), Counter[str]()
        for name, tensor in self._adapters.published(wholes, adapters):  # [all]
            parts, slices = self._parts[name], self._gathers[adapters == "alone"].experts.get(name)
            if slices:
                parts, seen[name] = of_experts(parts, slices[seen[name]]), seen[name] + 1
            yield from ((part.name, part.of(tensor)) for part in parts)
        if adapters == "alone":
            return
        for name, buffer in self.module.named_buffers():
            yield from ((part.name, part.of(buffer)) for part in self._parts.get(name, ()))

    def whole_parameters(self, trained_alone: bool = False) -> Iterator[tuple[str, Tensor]]:
        """[all] Yield whole parameters, also those stored in parts, or in slices."""
        shard.reshard(self.module)
        parameters = {n: p for n, p in self.module.named_parameters() if p.requires_grad or not trained_alone}
        if trained_alone not in self._gathers:  # [all] like this whole method
            # Stages send each other whole parameters.
            stacked = [n for n in parameters if self._layout.size("pp") == 1 and is_stacked(self._parts.get(n, ()))]
            self._gathers[trained_alone] = Gather(parameters, self._dtype, self._layout, stacked)
        own = self._gathers[trained_alone].whole(parameters)
        for name, tensor in self._pipeline.of_owners(own, self._dtype, trained_alone):
            self._world.progress()
            yield name, tensor

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return the live tensors of `state` by parameter: unfrozen ones under `model`, and `optimizer`.

        A frozen model has all there: a reference may follow the policy.
        """
        shard.reshard(self.module)
        frozen = self._optimizer is None
        trained = {name: p.detach() for name, p in self.module.named_parameters() if p.requires_grad or frozen}
        if frozen:
            return {"model": trained, "optimizer": {}}
        self._moments.to_device()
        return {"model": trained | self._routing.biases(), "optimizer": self._optimizer.state_dict()}

    def state(self) -> list[Shard]:
        """Return the live tensors that training changes."""
        live, optimizer = self.state_dict(), self._optimizer
        weights, moments, found = live["model"], live["optimizer"], []
        if optimizer is not None:
            found = [Shard(f"{OPTIMIZER}step", (), (), moments["step"], self._world.rank == 0)]
            if self._loss_scale.is_used:
                found += [Shard(f"{OPTIMIZER}loss_scale", (2,), (0,), self._loss_scale.state, self._world.rank == 0)]
            found += self._adapters.state(self._world.rank == 0)
            # Biases are equal on all ranks.
            for name, bias in self._routing.biases().items():
                found += shards_of(MODEL, bias, _whole(bias.shape), self._parts[name], self._world.rank == 0)
        for name, held in self._pipeline.held.items():
            if held.is_trained or optimizer is None:
                here = name in weights
                own = owned_region(weights[name]) if here else _whole(held.shape)
                # The copies of the model share the work: a hash of the name picks one.
                copy = zlib.crc32(name.encode()) % self._layout.size("dp_replicate")
                is_mine = here and counts_once(name, weights[name], self._layout, self._pipeline, copy)
                kinds = optimizer.kinds(name) if optimizer is not None else ()
                kept = {f"{OPTIMIZER}{kind}/": moments.get(f"{name}.{kind}") for kind in kinds}
                for prefix, tensor in ({MODEL: weights.get(name)} | kept).items():
                    mine = None if tensor is None else local(tensor)
                    found += shards_of(prefix, mine, own, self._parts[name], is_mine)
        return found

    def held(self) -> dict[str, list[Tensor]]:
        """Return live memory, see `PlannedModel`."""
        moments = self._optimizer.state_dict() if self._optimizer else {}
        return {"weights": list(self.module.parameters()), "optimizer": list(moments.values())}

    def on_state_loaded(self) -> None:
        """Refresh what derives from `state`."""
        self._adapters.check_scaling()
        self._weights.changed()
        self._moments.changed()
        if self._optimizer is not None:
            self._optimizer.on_state_loaded()

    def wake(self) -> None:
        """Bring the weights back to the device."""
        self._weights.to_device()

    def sleep(self) -> None:
        """Offload weights and optimizer state, if set."""
        if self.offloads:
            shard.reshard(self.module)
            with self._world.journal.kind("copy"):
                self._weights.to_host()
                self._moments.to_host()

    def close(self) -> None:
        """Free device and host memory; idempotent."""
        self.module, self._optimizer = nn.Module(), None
        self._weights = self._moments = Offload(())


def _whole(shape: torch.Size) -> Region:
    return tuple(slice(0, size) for size in shape)
