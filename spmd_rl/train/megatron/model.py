"""`MegatronModel`: a causal LM sharded by Megatron-core with its distributed optimizer; or frozen."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from spmd_rl.base.devices import kind, to_device
from spmd_rl.batch import Batch
from spmd_rl.config.ranks import check_experts, deal_layers
from spmd_rl.config.sections.models import RoleConfig
from spmd_rl.distributed import Layout
from spmd_rl.distributed.layout import AXES, EXPERTS
from spmd_rl.model.context import context_of
from spmd_rl.model.differentiable import collect
from spmd_rl.model.load import WeightFiles
from spmd_rl.model.moe import num_experts
from spmd_rl.model.size import ModelSize, head_dim, num_kv_heads
from spmd_rl.train.base import Metrics, MicrobatchLoop
from spmd_rl.train.dither import dither_region
from spmd_rl.train.expert_load import ExpertLoad
from spmd_rl.train.megatron import transformer
from spmd_rl.train.megatron.adapters import MegatronAdapters
from spmd_rl.train.megatron.mapping import Rule
from spmd_rl.train.megatron.optimizer import MOMENTS, DistributedAdamW
from spmd_rl.train.megatron.parameters import Experts, StoredPart, check_files, fill, local_parameters, parameters_of
from spmd_rl.train.megatron.shim import on_cpu
from spmd_rl.train.megatron.tensors import Tensors
from spmd_rl.train.megatron.value_head import LAYER as HEAD
from spmd_rl.train.megatron.value_head import ValueHead
from spmd_rl.train.offload import Offload
from spmd_rl.train.replay import Replay
from spmd_rl.train.row import Row, aim, filled_up, parts, row_of
from spmd_rl.train.state import Shard

ALONG = {
    "tp": ("tp",),
    "cp": ("cp",),
    "pp": ("pp",),
    "dp": ("dp_shard",),
    "dp_cp": ("dp_shard", "cp"),
    "mp": ("pp", "tp"),
    "tp_cp": ("cp", "tp"),
    "tp_dp_cp": ("dp_shard", "cp", "tp"),
}
"""Axes of the layout along which a Megatron group's ranks differ"""
ALONG_EXPERTS = {"ep": ("ep",), "expt_dp": ("expert_fsdp",), "tp_ep": ("ep",), "tp_ep_pp": ("pp", "ep"), "expt_tp": ()}
"""Axes of groups for experts, each whole on a rank"""


def groups_of(layout: Layout) -> ProcessGroupCollection:
    """[all] Form Megatron's groups; equal ranks share one."""
    formed: dict[tuple[int, ...], dist.ProcessGroup] = {}
    # messages between stages have two ends alone, which groups over shared memory have not
    backend = "gloo" if layout.world.device.type == "cpu" else None

    def group(ranks: Sequence[int]) -> dist.ProcessGroup:
        key = tuple(ranks)
        if key not in formed:
            formed[key] = layout.world.process_group("megatron", backend, key)  # [all]
        return formed[key]

    found = {name: group(_ranks(layout, AXES, along)) for name, along in ALONG.items()}
    found |= {name: group(_ranks(layout, EXPERTS, along)) for name, along in ALONG_EXPERTS.items()}
    line = _ranks(layout, AXES, ("pp",))
    ends = [line[0], line[-1]] if len(line) > 1 else line
    found["embd"] = group(ends) if layout.world.rank in ends else None
    found["intra_dp_cp"], found["intra_expt_dp"] = found["dp_cp"], found["expt_dp"]
    nothing = dict.fromkeys(("pos_embd", "hcp", "inter_dist_opt"))
    return ProcessGroupCollection(**found, **nothing, intra_dist_opt=group(range(layout.world.size)))


def _ranks(layout: Layout, axes: Sequence[str], along: Sequence[str]) -> list[int]:
    ranks = [0]
    for axis in axes:
        places = range(layout.size(axis)) if axis in along else [layout.rank(axis)]
        ranks = [rank * layout.size(axis) + place for rank in ranks for place in places]
    return ranks


