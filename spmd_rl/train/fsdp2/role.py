"""`FSDP2Role`: a module sharded over its layout's ranks, with an optimizer; or frozen and forward-only.

Trainable parameters are float32 shards, gathered in the compute dtype layer by layer. Per-token weights are global, so
each data shard's gradient is a term of one sum, and the gradient is the same however the batch is spread over ranks and
cut into micro-batches. What a forward computes is for the policy (`backend.py`) and the critic (`critic.py`) to say.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from spmd_rl.batch import Batch
from spmd_rl.config.schema import CriticConfig, PolicyConfig, TrainConfig
from spmd_rl.devices import kind, to_device
from spmd_rl.distributed import Layout
from spmd_rl.errors import RunFailed
from spmd_rl.model.attention import Packing
from spmd_rl.model.context import context_of
from spmd_rl.model.differentiable import collect
from spmd_rl.model.size import ModelSize
from spmd_rl.train import averages
from spmd_rl.train.base import Metrics
from spmd_rl.train.dither import dither
from spmd_rl.train.fsdp2 import shard
from spmd_rl.train.fsdp2.experts import spread_experts
from spmd_rl.train.fsdp2.muon import matrices
from spmd_rl.train.fsdp2.offload import Offload
from spmd_rl.train.fsdp2.optimizer import Optimizer
from spmd_rl.train.fsdp2.pipeline import Pipeline
from spmd_rl.train.fsdp2.replay import Replay
from spmd_rl.train.fsdp2.routing import Routing
from spmd_rl.train.fsdp2.row import Row, filled_up, granule
from spmd_rl.train.fsdp2.state import StateFiles
from spmd_rl.train.fsdp2.tensor_parallel import parallelize
from spmd_rl.train.microbatch import dummy, plan, rounded, token_index
from spmd_rl.train.schedule import learning_rate
from spmd_rl.train.sharing import share_prefixes

COMPILE_SECONDS = 3600.0
"""What compiling one shape may take without any progress."""

Forward = Callable[[Batch], tuple[Tensor, ...]]
"""[all] Of a micro-batch on the CPU: float32 [N] each, on the device, at the tokens of the loss mask."""
PerToken = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]
"""From what a forward gives, and the micro-batch on the device, to the loss per token and named quantities: see
`train.base.Loss`."""


class Pace:
    """Keeps the CPU at most one micro-batch ahead of a device: it need not wait, and what it calls progress is some."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, None

    def keep(self) -> None:
        """Wait for what the device was given before the last call; a CPU is never ahead."""
        if self._device.type == "cpu" or not torch.accelerator.is_available():
            return
        event = torch.Event(self._device)
        event.record()
        if self._before is not None:
            self._before.synchronize()
        self._before = event


