"""The scheduler: tickets, ticks and groups; coroutines over an `Engine`."""

from spmd_rl.rollout.collected import Collected
from spmd_rl.rollout.context import Context, Sampling, single_turn
from spmd_rl.rollout.outcomes import Outcome
from spmd_rl.rollout.rollouts import Rollouts

__all__ = ["Collected", "Context", "Outcome", "Rollouts", "Sampling", "single_turn"]
