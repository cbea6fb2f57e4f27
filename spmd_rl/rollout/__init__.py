"""The scheduler: coordinator, engine loop, episodes and the collection of one step's groups.

| module | task |
|---|---|
| `step_plan`, `pace` | tickets of a step, rules of staleness |
| `coordinator`, `claims`, `shared_step` | replicas share tickets |
| `player`, `engine_loop` | episodes over an engine |
| `episode`, `agent`, `thinking` | one sample |
| `step_run`, `collection`, `ahead` | a step on one replica |
| `collected`, `table`, `filters` | the result of a step |
| `row_source`, `dump`, `demonstrations`, `kept` | samples from elsewhere |

docs/STEP.md defines the words of a step.
"""

from spmd_rl.rollout.agent import Agent
from spmd_rl.rollout.collected import Collected, RankReport, check_errors
from spmd_rl.rollout.collection import Rollouts
from spmd_rl.rollout.demonstrations import Demonstrations, Demonstrator
from spmd_rl.rollout.dump import Dumped, Replayed
from spmd_rl.rollout.episode import BudgetSpent, Context, Sampling, single_turn
from spmd_rl.rollout.kept import KeptAnswers, KeptRollouts
from spmd_rl.rollout.player import Services
from spmd_rl.rollout.row_source import RowSource
from spmd_rl.rollout.source import RolloutSource
from spmd_rl.rollout.step_run import StepRun
from spmd_rl.rollout.table import SampleTable, mean_parts, sum_parts

__all__ = [
    "Agent",
    "BudgetSpent",
    "Collected",
    "Context",
    "Demonstrations",
    "Demonstrator",
    "Dumped",
    "KeptAnswers",
    "KeptRollouts",
    "RankReport",
    "Replayed",
    "RolloutSource",
    "RowSource",
    "Rollouts",
    "SampleTable",
    "Sampling",
    "Services",
    "StepRun",
    "check_errors",
    "mean_parts",
    "single_turn",
    "sum_parts",
]
