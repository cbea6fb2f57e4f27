"""The prompts of a run: read, deduplicated, split into training and held-out, and ordered. See docs/DATA.md."""

from spmd_rl.data.env_tasks import EnvTasks
from spmd_rl.data.prompts import Prompts, content_id
from spmd_rl.data.seeds import counter_seed

__all__ = ["EnvTasks", "Prompts", "content_id", "counter_seed"]
