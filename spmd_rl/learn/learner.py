"""`Learner`: one step of learning, from collected samples to updated weights."""

from collections.abc import Callable
from dataclasses import astuple, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from spmd_rl.algo import AGGREGATIONS
from spmd_rl.algo.kl import adaptive_coef
from spmd_rl.algo.moments import Moments
from spmd_rl.base.errors import tell
from spmd_rl.batch import Batch, pack
from spmd_rl.config.schema import RlConfig
from spmd_rl.learn import prepare, token_advantages
from spmd_rl.learn.advantages import Samples, StepTable, credit, repetition_penalties, verdict_parts
from spmd_rl.learn.custom import answer_advantage, bind
from spmd_rl.learn.hints import Render
from spmd_rl.learn.losses import MismatchMonitor, bind_loss, bind_value_loss, mean_over, measure_mismatch, update
from spmd_rl.learn.prepare import UpdatePlan
from spmd_rl.learn.teachers import Teachers
from spmd_rl.learn.transfer import RoleShards, fill_in, give_advantages, redistribute
from spmd_rl.learn.utilization import forward_flops, peak_flops
from spmd_rl.rollout.table import trajectories_of
from spmd_rl.train import Roles
from spmd_rl.train.base import Metrics

FLAT_STEPS = 5
"""Consecutive steps without an advantage before a warning."""


