"""Pure tensor mathematics of the algorithms: no rank, no device, no settings tree, no logger.

One algorithm is one short function and one line in a dict below; `pick` turns a name from the settings into it.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

from spmd_rl.algo.advantages import grpo
from spmd_rl.algo.aggregation import seq_mean_token_mean, seq_mean_token_sum, token_mean
from spmd_rl.algo.kl import k1, k2, k3
from spmd_rl.algo.losses import ppo_clip
from spmd_rl.errors import UserError

ADVANTAGES = {"grpo": grpo}
LOSSES = {"ppo_clip": ppo_clip}
KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
AGGREGATIONS = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
}

F = TypeVar("F", bound=Callable)


def pick(key: str, name: str, known: Mapping[str, F]) -> F:
    """The function called `name`; a UserError for settings key `key` that lists the known names."""
    if name not in known:
        raise UserError(f"{key}: unknown name {name!r}; known: {', '.join(known)}")
    return known[name]
