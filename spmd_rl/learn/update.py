"""`update`: the policy's optimizer steps on batches of any source; and the loss of supervised learning.

batch = pack(samples)                                             # the rows of this rank's data shard
batch.weights = batch.loss_mask / num_tokens                      # of the global batch: `-mean log pi(t)`
metrics = update(policy, [batch], nll)  # [all]
"""

from collections.abc import Iterable, Mapping

from torch import Tensor

from spmd_rl.batch import Batch
from spmd_rl.learn.mismatch import with_ess
from spmd_rl.train.base import Loss, Metrics, TrainBackend


def update(policy: TrainBackend, batches: Iterable[Batch], loss: Loss, temperature: float = 1.0) -> Metrics:
    """[all] One optimizer step per mini-batch; the means of what they measure. Equal on all ranks."""
    with policy.awake():
        return with_ess(mean_over([policy.update(batch, loss, temperature) for batch in batches], "actor"))  # [all]


def nll(logprobs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The negative log-likelihood of each sampled token, in nats: a `train.base.Loss`."""
    return -logprobs, {"actor/entropy": entropy.detach()}


def mean_over(updates: list[Metrics], role: str) -> Metrics:
    """Means over the updates of a step, or extremes, under the names that a user reads."""
    keys = updates[0] if updates else {}
    return {_name(key, role): _over_updates(key, [m[key] for m in updates]) for key in keys}


def _over_updates(key: str, values: list[float]) -> float:
    extreme = {"max": max, "min": min}.get(key.rpartition("/")[2])
    return extreme(values) if extreme else sum(values) / len(values)


def _name(key: str, role: str) -> str:
    name = _NAMES.get((role, key), key)
    own = role == "critic" and name.startswith("moe/")  # the policy's have no prefix
    return name if "/" in name and not own else f"{role}/{name}"


_NAMES = {
    ("actor", "loss"): "pg_loss",
    ("actor", "num_microbatches"): "backward_steps",
    ("actor", "changed_share"): "publish/changed_share",
    ("critic", "num_microbatches"): "backward_steps",
}
