"""`Learner`: a step of learning, from collected samples to updated weights, and the algorithm's own state."""

from dataclasses import astuple, replace
from typing import Any

import numpy as np

from spmd_rl.algo.kl import adaptive_coef
from spmd_rl.algo.moments import Moments
from spmd_rl.batch import Batch
from spmd_rl.config.schema import RlvrConfig
from spmd_rl.distributed import World
from spmd_rl.errors import RunFailed, tell
from spmd_rl.learn import mismatch, prepare, repetition, token_advantages
from spmd_rl.learn.binding import bind
from spmd_rl.learn.logprobs import RoleShards, fill_in
from spmd_rl.learn.policy_loss import bind_loss
from spmd_rl.learn.redistribute import redistribute
from spmd_rl.learn.roofline import Roofline
from spmd_rl.learn.value_loss import bind_value_loss
from spmd_rl.rollout import Collected
from spmd_rl.train.base import CriticBackend, Metrics, TrainBackend

FLAT_STEPS = 5
"""After so many steps in a row without an advantage there is a warning."""


class Learner:
    """One step of learning. Stateful: the strength of the KL penalty, the moments of the scores, empty steps."""

    def __init__(
        self,
        cfg: RlvrConfig,
        policy: TrainBackend,
        reference: TrainBackend | None,
        critic: CriticBackend | None,
        world: World,
    ) -> None:
        self._policy, self._reference, self._critic, self._world = policy, reference, critic, world
        self._seed, self._max_tokens = cfg.seed, cfg.rollout.max_answer_tokens
        limit = cfg.rollout.max_answer_tokens
        self._settings = replace(
            cfg.algorithm,
            loss_agg_length=cfg.algorithm.loss_agg_length or limit,
            overlong_tokens=cfg.algorithm.overlong_tokens or -(-limit // 4),
        )
        self._greedy_answer = cfg.rollout.answers_per_prompt if cfg.algorithm.uses_greedy else None
        self._num_updates = cfg.train.updates_per_step
        self._temperature, self._truncated = cfg.rollout.temperature, cfg.rollout.truncates
        self._replayed = cfg.policy.router_replay
        self._watch = mismatch.Watch(cfg.algorithm.bounds, world)
        self._oldest = 0.0  # age of a token of the step, in versions
        self._watched = False
        self.plan: prepare.Plan | None = None
        """The plan of the last `prepare`; the sample log reads it."""
        self._num_empty_steps = 0
        self._num_flat_steps = 0
        """The last so many steps had no advantage to train on."""
        self._kl_factor = 1.0  # what the adaptive controller has made of the KL coefficients
        self._scores = Moments()
        self._prepared: Metrics = {}
        self._roofline = Roofline(cfg, policy, reference, critic, world)

    def state(self) -> dict[str, Any]:
        """See `checkpoint.Stateful`."""
        return {
            "num_empty_steps": self._num_empty_steps,
            "num_flat_steps": self._num_flat_steps,
            "kl_factor": self._kl_factor,
            "scores": list(astuple(self._scores)),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """See `checkpoint.Stateful`."""
        self._num_empty_steps, self._kl_factor = state["num_empty_steps"], state["kl_factor"]
        self._num_flat_steps = state["num_flat_steps"]
        self._scores = Moments(*state["scores"])

    def prepare(self, collected: Collected) -> list[Batch]:
        """[all] This rank's mini-batches, one per optimizer step, with all that the loss needs."""
        settings, data = self._settings, self._policy.layout.data
        with self._world.phase("prepare"):
            penalties = None
            if settings.repetition_coef:
                penalties = repetition.penalties(collected, settings, self._world)  # [all]
            with self._world.phase("coordination"):
                self.plan, self._scores = prepare.plan(
                    collected,
                    settings,
                    self._scores,
                    num_updates=self._num_updates,
                    num_shards=data.size,
                    hidden_size=self._policy.hidden_size,
                    max_tokens=self._max_tokens,
                    greedy_answer=self._greedy_answer,
                    penalties=penalties,
                )
            self._watch_signal()
            batches = redistribute(  # [all]
                collected, self.plan, self._num_updates, data, self._world, self._truncated, self._replayed
            )
            # With one update on samples of the current version, the update itself computes these very numbers.
            proximal = settings.old_logprobs == "trainer"  # else the engine's logprobs take their place
            needs_old = proximal and (self._num_updates > 1 or self.plan.stale)
            needs_old = needs_old or self._watch.stops or token_advantages.needs_old_logprobs(settings)
            if needs_old or self._reference or self._critic:
                with self._world.phase("logprobs"):
                    fill_in(  # [all]
                        batches,
                        self.plan,
                        self._policy,
                        self._reference,
                        self._critic,
                        needs_old=needs_old,
                        temperature=self._temperature,
                        world=self._world,
                    )
            self._oldest, self._watched = float(collected.outcomes.answers["lag"].max(initial=0)), needs_old
            if needs_old:
                found = mismatch.measure(batches, settings.correction.level, data)  # [all]
                self._watch.check(self.plan.step, found | {"rollout/lag/max": self._oldest})
            kl_reward_coef = settings.kl_reward_coef * self._kl_factor
            self._prepared = token_advantages.finish(  # [all]
                batches, self.plan, settings, kl_reward_coef, data, self._seed
            )
            self._prepared |= self._roofline.metrics(collected, self.plan, needs_old)
        return batches

    def _watch_signal(self) -> None:
        """Warn where steps in a row have nothing to learn from. RunFailed, on all ranks, if the settings ask for it."""
        plan = self.plan
        assert plan is not None
        self._num_flat_steps = 0 if plan.advantages.any() else self._num_flat_steps + 1
        count, settings = self._num_flat_steps, self._settings
        if settings.variance_top_p is not None and count >= settings.variance_patience:
            raise RunFailed(f"algorithm.variance_top_p: in {count} steps in a row no group's scores varied enough")
        if count and count % FLAT_STEPS == 0 and self._world.rank == 0:
            line = f"nothing to learn from in {count} steps in a row: the scores of each group are equal"
            tell(f"warning: step {plan.step}: {line}")

    def update(self, batches: list[Batch]) -> Metrics:
        """[all] One optimizer step per mini-batch; none where no sample of any rank trains. Equal on all ranks."""
        assert self.plan is not None
        metrics: Metrics = {}
        with self._world.phase("update"):
            used = np.unique(self.plan.minibatches).tolist()
            self._num_empty_steps += not used
            if self._critic:
                value_loss = bind_value_loss(self._settings)
                shards = RoleShards(self._policy, self._critic, self.plan, self._world)
                shares = shards.share("update: critic", batches)  # [all]
                with self._critic.awake():
                    metrics |= _mean([self._critic.update(shares[i], value_loss) for i in used], "critic")  # [all]
            if self.plan.step > self._settings.critic_warmup:
                loss = bind_loss(self._settings, self._settings.kl_coef * self._kl_factor)
                with self._policy.awake():
                    updates = [self._policy.update(batches[i], loss, self._temperature) for i in used]  # [all]
                metrics |= mismatch.with_ess(_mean(updates, "actor"))
            if not self._watched:
                self._watch.check(self.plan.step, metrics | {"rollout/lag/max": self._oldest})
        return metrics | self._prepared | self._own_metrics(metrics)

    def _own_metrics(self, mean: Metrics) -> Metrics:
        """Metrics of the plan and of the learner's state. Adapts the KL coefficient to the step's mean KL."""
        plan, settings = self.plan, self._settings
        own: Metrics = {
            "actor/empty_steps": self._num_empty_steps,
            "actor/balance": plan.balance,
            "actor/left_out": plan.left_out,
        }
        if len(plan.keys):
            own["critic/rewards/mean"] = plan.mean_reward
        if "critic/kl" in mean:
            own["critic/kl_coef"] = self._kl_factor * (settings.kl_reward_coef or settings.kl_coef)
            if settings.target_kl is not None:
                kl_per_answer = mean["critic/kl"] * int(plan.num_sampled.sum()) / plan.num_answers
                adapt = bind(adaptive_coef, settings)
                self._kl_factor = adapt(self._kl_factor, kl_per_answer, plan.num_answers)
        return own


def _mean(updates: list[Metrics], role: str) -> Metrics:
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
