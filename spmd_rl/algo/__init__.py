"""The mathematics of the algorithms: pure functions of tensors, which know no rank, device, settings or logger.

An algorithm is one short function, one line in a dict, and its name in `config/sections/algorithm.py`. Its keyword-only
parameters are keys of `algorithm`, passed by `learn/custom.py`.
"""

from spmd_rl.algo.advantages import ADVANTAGES, TOKEN_ADVANTAGES
from spmd_rl.algo.aggregation import seq_mean_token_mean, seq_mean_token_sum, seq_mean_token_sum_norm, token_mean
from spmd_rl.algo.kl import KL_ESTIMATORS
from spmd_rl.algo.policy import POLICY_LOSSES, POLICY_TERMS

__all__ = ["ADVANTAGES", "AGGREGATIONS", "KL_ESTIMATORS", "POLICY_LOSSES", "POLICY_TERMS", "TOKEN_ADVANTAGES"]

AGGREGATIONS = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
}
