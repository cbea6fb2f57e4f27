"""One atomic save and one exact restore of all roles and everything `Stateful`.

checkpoints/step-000010/   policy/, critic/ (see `train/state.py`), state.json, hf/ on request, and
                           manifest.json, which is written last
checkpoints/latest         the name of the newest one; moves only after its directory is complete
"""

from spmd_rl.checkpoint.checkpointer import Checkpointer, Stateful, finished, problem_of
from spmd_rl.checkpoint.export import HfExport, RewardExport

__all__ = ["Checkpointer", "HfExport", "RewardExport", "Stateful", "finished", "problem_of"]
