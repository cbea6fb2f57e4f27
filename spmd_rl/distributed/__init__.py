"""The world of ranks: meshes, collectives, progress journal, and a common end after failures."""

from spmd_rl.distributed.agreement import agree_on_start
from spmd_rl.distributed.dtype import agree_on_dtype
from spmd_rl.distributed.journal import Journal
from spmd_rl.distributed.layout import DataShard, Layout
from spmd_rl.distributed.solo import solo
from spmd_rl.distributed.world import World

__all__ = ["DataShard", "Journal", "Layout", "World", "agree_on_dtype", "agree_on_start", "solo"]
