"""The scheduler: coordinator, engine loop, episodes and the collection of one step's groups."""

from spmd_rl.rollout.collected import Collected
from spmd_rl.rollout.collection import Rollouts
from spmd_rl.rollout.episode import BudgetSpent, Context, Sampling, single_turn
from spmd_rl.rollout.outcomes import Outcome

__all__ = ["BudgetSpent", "Collected", "Context", "Outcome", "Rollouts", "Sampling", "single_turn"]