class MegatronModel:
    """A `train.base.ShardedModel` on Megatron-core."""

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        role: RoleConfig,
        files: WeightFiles,
        rules: Mapping[str, Rule],
        options: dict[str, Any],
    ) -> None:
        """[all] Build and fill the model. module: of transformers, on the meta device, for sizes; weights come from
        `files`.

        rules, options: see `architectures`. UserError if weights do not fit them or the layout.
        """
        config = module.config
        self._layout, self._world, self.device = layout, layout.world, layout.world.device
        self._dtype = getattr(torch, role.dtype)
        self.hidden_size, self.size = config.hidden_size, ModelSize.of(module)
        self._is_critic, num_stages = role.name == "critic", layout.size("pp")
        is_tied = config.tie_word_embeddings and not self._is_critic
        dealt = deal_layers(layout.key, config.num_hidden_layers, num_stages, role.train.vpp)
        experts = Experts(num_experts(config), layout.size("ep"), options.get("moe_layer_freq", [1]).index(1))
        check_experts(layout.key, experts.count, config.name_or_path, experts.size)
        self._adapters = MegatronAdapters(role.lora, module, rules, layout.key)
        parameters = parameters_of(self._adapters.rules, dealt, num_stages, is_tied, experts)
        check_files(parameters, files, module, is_tied)
        shapes = {name: tuple(files.shape(name)) for name in files.names} | self._adapters.shapes(files)
        self._context = None
        if (group := layout.group("cp")) is not None:
            tp = layout.size("tp")
            self._context = context_of(group, config.num_attention_heads // tp, num_kv_heads(config) // tp)
        self._groups = groups_of(layout)  # [all]
        with on_cpu(self.device):
            self._config = transformer.config_of(config, layout, role.train, self._dtype, options)
            chunks = transformer.chunks_of(self._config, dealt, self._groups, config.vocab_size, is_tied, experts)
            if self._is_critic and (last := next(reversed(chunks))).post_process:
                last.output_layer = ValueHead(self._config, role.value_bias, self._groups)
            self._chunks = list(chunks)
            self._replay = Replay(module, layout, getattr(role.own, "router_replay", False))
            mixtures = transformer.mixtures_of(chunks)
            aux = getattr(role.own, "router_aux_coef", 0.0)
            self._load_of_experts = ExpertLoad(layout, aux, len(mixtures) if experts.count else None)
            self._bias_speed = getattr(role.own, "router_bias_update_speed", 0.0)
            transformer.watch_routers(mixtures, experts.first, self._replay, self._load_of_experts)
            for chunk in self._chunks:
                transformer.follow(chunk, module, self.device, self._groups.tp)
            self._adapters.attach(chunks, shapes.__getitem__, self._groups.tp, head_dim(config), experts)
            local = local_parameters(chunks, experts, layout.rank("ep"))
            own = role.optimizer
            trained = {name for name, rule, *_ in parameters if own and self._trains(name) and not rule.is_buffer}
            for name, tensor in local.items():
                tensor.requires_grad_(name in trained)
                # Padding that no stored tensor fills is never used, but must be finite: 0 * NaN is NaN.
                tensor.detach().zero_()
            self._optimizer = own and DistributedAdamW(self._chunks, self._config, own, self._groups)
            about = (shapes.__getitem__, layout, self._groups, head_dim(config))
            self._tensors = Tensors(parameters, local, trained, self._dtype, *about)
            self._load(files, role)  # [all]
        self._make_offload(role, local)

    def _trains(self, name: str) -> bool:
        # With adapters a critic's head is trained as well, since it starts at 0.
        return self._adapters.trains(name) or (self._is_critic and name.startswith(HEAD))

    def _load(self, files: WeightFiles, role: RoleConfig) -> None:
        read = partial(self._adapters.read, files)
        fill(list(self._tensors.frozen()), read, self._world.progress)
        if self._optimizer is None:
            return
        parts = [part for master in self._optimizer.masters for part in self._parts_of(master)]
        fill(parts, read, self._world.progress)
        if role.optimizer.dither:
            for part in parts:
                dither_region(part.tensor, part.name, part.shape, part.stored, self._dtype)
        self._optimizer.publish_masters()  # [all]

    def _parts_of(self, master: Any) -> Iterator[StoredPart]:
        return self._tensors.parts_of(master, master.weights.detach())

    def _make_offload(self, role: RoleConfig, local: dict[str, nn.Parameter]) -> None:
        masters = self._optimizer.masters if self._optimizer else []
        self._offloads = role.train.offload and kind(self.device) != "cpu"
        self._weights = Offload([*local.values(), *(master.weights for master in masters)])
        self._moments = Offload([master.state[moment] for master in masters for moment in MOMENTS])
        self.sleep()

    def run(self, loop: MicrobatchLoop) -> None:
        """Run the micro-batches by Megatron's schedules: 1F1B, or interleaved with several chunks."""
        num_stages, num_chunks = self._layout.size("pp"), len(self._chunks)
        count = loop.count
        # Megatron's interleaved schedule needs whole rounds; the additional micro-batches have weight 0.
        if num_chunks > 1:
            count = -(-count // num_stages) * num_stages
        chunks = self._optimizer.wrapped if loop.is_trained else self._chunks
        stages = {}
        if loop.is_trained:
            self._load_of_experts.begin(count)
        if num_stages > 1:
            stages["p2p_communicator"] = P2PCommunicator(self._groups.pp, self._config)
        schedule = get_forward_backward_func(num_stages, num_chunks if num_chunks > 1 else None)
        name = f"{loop.name}: {loop.count} micro-batches"
        hidden = self._adapters.hidden(loop.args.is_base)
        with self._world.collective(name), on_cpu(self.device), hidden:  # [all]
            schedule(
                forward_step_func=partial(self._forward, loop),
                data_iterator=[iter(range(count)) for _ in chunks],
                model=list(chunks),
                num_microbatches=count,
                # No effect: the stages exchange the shapes of each micro-batch.
                seq_length=1,
                micro_batch_size=1,
                forward_only=not loop.is_trained,
                pg_collection=self._groups,
                **stages,
            )

    def row(self, micro: Batch) -> Row:
        """Return a micro-batch as this rank's row."""
        return row_of(micro, self.device, self._dtype, self._layout.size("tp"), self._context, self._replay.of_row)

    def _forward(self, loop: MicrobatchLoop, numbers: Iterator[int], chunk: nn.Module) -> tuple[Tensor, Any]:
        """[stage] Return a chunk's output for the next micro-batch, and the last chunk's function to call with it."""
        number = next(numbers)
        micro, device = loop.select(number), self.device
        row = self.row(micro)
        head = getattr(getattr(chunk, "module", chunk), "output_layer", None)
        if head is not None:
            if self._is_critic:
                head.gives_fingerprint = loop.args.is_fingerprint
            else:
                aim(head, micro, row, loop.args, device)
            head.keep = to_device(filled_up(row.keep), device)
        positions = to_device(row.position_ids, device)
        chosen = None if row.chosen is None else to_device(row.chosen, device)
        packed = transformer.PackedRow(positions, row.packing, to_device(row.routed, device), chosen)
        way = "forward of " if loop.is_trained else ""
        with self._layout.collective(f"{loop.name}: {way}micro-batch {number + 1}/{loop.count}"):  # [all] of the stage
            out = chunk(to_device(row.token_ids[None], device), positions[None], None, packed_seq_params=packed)
        self._world.progress()
        return out, partial(self._finish, loop, number, micro, row)

    def _finish(
        self, loop: MicrobatchLoop, number: int, micro: Batch, row: Row, out: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """[stage] Return the loss in Megatron's form, with an unused token count and an empty report."""
        found = out[0, : len(row.keep)]
        if row.own is not None:
            own = to_device(row.own, self.device)
            found = collect(found, own, len(micro.sampled.index), self._layout.group("cp"))  # [all]
        nothing = torch.zeros((), dtype=torch.int, device=self.device)
        return loop.finish(number, micro, parts(found, loop.args)), nothing, {}

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's gradients, see `ShardedModel`."""
        self._moments.to_device()
        with on_cpu(self.device):
            self._optimizer.prepare()
        counted = [m for m in self._optimizer.masters if self._tensors.counts(m.parameter)]
        return {self._tensors.name_of(m): m.weights.grad for m in counted}

    def step(self, lr: float, norm: float | None) -> None:
        """Clip and update, see `ShardedModel.step`."""
        with on_cpu(self.device):
            if norm is not None:
                self._optimizer.step(lr, norm)  # [all]
                self._load_of_experts.balance(self._tensors.buffers.values(), self._bias_speed)  # [all]
                self._weights.changed()
                self._moments.changed()
            self._optimizer.zero_grad()
        if self._offloads:
            with self._world.journal.kind("copy"):
                self._moments.to_host()

    def metrics(self) -> Metrics:
        """Return the last update's `moe/*` metrics."""
        return self._load_of_experts.metrics() | self._replay.metrics()  # [all]

    def weights(self, adapters: str = "merged") -> Iterator[tuple[str, Tensor]]:
        """Yield every weight whole, bitwise as in the forward pass. adapters: see `Adapters.published`."""
        return self._adapters.published(self._tensors.whole(trained_alone=adapters == "alone"), adapters)  # [all]

    def state(self) -> list[Shard]:
        """Return the live tensors that training changes."""
        self._moments.to_device()
        if self._optimizer is None:
            return []
        shards = self._tensors.shards(self._optimizer, with_buffers=self._bias_speed > 0)
        return [*shards, *self._adapters.state(self._world.rank == 0)]

    def held(self) -> dict[str, list[Tensor]]:
        """Return live memory, see `PlannedModel`."""
        masters = self._optimizer.masters if self._optimizer else []
        weights = [p for chunk in self._chunks for p in chunk.parameters()]
        moments = [kept for master in masters for kept in master.state.values()]
        return {"weights": [*weights, *(master.weights for master in masters)], "optimizer": moments}

    def on_state_loaded(self) -> None:
        """[all] Refresh what derives from `state`."""
        self._adapters.check_scaling()
        self._weights.changed()
        self._moments.changed()
        if self._optimizer is not None:
            with on_cpu(self.device):
                self._optimizer.on_state_loaded()  # [all]

    def wake(self) -> None:
        """Bring the weights back to the device."""
        self._weights.to_device()

    def sleep(self) -> None:
        """Offload weights and optimizer state, if set."""
        if self._offloads:
            with self._world.journal.kind("copy"):
                self._weights.to_host()
                self._moments.to_host()

    def close(self) -> None:
        """Free device and host memory; idempotent."""
        self._chunks, self._optimizer, self._tensors = [], None, None
        self._weights = self._moments = Offload(())
