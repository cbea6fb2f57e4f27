"""One atomic save and one exact restore of all that is `Stateful`.

    checkpoints/step-000010/   DCP shards, state.json, hf/ on request, manifest.json (written last)
    checkpoints/latest         the name of the newest one; moves only after its directory is complete

Left out: asynchronous saves, and any format but DCP for resuming (`hf/` is for others to load, never read back).
"""

from spmd_rl.checkpoint.checkpointer import Checkpointer, Stateful, finished
from spmd_rl.checkpoint.export import HfExport

__all__ = ["Checkpointer", "HfExport", "Stateful", "finished"]
