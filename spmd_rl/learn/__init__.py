"""The learner: advantages, logprobs, updates, evaluation, and the algorithm's own state."""

from spmd_rl.learn.evaluate import Evaluation, val_metrics
from spmd_rl.learn.imitation import Imitation
from spmd_rl.learn.learner import Learner
from spmd_rl.learn.losses import nll, update

__all__ = ["Evaluation", "Imitation", "Learner", "nll", "update", "val_metrics"]
