"""Prompts: read, told apart by content, split, and dealt out by ticket. Torch-free; see docs/DATA.md."""

from spmd_rl.data.prompts import Prompts, content_id
from spmd_rl.data.seeds import counter_seed

__all__ = ["Prompts", "content_id", "counter_seed"]
