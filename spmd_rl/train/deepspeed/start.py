"""DeepSpeed, imported late and quietly, on existing process groups, compiling nothing.

`tests/unit/test_deepspeed_contract.py` checks the undocumented behaviour used here.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from spmd_rl.config.sections.models import TrainConfig
from spmd_rl.distributed import World

IMPORT_SECONDS = 600.0
"""Limit without progress on the import, read by many ranks of a machine at once"""
BUCKET = 2**26
"""Gradient elements per reduction, which have buffers"""


class DataParallel:
    """The `mpu` that DeepSpeed expects: all ranks are data parallel."""

    def __init__(self, group: dist.ProcessGroup, alone: dist.ProcessGroup | None) -> None:
        self._group, self._alone = group, alone

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Return the group that shards state and sums gradients."""
        return self._group

    def get_data_parallel_world_size(self) -> int:
        """Return the data-parallel group's size."""
        return dist.get_world_size(self._group)

    def get_data_parallel_rank(self) -> int:
        """Return this rank's data-parallel position."""
        return dist.get_rank(self._group)

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """Return a group of this rank alone."""
        # With None, DeepSpeed would use all ranks of the job, some of which may not train.
        return self._alone

    def get_model_parallel_world_size(self) -> int:
        """Return 1: ranks share no layer."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """Return 0, the only rank there."""
        return 0


def start(world: World) -> ModuleType:
    """Import DeepSpeed on existing process groups."""
    # Without it DeepSpeed searches for devices, and warns.
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    # A run of one rank has no launcher that sets it.
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))
    with world.journal.extend_timeout(IMPORT_SECONDS):
        import deepspeed
        from deepspeed.runtime.zero import partitioned_param_coordinator

    # A check of itself, in stage 3, that meets all ranks of the job, of which some may not train.
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda ints: None
    # DeepSpeed logs to stdout.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed calls deprecated names of torch.distributed.
    warnings.filterwarnings("ignore", "`torch.distributed.*deprecated", FutureWarning)
    if not deepspeed.comm.is_initialized():
        # Otherwise DeepSpeed compiles a shared-memory all-reduce for a minute.
        deepspeed.ops.__compatible_ops__ = {}
        deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False, verbose=False)
    return deepspeed


@contextmanager
def meeting_in(deepspeed: ModuleType, group: dist.ProcessGroup) -> Iterator[None]:
    """Restrict the barriers of stage 3's setup from all ranks of the job to `group`."""
    barrier = deepspeed.comm.barrier
    deepspeed.comm.barrier = lambda *_, **__: dist.barrier(group)  # [all]
    try:
        yield
    finally:
        deepspeed.comm.barrier = barrier


def settings(train: TrainConfig, dtype: torch.dtype, on_device: bool) -> dict[str, Any]:
    """Return DeepSpeed's settings, without clipping and micro-batch counts."""
    host = {"device": "cpu", "pin_memory": on_device}
    zero = {
        "stage": train.stage,
        "reduce_bucket_size": BUCKET,
        "overlap_comm": on_device and not train.offload_optimizer,
        # DeepSpeed's own linear function replaces torch's in the whole process, and adds its bias in place: into
        # products that selective checkpointing has kept. Gradients of any backend were silently wrong.
        "memory_efficient_linear": False,
        # Parameters that stay gathered would be stale after a load.
        "stage3_param_persistence_threshold": 0,
    }
    if train.offload_optimizer:
        zero["offload_optimizer"] = host
    if train.offload_param:
        zero["offload_param"] = host
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # `GatedAdamW` clips: its factor includes the clipping by the global norm.
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        # Sums in bfloat16 would lose what micro-batches and ranks add.
        "communication_data_type": "fp32",
        "zero_optimization": zero,
    }