class Learner:
    """One step of learning. State: factor of KL coefficients, moments of scores, counts of steps without advantages or
    samples.
    """

    def __init__(self, cfg: RlConfig, roles: Roles, render: Render | None = None) -> None:
        """render: a tokenizer's, for the hints of teachers."""
        rollout, algorithm = cfg.rollout, cfg.algorithm
        self._policy, self._reference, self._critic, self._frozen = roles
        self._teachers = Teachers.of(roles, cfg.teacher, rollout.temperature, render)
        self._world = world = roles.policy.layout.world
        self._seed, self._rollout, self._num_updates = cfg.seed, rollout, cfg.train.updates_per_step
        self._replayed = cfg.policy.router_replay
        self._peak = peak_flops(cfg.track.device.flops, world.device, cfg.policy.dtype)
        limit = rollout.max_answer_tokens
        self._settings = replace(
            algorithm,
            loss_agg_length=algorithm.loss_agg_length or limit,
            # DAPO's default: a fifth of the limit.
            overlong_tokens=algorithm.overlong_tokens or -(-limit // 5),
        )
        self._monitor = MismatchMonitor(algorithm.bounds, world)
        # Age of the oldest token of the step, in versions.
        self._max_lag = 0.0
        self._monitored = False
        self.plan: UpdatePlan | None = None
        self._num_empty_steps = 0
        self._num_flat_steps = 0
        # Factor of the KL coefficients, set by the adaptive controller.
        self._kl_factor = 1.0
        self._scores = Moments()
        self._prepared: Metrics = {}

    def state(self) -> dict[str, Any]:
        """See `checkpoint.Stateful`; return the learner's state."""
        return {
            "num_empty_steps": self._num_empty_steps,
            "num_flat_steps": self._num_flat_steps,
            "kl_factor": self._kl_factor,
            "scores": list(astuple(self._scores)),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """See `checkpoint.Stateful`; restore the learner's state."""
        self._num_empty_steps, self._kl_factor = state["num_empty_steps"], state["kl_factor"]
        self._num_flat_steps = state["num_flat_steps"]
        self._scores = Moments(*state["scores"])

    def prepare(self, collected: Samples) -> list[Batch]:
        """[all] Return this rank's mini-batches with all columns of the loss."""
        settings, rollout, data = self._settings, self._rollout, self._policy.layout.data
        with self._world.phase("prepare"):
            penalties = None
            if settings.repetition_coef:
                trajectories = chain.from_iterable(trajectories_of(group.samples) for group in collected.groups)
                penalties = repetition_penalties(trajectories, settings, self._world)  # [all]
            names = list(settings.reward_weights) if settings.advantage == "gdpo" else []
            terms = verdict_parts(collected.groups, names, self._world) if names else None  # [all]
            with self._world.phase("coordination"):
                greedy = rollout.answers_per_prompt if settings.uses_greedy else None
                table = StepTable.of(collected.table, greedy)
                # Bound to the moments before this step: `_take_kl` computes the same step again.
                credited = partial(credit, table, settings, self._scores, rollout.max_answer_tokens, penalties, terms)
                table, self._scores = credited()
                shares = prepare.Shares(self._num_updates, data.size, self._policy.hidden_size)
                aggregate = bind(AGGREGATIONS[settings.loss_agg], settings)
                self.plan = prepare.plan(collected.step, table, shares, aggregate)
            if not self._teachers:
                self._check_signal()
            own = self.plan.samples_of(collected.groups, self._world.rank)
            packed = pack(own, collected.step - 1, rollout.truncates, self._replayed, self._policy.sees)
            if self._teachers and self._teachers.hints:
                packed.hints = self._teachers.hints(packed, collected.groups)
            batches = redistribute(packed, self.plan, self._num_updates, data, self._world)  # [all]
            needs_old = self._needs_old(self.plan)
            if needs_old or self._reference or self._critic:
                with self._world.phase("logprobs"):
                    fill_in(  # [all]
                        batches,
                        self.plan,
                        self._policy,
                        self._reference,
                        self._critic,
                        needs_old=needs_old,
                        temperature=rollout.temperature,
                        world=self._world,
                    )
            self._max_lag, self._monitored = float(collected.table.answers["lag"].max(initial=0)), needs_old
            if needs_old:
                mismatch = measure_mismatch(batches, settings.correction.level, data)  # [all]
                self._monitor.check(self.plan.step, mismatch | {"rollout/lag/max": self._max_lag})
            kl_reward_coef = settings.kl_reward_coef * self._kl_factor
            if kl_reward_coef and answer_advantage(settings):
                self._take_kl(batches, credited, len(table.advantages), kl_reward_coef)  # [all]
            self._prepared = token_advantages.finish(  # [all]
                batches, self.plan, settings, kl_reward_coef, data, self._seed
            )
            if self._teachers:
                with self._world.phase("logprobs"):
                    self._teachers.fill_in(batches, self.plan, collected.table)  # [all]
                for batch in batches:
                    self._teachers.add_to_advantages(batch)
            self.plan = token_advantages.logged(batches, self.plan, settings, data, bool(self._teachers))  # [all]
            if self._peak:
                flops = self._flops(collected.table.answers, needs_old)
                self._prepared["seconds_at_peak"] = flops / (self._peak * self._world.size)
        return batches

    def _flops(self, answers: np.ndarray, needs_old: bool) -> float:
        # Ticket and answer number in one integer.
        width, plan = 1 + answers["answer"].max(initial=0), self.plan
        trained = answers[np.isin(answers["ticket"] * width + answers["answer"], plan.keys @ (width, 1))]
        updates = 3 * self._settings.sample_epochs
        passes = [(self._policy, needs_old + updates * (plan.step > self._settings.critic_warmup))]
        passes += [(self._critic, 1 + updates)] if self._critic else []
        # Of several teachers, each sees its own domain alone.
        passes += [(role, 1) for role in (self._reference, next(iter(self._frozen.values()), None)) if role]
        generated = forward_flops(self._policy.size, answers)
        return generated + sum(count * forward_flops(role.size, trained) for role, count in passes)

    def _needs_old(self, plan: UpdatePlan) -> bool:
        settings = self._settings
        # A single update on samples of the current version computes the old logprobs itself.
        several = self._num_updates * settings.sample_epochs > 1
        # With `old_logprobs=engine` the engine's logprobs serve as the old ones.
        proximal = settings.old_logprobs == "trainer"
        if proximal and (several or plan.stale):
            return True
        return self._monitor.stops or token_advantages.needs_old_logprobs(settings)

    def _take_kl(
        self, batches: list[Batch], credited: Callable[..., tuple[StepTable, Moments]], count: int, coef: float
    ) -> None:
        """[all] Subtract the KL to the reference from the rewards of answers or turns, before their baseline.

        credited: computes the table again. count: of the turns that have an advantage.
        """
        settings, data = self._settings, self._policy.layout.data
        kl = token_advantages.turn_kl(batches, self.plan, count, settings, data)  # [all]
        table, self._scores = credited(kl=coef * kl)
        self.plan = prepare.with_scores(self.plan, table)
        give_advantages(batches, self.plan, data)

    def _check_signal(self) -> None:
        plan = self.plan
        assert plan is not None
        self._num_flat_steps = 0 if plan.advantages.any() else self._num_flat_steps + 1
        if (count := self._num_flat_steps) and count % FLAT_STEPS == 0 and self._world.rank == 0:
            line = f"no answer had an advantage in {count} steps in a row: equal scores in each group, or none left"
            tell(f"warning: step {plan.step}: {line}")

    def update(self, batches: list[Batch]) -> Metrics:
        """[all] Run one optimizer step per role, mini-batch and epoch; of the policy after `critic_warmup`."""
        assert self.plan is not None
        metrics: Metrics = {}
        with self._world.phase("update"):
            used = self.plan.visits(self._settings.sample_epochs, self._seed)
            self._num_empty_steps += not used
            if self._critic:
                value_loss = bind_value_loss(self._settings)
                shards = RoleShards(self._policy, self._critic, self.plan, self._world)
                shares = shards.share("update: critic", batches)  # [all]
                with self._critic.awake():
                    metrics |= mean_over([self._critic.update(shares[i], value_loss) for i in used], "critic")  # [all]
            if self.plan.step > self._settings.critic_warmup:
                loss = bind_loss(self._settings, self._settings.kl_coef * self._kl_factor)
                loss = self._teachers.loss(loss) if self._teachers else loss
                metrics |= update(self._policy, [batches[i] for i in used], loss, self._rollout.temperature)  # [all]
            self._follow()
            if not self._monitored:
                self._monitor.check(self.plan.step, metrics | {"rollout/lag/max": self._max_lag})
        return metrics | self._prepared | self._own_metrics(metrics)

    def _follow(self) -> None:
        """[all] Move the reference towards the policy if due."""
        every = self._reference.sync_steps if self._reference else None
        if every is not None and self.plan.step % every == 0:
            with self._policy.awake(), self._reference.awake():
                self._reference.follow(self._policy)  # [all]

    def _own_metrics(self, mean: Metrics) -> Metrics:
        """Return the learner's metrics; adapt the KL coefficient to the step's mean KL."""
        plan, settings = self.plan, self._settings
        own: Metrics = {"actor/empty_steps": self._num_empty_steps} | plan.metrics()
        if len(plan.keys):
            own["critic/rewards/mean"] = plan.mean_reward
        if "critic/kl" in mean:
            own["critic/kl_coef"] = self._kl_factor * (settings.kl_reward_coef or settings.kl_coef)
            if settings.target_kl is not None:
                kl_per_answer = mean["critic/kl"] * int(plan.num_sampled.sum()) / plan.num_answers
                adapt = bind(adaptive_coef, settings)
                self._kl_factor = adapt(self._kl_factor, kl_per_answer, plan.num_answers)
        return own
