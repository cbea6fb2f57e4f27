"""The FSDP2 backends: `fully_shard` over all ranks."""

from spmd_rl.train.fsdp2.backend import FSDP2Backend
from spmd_rl.train.fsdp2.critic import FSDP2Critic, with_value_head

__all__ = ["FSDP2Backend", "FSDP2Critic", "with_value_head"]
