"""The FSDP2 backend: `fully_shard` over all ranks."""

from spmd_rl.train.fsdp2.backend import FSDP2Backend

__all__ = ["FSDP2Backend"]
