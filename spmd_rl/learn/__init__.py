"""The learner: advantages, logprobs, updates, evaluation, and the algorithm's own state."""

from spmd_rl.learn.evaluate import evaluate, questions
from spmd_rl.learn.imitation import Imitation
from spmd_rl.learn.learner import Learner

__all__ = ["Imitation", "Learner", "evaluate", "questions"]
