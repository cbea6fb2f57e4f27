"""`Imitation`: supervised learning on what was collected, token by token, whatever it is worth."""

import numpy as np

from spmd_rl.algo import AGGREGATIONS
from spmd_rl.batch import Batch, pack
from spmd_rl.config.schema import AgenticConfig
from spmd_rl.learn import prepare
from spmd_rl.learn.advantages import Samples, all_alike
from spmd_rl.learn.losses import nll, update
from spmd_rl.learn.transfer import redistribute
from spmd_rl.train.base import Metrics, PolicyRole


class Imitation:
    """One supervised step on the sampled tokens of what was collected, `-mean log pi(t)`."""

    def __init__(self, policy: PolicyRole, num_updates: int, temperature: float, lr_factor: float) -> None:
        """num_updates: optimizer steps of a step. lr_factor: multiplies the schedule's learning rate."""
        self._policy, self._world, self._num_updates = policy, policy.layout.world, num_updates
        self._temperature, self._lr_factor = temperature, lr_factor
        self.plan: prepare.Plan | None = None
        """The plan of the last `prepare`; the sample log reads it."""

    @classmethod
    def of(cls, cfg: AgenticConfig, policy: PolicyRole) -> "Imitation":
        """The supervised steps of a run, at the learning rate `warmup.lr`, by default the policy's own."""
        # a factor, since the role's schedule knows `policy.lr` alone; where that is 0, nothing is trained
        lr_factor = (cfg.warmup.lr or cfg.policy.lr) / (cfg.policy.lr or 1.0)
        return cls(policy, cfg.train.updates_per_step, cfg.rollout.temperature, lr_factor)

    def prepare(self, collected: Samples) -> list[Batch]:
        """[all] This rank's mini-batches, one per optimizer step."""
        data, count = self._policy.layout.data, self._num_updates
        with self._world.phase("prepare"):
            with self._world.phase("coordination"):
                shares = prepare.Shares(count, data.size, self._policy.hidden_size)
                alike = all_alike(collected.table)
                self.plan = prepare.plan(collected.step, alike, shares, AGGREGATIONS["token-mean"])
            packed = pack(self.plan.samples_of(collected.groups, self._world.rank), collected.step - 1)
            return redistribute(packed, self.plan, count, data, self._world)  # [all]

    def update(self, batches: list[Batch]) -> Metrics:
        """[all] See `Learner.update`; the loss is the mean negative log-likelihood of a token, in nats."""
        used = [batches[i] for i in np.unique(self.plan.minibatches).tolist()]
        self._policy.lr_factor = self._lr_factor
        with self._world.phase("update"):
            metrics = update(self._policy, used, nll, self._temperature)  # [all]
        self._policy.lr_factor = 1.0
        own = {"warmup/loss": metrics.pop("actor/pg_loss")} if used else {}
        return own | metrics | self.plan.metrics()