class FSDP2Role:
    """What `train.base.Role` asks for, except `update`."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        train: TrainConfig,
        dtype: torch.dtype,
        optimizer: PolicyConfig | CriticConfig | None = None,
        total_updates: int = 1,
        load: Callable[[nn.Module], None] | None = None,
    ) -> None:
        """[all] Take over `model`: whole, or on the meta device with `load` to fill this rank's shards.

        dtype: compute dtype, bfloat16 or float32. Parameters that require a gradient are float32; frozen ones may be of
        any dtype. Without `optimizer` all of them are frozen: no update. total_updates: where the learning rate's
        schedule ends.
        """
        self.layout, self._world, self._train, self._settings = layout, layout.world, train, optimizer
        self._dtype, self._total_updates = dtype, total_updates
        self._updates = self._skipped_in_a_row = 0
        self.hidden_size, self.size = model.config.get_text_config().hidden_size, ModelSize.of(model)
        self.lr_factor = 1.0
        self._model = model
        self._context = None
        if (group := layout.group("cp")) is not None:
            config, tp = model.config.get_text_config(), layout.size("tp")
            heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
            self._context = context_of(group, heads // tp, max(1, (kv_heads or heads) // tp))
        if optimizer is None:
            model.requires_grad_(False)
        self._num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        for_muon = matrices(model) if optimizer is not None and optimizer.optimizer == "muon" else {}
        self._replay = Replay(model, layout, getattr(optimizer, "router_replay", False))
        self._pipeline = Pipeline(model, layout, dtype, train.vpp)  # [all]
        recomputed = "none" if optimizer is None else train.activation_checkpointing
        for layer in shard.decoder_layers(model) if train.compile else ():
            layer.compile()  # before it is sharded: FSDP's hooks stay outside of the graph
        # A gathered layer holds the weights until the next update: whoever has room need not gather it again
        on_device = kind(self._world.device) != "cpu"
        costly = not on_device or layout.size("pp") > 1
        self._keep_gathered = costly if train.reshard_after_forward is None else not train.reshard_after_forward
        self._replay.watch(model)  # before whoever counts the choices
        self._routing = Routing(model, layout, optimizer) if optimizer is not None else None
        spread_experts(model, layout)  # [all]
        parallelize(model, layout)  # [all]
        shard.shard(model, layout, dtype, self._keep_gathered, recomputed)
        if load is not None:
            shard.materialize(model, self._world.device)
            load(model)
        if optimizer is not None and optimizer.dither:
            dither(model, dtype)
        self._optimizer = None
        if optimizer is not None:
            self._optimizer = Optimizer(model, optimizer, layout, dtype, self._pipeline, for_muon)
        self._offloads = train.offload and on_device
        self._weights = Offload(model.parameters())
        self._moments = Offload(self._optimizer.moments() if self._optimizer else ())
        if self._offloads:
            self._to_host()

    @torch.no_grad()
    def _evaluate(self, what: str, batch: Batch, forward: Forward, num_columns: int) -> list[Tensor]:
        """[all] The outputs of `forward` over the whole batch: float32 [T] each, 0 outside of the loss mask."""
        bins = plan(batch, self._train.tokens_per_microbatch)
        count = self._agree_on_count(what, len(bins))
        pace, stage, found = Pace(self._world.device), self._pipeline, []
        for i, _, _ in stage.steps(count, is_trained=False):
            micro = batch.select(bins[i]) if i < len(bins) else dummy(batch)
            meeting = f"{what}: {stage.part}micro-batch {i + 1}/{count}"
            with self.layout.collective(meeting), self._compiling():  # [stage]
                outputs = forward(micro) if stage.is_last else (self._hidden(micro),)
                stage.forwarded(outputs[0])
                pace.keep()
            if stage.is_last and i < len(bins):
                found.append((token_index(batch, bins[i])[micro.sampled.index], outputs))
            self._world.progress()
        columns = torch.zeros(num_columns, batch.num_tokens, device=batch.token_ids.device)
        with self._world.collective(f"{what}: results"):  # where a rank waits whose device waits for another rank
            stage.finish()
            for places, outputs in found:
                for column, output in zip(columns, outputs, strict=True):
                    column[places] = output.to(column.device)
            columns = stage.of_last(columns).to(columns.device)  # [all]
        if not self._keep_gathered:
            shard.reshard(self._model)
        return list(columns)

    def _update(self, batch: Batch, forward: Forward, loss: PerToken) -> Metrics:
        """[all] One optimizer step. RunFailed after `max_skipped_updates` gradients in a row that are not finite."""
        assert self._optimizer is not None and self._settings is not None, "a frozen role has no update"
        sums, count = self._accumulate(batch, forward, loss)
        self._moments.to_device()  # not before: what the micro-batches held is free again
        sums = self._of_block(sums)  # [all]
        sums["grad_square"] = self._optimizer.local_grad_square()  # [all]
        greatest = {name: sums.pop(name) for name in sorted(sums) if averages.is_extreme(name)}
        sums = self._world.reduce("update: gradient norm and averages", sums, op="sum")  # [all]
        if greatest:  # the loss has the same quantities on all ranks
            greatest = self._world.reduce("update: extremes", greatest, op="max")  # [all]
        norm = math.sqrt(sums.pop("grad_square"))
        lr = self.lr_factor * learning_rate(
            self._updates,
            peak=self._settings.lr,
            schedule=self._settings.schedule,
            warmup=self._settings.warmup_steps,
            total=self._total_updates,
        )
        skipped, changed = not math.isfinite(norm), 0.0  # the same number on every rank, so the same branch
        if not skipped:
            changed = self._optimizer.step(lr, norm)
            self._routing.balance()  # [all]
            self._weights.changed()
            self._moments.changed()
        self._optimizer.zero_grad()
        if self._offloads:  # the next update's micro-batches may need the room
            with self._world.journal.kind("copy"):
                self._moments.to_host()
        self._count(skipped)
        total, num_tokens = sums.pop("loss"), max(1.0, sums.pop("num_tokens"))
        means = {name: value / num_tokens for name, value in sums.items()} | averages.extremes(greatest)
        means |= {"loss": total, "grad_norm": norm, "lr": lr}
        if self._optimizer.rounds:  # alike on all ranks
            found = self._world.reduce("update: changed weights", {"changed": changed}, op="sum")  # [all]
            means["changed_share"] = found["changed"] / self._num_trained
        means |= self._routing.metrics() | self._replay.metrics()  # [all]
        return means | {"skipped": float(skipped), "num_microbatches": float(count)}

    def _accumulate(self, batch: Batch, forward: Forward, loss: PerToken) -> tuple[dict[str, float], int]:
        """[all] Gradients; the loss, its quantities and its tokens over this data shard (see `averages`); micro-batches
        run."""
        bins = plan(batch, self._train.tokens_per_microbatch)
        count = max(1, self._agree_on_count("update", len(bins)))
        self._routing.begin(count)
        sums: dict[str, Tensor | float] = {}
        pace, stage = Pace(self._world.device), self._pipeline
        for i, is_forward, _ in stage.steps(count, is_trained=True):
            what = f"update: {'forward' if is_forward else 'backward'} of {stage.part}micro-batch {i + 1}/{count}"
            with self.layout.collective(what), self._compiling():  # [stage]
                if is_forward:
                    real = i < len(bins)
                    micro = batch.select(bins[i]) if real else dummy(batch)
                    if stage.is_last:
                        output, columns = self._loss(micro, forward, loss)
                        for name, values in columns.items():
                            sums[name] = averages.joined(name, sums.get(name), values if real else None)
                    else:
                        output = self._hidden(micro)
                    stage.forwarded(output)
                else:
                    shard.sum_over_copies(self._model, now=i == count - 1)  # between nodes, not for each micro-batch
                    stage.backward()
                    pace.keep()
            self._world.progress()
        shard.reshard(self._model)  # the weights are about to change
        with self._world.collective("update: results"):  # where a rank waits whose device waits for another rank
            stage.finish()
            return {name: float(value) for name, value in sums.items()}, count

    def _loss(self, micro: Batch, forward: Forward, loss: PerToken) -> tuple[Tensor, dict[str, Tensor]]:
        """[stage] The loss of a micro-batch, with gradient; what is summed over tokens, without: [N] each, or a sum."""
        outputs, micro = forward(micro), micro.to(self._world.device)
        per_token, quantities = loss(*outputs, micro)
        total = (per_token * micro.weights[micro.sampled.index]).sum()
        columns = {"loss": total, "num_tokens": torch.ones_like(per_token), **quantities}
        return total, {name: values.detach() for name, values in columns.items()}

    def _row(self, micro: Batch) -> Row:
        """What this rank computes of a micro-batch."""
        targets, device = micro.sampled.index, self._world.device
        assert bool((micro.position_ids[targets] > 0).all()), "a sequence's first token has no logprob"
        tree, context = share_prefixes(micro), self._context
        num_tokens = len(tree.token_ids) if int(micro.keys[0, 0]) >= 0 else 0  # a dummy has none
        split = self.layout.size("tp") * (1 if context is None else context.granule)
        tree = rounded(tree, math.lcm(granule(len(tree.token_ids)), split))
        keep = tree.gather_index[targets - 1]
        chosen = self._replay.of_row(micro, tree)
        if context is None:
            packing = Packing.of(tree.starts, tree.parents, device, self._dtype)
            routed = torch.arange(len(tree.token_ids)) < num_tokens
            return Row(tree.token_ids, tree.position_ids, packing, keep, targets, None, routed, chosen)
        tokens = context.tokens(len(tree.token_ids))
        places = torch.full_like(tree.token_ids, -1).index_copy_(0, tokens, torch.arange(len(tokens)))[keep]
        own = (places >= 0).nonzero()[:, 0]
        packing = context.packing(tree.starts, tree.parents, device, self._dtype)
        mine = tree.token_ids[tokens], tree.position_ids[tokens]
        chosen = None if chosen is None else chosen[tokens]
        return Row(*mine, packing, places[own], targets[own], own, tokens < num_tokens, chosen)

    def _of_block(self, sums: dict[str, float]) -> dict[str, float]:
        """[all] A data shard's sums on one of the ranks that have them; nothing under the same names on the others."""
        if self._pipeline.num_stages > 1:  # the last stage alone knows the names
            src = self._world.size - 1
            names = self._world.broadcast("update: names of averages", sorted(sums), src)  # [all]
            sums = {name: sums.get(name, averages.nothing(name)) for name in names}
        counts = self._pipeline.has_end and not self.layout.rank("cp") and not self.layout.rank("tp")
        return sums if counts else {name: averages.nothing(name) for name in sums}

    def _hidden(self, micro: Batch) -> Tensor:
        """[stage] What a chunk that is not the model's last one makes of the hidden states of a micro-batch."""
        return self._run(self._row(micro), 0)

    def _run(self, row: Row, kept: Tensor | int) -> Tensor:
        """[stage] What the step's chunk of the model makes of a row; at the end of those `kept`: [1, n, ..]."""
        device = self._world.device
        if self._pipeline.is_first:
            tokens = {"input_ids": to_device(row.token_ids[None], device)}
        else:
            tokens = {"inputs_embeds": self._pipeline.receive(len(row.token_ids) // self.layout.size("tp"))}
        positions, routed = to_device(row.position_ids[None], device), to_device(row.routed, device)
        common = {"position_ids": positions, "packing": row.packing, "routed": routed, "use_cache": False}
        if row.chosen is not None:
            common["chosen"] = to_device(row.chosen, device)
        return self._model(**tokens, **common, logits_to_keep=kept).logits

    def _outputs(self, micro: Batch, row: Row) -> Tensor:
        """[stage] What the output embedding makes of the hidden states that predict the loss mask's tokens: [N, ..].

        Of the last chunk. It gets those of `row` alone, in order, filled up by `filled_up`.
        """
        device = self._world.device
        # the output's projection runs only where a target is predicted
        found = self._run(row, to_device(filled_up(row.keep), device))[0, : len(row.keep)]
        if row.own is None:
            return found
        group = self.layout.group("cp")
        return collect(found, to_device(row.own, device), len(micro.sampled.index), group)  # [all]

    def _compiling(self) -> AbstractContextManager[None]:
        """Each shape of a micro-batch may have to be compiled."""
        return self._world.journal.extend_timeout(COMPILE_SECONDS) if self._train.compile else nullcontext()

    def _agree_on_count(self, what: str, count: int) -> int:
        counts = {"count": float(count)}
        agreed = self.layout.data.reduce(f"{what}: number of micro-batches", counts, op="max")  # [all]
        return int(agreed["count"])

    def _count(self, skipped: bool) -> None:
        self._updates += 1
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row >= self._settings.max_skipped_updates:
            raise RunFailed(f"the gradient was not finite in {self._skipped_in_a_row} updates in a row")

    @contextmanager
    def awake(self) -> Iterator[None]:
        """See `Role`. The optimizer's state comes for its step alone, and for `save` and `load`."""
        self._weights.to_device()
        yield
        if self._offloads:
            self._to_host()

    def _to_host(self) -> None:
        shard.reshard(self._model)
        with self._world.journal.kind("copy"):
            self._weights.to_host()
            self._moments.to_host()

    def save(self, folder: Path) -> list[Path]:
        """See `Role`."""
        return self._files.save(self.state_dict(), folder)  # [all]

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """See `Role`."""
        state = self.state_dict()
        others = self._pipeline.elsewhere
        elsewhere = {f"model.{name}" for name in others if self._pipeline.held[name].is_trained}
        if self._optimizer is not None and others:
            elsewhere |= {f"optimizer.{name}" for name in self._optimizer.names_of(others)}
        self._files.load(state, folder, elsewhere)  # [all] in place
        self._weights.changed()
        self._moments.changed()
        if self._optimizer is not None:
            self._optimizer.load_step(state["optimizer"])

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """The live tensors that training changes: under `model` the parameters that are not frozen, and `optimizer`."""
        shard.reshard(self._model)
        trained = {name: p.detach() for name, p in self._model.named_parameters() if p.requires_grad}
        if self._optimizer is None:
            return {"model": trained}
        self._moments.to_device()
        return {"model": trained | self._routing.biases(), "optimizer": self._optimizer.state_dict()}

    @cached_property
    def _files(self) -> StateFiles:
        """[all] Made by the first save or load: most roles in tests, and every reference, need none."""
        return StateFiles(self._world)

    def counters(self) -> dict[str, int]:
        """`updates` (skipped ones too: the schedule follows the step) and `skipped_in_a_row`."""
        return {"updates": self._updates, "skipped_in_a_row": self._skipped_in_a_row}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """The inverse."""
        self._updates, self._skipped_in_a_row = counters["updates"], counters["skipped_in_a_row"]

    def close(self) -> None:
        """See `Role`."""
        self._model, self._optimizer = nn.Module(), None
        self._weights = self._moments = Offload(())
