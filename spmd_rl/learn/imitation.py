"""`Imitation`: supervised learning on what was collected, token by token, whatever it is worth."""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from spmd_rl.algo import AGGREGATIONS
from spmd_rl.batch import Batch, pack
from spmd_rl.config.schema import AgenticConfig
from spmd_rl.learn import prepare
from spmd_rl.learn.advantages import Samples, all_alike
from spmd_rl.learn.losses import measure, nll, nothing, update
from spmd_rl.learn.teachers import Teachers
from spmd_rl.learn.transfer import redistribute
from spmd_rl.train.base import Metrics, PolicyRole


class Imitation:
    """One supervised step on the sampled tokens of what was collected, `-mean log pi(t)`."""

    def __init__(
        self,
        policy: PolicyRole,
        num_updates: int,
        temperature: float = 1.0,
        lr_factor: float = 1.0,
        name: str = "warmup/loss",
        teachers: Teachers | None = None,
    ) -> None:
        """num_updates: optimizer steps of a step. lr_factor: multiplies the schedule's learning rate. name: of the
        loss, among the metrics. teachers: who say what else could stand in the place of each token."""
        self._policy, self._world, self._num_updates = policy, policy.layout.world, num_updates
        self._temperature, self._lr_factor, self._name = temperature, lr_factor, name
        self._teachers = teachers
        self._loss = teachers.loss(nothing if teachers.alone else nll) if teachers else nll
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
        batches = self._prepare(collected, self._num_updates)  # [all]
        if self._teachers:
            with self._world.phase("logprobs"):
                self._teachers.fill_in(batches, self.plan, collected.table)  # [all]
        return batches

    def _prepare(self, collected: Samples, count: int) -> list[Batch]:
        data = self._policy.layout.data
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
            metrics = update(self._policy, used, self._loss, self._temperature)  # [all]
        self._policy.lr_factor = 1.0
        own = {self._name: metrics.pop("actor/pg_loss")} if used else {}
        return own | metrics | self.plan.metrics()

    def measure(self, parts: Iterable[Samples]) -> Metrics:
        """[all] The loss on samples of which nothing is learnt, as `val/*`; they come in parts. Equal on all ranks."""
        sums: dict[str, float] = defaultdict(float)
        with self._world.phase("eval"):
            for collected in parts:  # [all] have as many
                (batch,) = self._prepare(collected, 1)  # [all]
                with self._policy.awake():
                    found = measure(self._policy, batch, nll, self._temperature)  # [all]
                for name, value in found.items():
                    sums[name] += value * (1 if name == "num_tokens" else found["num_tokens"])
        count = sums.pop("num_tokens", 0.0)
        return {f"val/{name.removeprefix('actor/')}": value / count for name, value in sums.items() if count}
