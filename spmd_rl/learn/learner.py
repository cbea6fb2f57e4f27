"""`Learner`: advantages, logprobs where they are needed, updates, and the algorithm's own state."""

from spmd_rl.batch import Batch
from spmd_rl.config.schema import RlvrConfig
from spmd_rl.dist import World
from spmd_rl.learn import policy_loss, prepare
from spmd_rl.rollout import Collected
from spmd_rl.train.base import Metrics, TrainBackend


class Learner:
    """One step of learning. Stateful, though GRPO itself remembers nothing between steps."""

    def __init__(self, cfg: RlvrConfig, policy: TrainBackend, reference: TrainBackend | None, world: World) -> None:
        self._policy, self._reference, self._world = policy, reference, world
        self._settings = cfg.algorithm
        self._num_updates = cfg.train.updates_per_step
        self._temperature = cfg.rollout.temperature
        self._loss = policy_loss.bind(cfg.algorithm)
        self.plan: prepare.Plan | None = None
        """What the last `prepare` decided; the sample log reads it."""
        self._num_empty_steps = 0

    def state(self) -> dict[str, int]:
        """See `checkpoint.Stateful`."""
        return {"num_empty_steps": self._num_empty_steps}

    def load_state(self, state: dict[str, int]) -> None:
        """See `checkpoint.Stateful`."""
        self._num_empty_steps = state["num_empty_steps"]

    def prepare(self, collected: Collected) -> list[Batch]:
        """[all] This rank's mini-batches, one per optimizer step, with all that the loss needs."""
        with self._world.phase("prepare"):
            self.plan = prepare.plan(collected, self._settings, self._num_updates)
            with self._world.phase("coordination"):
                self._world.agree("prepare: plan", [self.plan.keys, self.plan.advantages, self.plan.weights])
            batches = prepare.batches(collected, self.plan, self._num_updates)
            # With one update on samples of the current version, the update itself computes these very numbers.
            needs_old = self._num_updates > 1 or self.plan.stale
            if needs_old or self._reference:
                with self._world.phase("logprobs"):
                    self._fill_in(batches, needs_old)  # [all]
        return batches

    def _fill_in(self, batches: list[Batch], needs_old: bool) -> None:
        """[all] Logprobs of the policy before the step, if needed, and of the reference, if there is one."""
        if needs_old:
            with self._policy.awake():
                for batch in batches:
                    batch.old_logprobs, _ = self._policy.logprobs(batch, self._temperature)
        if self._reference:
            with self._reference.awake():
                for batch in batches:
                    batch.ref_logprobs, _ = self._reference.logprobs(batch, self._temperature)

    def update(self, batches: list[Batch]) -> Metrics:
        """[all] One optimizer step per mini-batch; none where no sample of any rank trains. Equal on all ranks."""
        assert self.plan is not None
        with self._world.phase("update"), self._policy.awake():
            metrics: list[Metrics] = []
            for number, batch in enumerate(batches):
                if number in self.plan.minibatches:
                    metrics.append(self._policy.update(batch, self._loss, self._temperature))
        if not metrics:
            self._num_empty_steps += 1
        mean = {key: sum(m[key] for m in metrics) / len(metrics) for key in metrics[0]} if metrics else {}
        return {_NAMES.get(key, key): value for key, value in mean.items()} | {
            "actor/empty_steps": self._num_empty_steps,
        }


_NAMES = {
    "loss": "actor/pg_loss",
    "grad_norm": "actor/grad_norm",
    "lr": "actor/lr",
    "skipped": "actor/skipped",
    "num_microbatches": "actor/backward_steps",
}
