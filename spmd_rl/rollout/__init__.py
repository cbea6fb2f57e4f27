"""The scheduler: coordinator, engine loop, episodes and the collection of one step's groups."""

from spmd_rl.rollout.agent import Agent
from spmd_rl.rollout.collected import Collected, Generated, RankReport, StepResult, review
from spmd_rl.rollout.collection import Rollouts
from spmd_rl.rollout.demonstrations import Demonstrations, Demonstrator
from spmd_rl.rollout.episode import BudgetSpent, Context, Sampling, single_turn
from spmd_rl.rollout.outcomes import Outcome
from spmd_rl.rollout.parts import mean_parts, sum_parts

__all__ = [
    "Agent",
    "BudgetSpent",
    "Collected",
    "Context",
    "Demonstrations",
    "Demonstrator",
    "Generated",
    "Outcome",
    "RankReport",
    "Rollouts",
    "Sampling",
    "StepResult",
    "mean_parts",
    "review",
    "single_turn",
    "sum_parts",
]
