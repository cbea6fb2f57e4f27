"""Pure tensor mathematics of the algorithms: no rank, no device, no settings tree, no logger.

One algorithm is one short function and one line in a dict below, plus its name in `config/sections/algorithm.py`, where a setting
is refused that names no key of these.
"""

from spmd_rl.algo.advantages import grpo
from spmd_rl.algo.aggregation import seq_mean_token_mean, seq_mean_token_sum, token_mean
from spmd_rl.algo.kl import k1, k2, k3
from spmd_rl.algo.losses import ppo_clip

ADVANTAGES = {"grpo": grpo}
LOSSES = {"ppo_clip": ppo_clip}
KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
AGGREGATIONS = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
}
