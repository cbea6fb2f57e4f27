"""The rows of a run: read, checked, split into training and held-out, and ordered. See docs/DATA.md."""

from spmd_rl.data.env_tasks import EnvTasks
from spmd_rl.data.prompts import Prompts, content_id
from spmd_rl.data.row_store import Examples
from spmd_rl.data.seeds import counter_seed

__all__ = ["EnvTasks", "Examples", "Prompts", "content_id", "counter_seed"]
