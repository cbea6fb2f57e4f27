"""Megatron's distributed data parallelism and optimizer: gradients and AdamW state, sharded over data shards.

Built without the library's factory, which pickles, and runs collectives of all ranks, some of which may only generate.
AdamW is torch's.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple
from warnings import filterwarnings

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from spmd_rl.config.sections.models import TrainedModelConfig

# Megatron calls collectives by names that torch has replaced since
filterwarnings("ignore", r".*is deprecated. Please use `torch.distributed", FutureWarning, "torch.distributed")
MOMENTS = ("exp_avg", "exp_avg_sq")


class Master(NamedTuple):
    """A span of a parameter whose float32 weights and moments are on this rank."""

    parameter: nn.Parameter
    begin: int
    end: int
    weights: Tensor
    """float32 [end - begin], live; a float32 model's own parameter storage"""
    state: dict[str, Tensor]
    """`step` and `MOMENTS` by name"""


class DistributedAdamW:
    """AdamW over this rank's chunks of a model."""

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        config: TransformerConfig,
        settings: TrainedModelConfig,
        groups: ProcessGroupCollection,
    ) -> None:
        self._settings = settings
        # Float32 sums: those of bfloat16 would lose what micro-batches and ranks add.
        how = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=config.bf16, overlap_grad_reduce=False
        )
        wrap = partial(DistributedDataParallel, config, how, pg_collection=groups)
        self.wrapped = [wrap(chunk, disable_bucketing=number > 0) for number, chunk in enumerate(chunks)]
        """Chunks to call for gradients"""
        config.finalize_model_grads_func = _finalize
        config.no_sync_func = None
        of_experts = [{i: own for i, chunk in enumerate(self.wrapped) if (own := chunk.expert_parallel_buffers)}]
        self._optimizers = [
            self._over({i: chunk.buffers for i, chunk in enumerate(self.wrapped)}, config, groups.dp_cp)
        ]
        self._optimizers += [self._over(own, config, groups.expt_dp) for own in of_experts if own]
        self.masters = [master for optimizer in self._optimizers for master in _masters(optimizer)]
        self.steps = torch.zeros(())

    def _over(self, buffers: Mapping[int, list[Any]], config: TransformerConfig, group: Any) -> DistributedOptimizer:
        settings = self._settings
        parameters = [p for own in buffers.values() for buffer in own for p in buffer.params]
        adamw = torch.optim.AdamW(
            parameters,
            lr=settings.lr,
            betas=(settings.betas[0], settings.betas[1]),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        how = OptimizerConfig(
            optimizer="adam", bf16=config.bf16, params_dtype=config.params_dtype, use_distributed_optimizer=True
        )
        return DistributedOptimizer(
            adamw,
            how,
            None,
            None,
            model_chunks=self.wrapped,
            per_model_buffers=buffers,
            data_parallel_group=group,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=0,
            distributed_optimizer_instance_id=0,
        )

    def prepare(self) -> None:
        """Give masters their gradients, summed over data shards by the last pass."""
        for optimizer in self._optimizers:
            optimizer.prepare_grads()

    def step(self, lr: float, norm: float) -> None:
        """[all] Clip gradients of global norm `norm`, update, and distribute the weights."""
        gradients = [master.weights.grad for master in self.masters]
        if gradients and norm > self._settings.max_grad_norm:
            torch._foreach_mul_(gradients, self._settings.max_grad_norm / norm)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step_with_ready_grads()  # [all]
        self.steps += 1

    def zero_grad(self) -> None:
        """Drop the gradients of all parameters."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def publish_masters(self) -> None:
        """[all] Copy masters into the parameters of all ranks."""
        for optimizer in self._optimizers:
            optimizer._copy_main_params_to_model_params()
        for chunk in self.wrapped:
            chunk.start_param_sync(force_sync=True)  # [all]

    def on_state_loaded(self) -> None:
        """[all] Refresh parameters after masters, moments and `steps` were overwritten."""
        for master in self.masters:
            master.state["step"].copy_(self.steps)
        self.publish_masters()  # [all]


def _finalize(chunks: list[nn.Module], num_tokens: Tensor | None, **given: Any) -> None:
    # Token weights are global already.
    finalize_model_grads(chunks, None, **given)


def _masters(optimizer: DistributedOptimizer) -> list[Master]:
    # torch would create the state only in the first step, too late for loading a checkpoint.
    parameters = chain(*optimizer.model_float16_groups, *optimizer.model_fp32_groups)
    weights = chain(*optimizer.shard_fp32_from_float16_groups, *optimizer.shard_fp32_groups)
    found = []
    for parameter, shard in zip(parameters, weights, strict=True):
        place = optimizer._get_model_param_range_map(parameter)["param"]
        # A step counter per tensor: Megatron's own loading shares one between all tensors, and trains on wrongly
        # without an error.
        state = {"step": torch.zeros((), device=shard.device)} | {
            name: torch.zeros_like(shard.detach()) for name in MOMENTS
        }
        optimizer.optimizer.state[shard] = state
        found.append(Master(parameter, place.start, place.end, shard, state))
    return found
