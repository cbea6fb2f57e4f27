"""The scheduler: coordinator, engine loop, episodes and the collection of one step's groups."""

from spmd_rl.rollout.agent import Agent
from spmd_rl.rollout.collected import Collected, RankReport, check_errors
from spmd_rl.rollout.collection import Rollouts
from spmd_rl.rollout.demonstrations import Demonstrations, Demonstrator
from spmd_rl.rollout.engine_loop import Swap
from spmd_rl.rollout.episode import BudgetSpent, Context, Sampling, single_turn
from spmd_rl.rollout.player import Services
from spmd_rl.rollout.replay_log import Migration
from spmd_rl.rollout.step_run import StepRun, StepSource
from spmd_rl.rollout.table import SampleTable, mean_parts, sum_parts

__all__ = [
    "Agent",
    "BudgetSpent",
    "Collected",
    "Context",
    "Demonstrations",
    "Demonstrator",
    "Migration",
    "RankReport",
    "Rollouts",
    "SampleTable",
    "Sampling",
    "Services",
    "StepRun",
    "StepSource",
    "Swap",
    "check_errors",
    "mean_parts",
    "single_turn",
    "sum_parts",
]
