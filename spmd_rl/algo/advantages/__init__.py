"""Advantage estimators by name: for samples (one number for a whole answer) and for tokens. No name is in both."""

from spmd_rl.algo.advantages.group import (
    dr_grpo,
    grpo,
    lite_ppo,
    opo,
    pass_at_k,
    reinforce,
    reinforce_pp_baseline,
    remax,
    rloo,
)
from spmd_rl.algo.advantages.steps import gigpo, starpo, step_reinforce
from spmd_rl.algo.advantages.tokens import gae, reinforce_returns, turn_gae

ADVANTAGES = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": reinforce,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "remax": remax,
    "opo": opo,
    "lite_ppo": lite_ppo,
    "pass_at_k": pass_at_k,
    "starpo": starpo,
    "step_reinforce": step_reinforce,
    "gigpo": gigpo,
}
TOKEN_ADVANTAGES = {"gae": gae, "turn_gae": turn_gae, "reinforce_returns": reinforce_returns}
