"""The learner: advantages, logprobs, updates, evaluation, and the algorithm's own state."""

from spmd_rl.learn.evaluate import Evaluation, val_metrics
from spmd_rl.learn.imitation import Imitation
from spmd_rl.learn.learner import Learner
from spmd_rl.learn.losses import nll, update
from spmd_rl.learn.preference import Preference
from spmd_rl.learn.ranking import Judging, Ranking
from spmd_rl.learn.reference import keep_reference
from spmd_rl.learn.teachers import Teachers

__all__ = [
    "Evaluation",
    "Imitation",
    "Learner",
    "Preference",
    "Judging",
    "Ranking",
    "Teachers",
    "keep_reference",
    "nll",
    "update",
    "val_metrics",
]
