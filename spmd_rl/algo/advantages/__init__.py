"""Advantage estimators by name: for whole answers, for steps of agents and for tokens."""

from spmd_rl.algo.advantages.group import (
    dr_grpo,
    gdpo,
    grpo,
    lite_ppo,
    maxrl,
    opo,
    pass_at_k,
    reinforce,
    reinforce_pp_baseline,
    remax,
    rloo,
)
from spmd_rl.algo.advantages.steps import gigpo, starpo, step_reinforce
from spmd_rl.algo.advantages.tokens import gae, reinforce_returns, turn_gae

ANSWER_ADVANTAGES = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": reinforce,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "remax": remax,
    "opo": opo,
    "lite_ppo": lite_ppo,
    "maxrl": maxrl,
    "pass_at_k": pass_at_k,
    "gdpo": gdpo,
}
STEP_ADVANTAGES = {"starpo": starpo, "step_reinforce": step_reinforce, "gigpo": gigpo}
ADVANTAGES = {**ANSWER_ADVANTAGES, **STEP_ADVANTAGES}
TOKEN_ADVANTAGES = {"gae": gae, "turn_gae": turn_gae, "reinforce_returns": reinforce_returns}
