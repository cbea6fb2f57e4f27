"""The scheduler: coordinator, engine loop, episodes and the collection of one step's groups.

| word | what it means here |
|---|---|
| ticket | the index of a prompt group in the run: it stands for (epoch, prompt), a function of the seed |
| group | one prompt and all answers to it |
| slice | some of a group's answers: what a replica claims at once (`rollout.answers_per_claim`) |
| turn | one prompt part and what the policy generated after it; an agent's turn ends with a step of its environment |
| episode | the coroutine that makes one answer: it generates and scores, in one turn or many |
| answer | what one episode came to, one of `rollout.answers_per_prompt`; with an agent also called a trajectory |
| segment | a part of an answer whose turns continue each other token by token; mostly there is one |
| sample | one segment as training sees it: a row of tokens; `Sample.last` marks the one that counts as the answer |
| resolved | of a ticket: the verdicts on all its answers are in |
| qualifies | of a resolved ticket: it passes the filter (`rollout.filter`), and its answers are trained on |
| used | of a ticket: consumed by this step, whether it qualifies or not |
| surplus, carried | started and not used by the step; carried is what goes on in the next one |
| unit | the answer to which a sample belongs: what shares one score and one advantage (`Sample.unit`) |
| staleness | policy versions between the one that sampled a token and the step's; metrics and columns call it `lag` |
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
