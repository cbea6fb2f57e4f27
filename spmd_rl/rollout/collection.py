"""Generation and scoring of one step, or of held-out answers, on every rank.

`Rollouts` holds a run's state, `StepRun` plays the slices of a step. Unfinished slices are aborted and restarted in a
later step, or carried on.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from spmd_rl.base.errors import tell
from spmd_rl.config.generation import GenerationSettings
from spmd_rl.data import EnvTasks, Prompts
from spmd_rl.distributed import World
from spmd_rl.engine.base import Engine
from spmd_rl.rollout.claims import claims
from spmd_rl.rollout.collected import Collected, RankReport, check_errors
from spmd_rl.rollout.coordinator import Coordinator, coordinate
from spmd_rl.rollout.episode import Sampling
from spmd_rl.rollout.kept import KeptAnswers
from spmd_rl.rollout.player import Player, Services
from spmd_rl.rollout.prompt_lengths import check_room, fit_prompts
from spmd_rl.rollout.questions import QuestionShare
from spmd_rl.rollout.shared_step import SharedStep
from spmd_rl.rollout.step_plan import Cursor, GroupSlice, plan_step
from spmd_rl.rollout.step_run import END, StepRun
from spmd_rl.types import Group, Prompt

AHEAD = "generate: ahead"


class Rollouts:
    """Rollouts of a run. State: the cursor of unused tickets; carried slices restart after a resume."""

    def __init__(
        self,
        settings: GenerationSettings,
        engine: Engine,
        prompts: Prompts | EnvTasks,
        services: Services,
        world: World,
    ) -> None:
        """[all] world: the ranks that generate."""
        self.prompts, self._longest = prompts, (settings.rollout.max_prompt_tokens, "")
        if settings.data is not None:
            sections = settings.rollout, settings.data, settings.reward
            self.prompts, *self._longest = fit_prompts(prompts, services.tokenizer, *sections, world)  # [all]
        self._settings, self._engine, self._world = settings, engine, world
        leads = world.gather("start: replicas", engine.leads)  # [all]
        self._replica, self._num_replicas = sum(leads[: world.rank]), sum(leads)
        self._player = Player(settings, engine, self.prompts, services, world, self._num_replicas)
        self._runner = asyncio.Runner()
        self._cursor = Cursor()
        self._carried: frozenset[GroupSlice] = frozenset()
        self._unused: dict[GroupSlice, Group] = {}
        """Carried slices that finished here."""
        self._ahead: StepRun | None = None
        """A step that started before the previous step's update."""
        self._previous: Coordinator | None = None

    def state(self) -> dict[str, Any]:
        """See `checkpoint.Stateful`."""
        return self._cursor.state(self.prompts.fingerprint())

    def load_state(self, state: dict[str, Any]) -> None:
        """Load a state. UserError if prompts have changed."""
        self._cursor = Cursor.of_state(state, self.prompts.fingerprint())

    def close(self) -> None:
        """Cancel unfinished episodes; idempotent."""
        if self._player.running:
            self._runner.run(self._player.cancel())
        self._runner.close()

    def check(self) -> None:
        """Raise UserError on all ranks if a prompt or an answer cannot fit."""
        settings = self._settings
        check_room(settings.rollout, settings.kv_tokens, *self._longest, self._engine.capacity.max_tokens)
        if settings.evaluates and not self.prompts.eval and self._world.rank == 0:
            tell("warning: eval.every: no prompt is held out, nothing is evaluated")

    def collect(self, step: int) -> Collected:
        """[all] Generate and score, with the policy after `step - 1` updates, until the step has its groups."""
        collected = self._generate(step)  # [all]
        collected = check_errors(collected, self._settings.reward, self._settings.rollout, self._world)  # [all]
        # 0 in all placements but `overlapped`.
        if step < self._settings.last_ahead and not collected.failure:
            # The policy is about to be updated, so these answers are one version behind.
            self.start_ahead(step + 1)  # [all]
        self.rest()
        return collected

    def rest(self) -> None:
        """Free the engine's memory, see `RolloutSource`."""
        self._engine.sleep()

    def _generate(self, step: int) -> Collected:
        world, engine, player = self._world, self._engine, self._player
        run, self._ahead = self._ahead or self._start_step(step), None
        assert run.number == step, "another step has started"
        run.resume()
        shared = run.source
        with world.phase("generate"), engine.awake():
            if engine.leads:
                shared.begin(run, self._unused)
            self._play(run)
            report = shared.report(run, sorted(player.running), engine.leads)
            # Early ranks wait here for the others' verdicts.
            reports = world.gather(END, report, RankReport)  # [all]
        with world.phase("coordination"):
            collected = Collected.of(step, self._settings.rollout, shared.coordinator, reports, shared.finished)
            collected = replace(collected, pace=run.pace(collected.table.answers["lag"], world))  # [all]
            used = collected.table.tickets.tolist()
            self._cursor, self._carried = self._cursor.after(used), collected.carried
            self._unused = {one: group for one, group in shared.finished.items() if one in collected.carried}
            # Replicas may still poll the keys of this step; since the gather none reads the step before.
            if self._previous:
                self._previous.forget(shared=world.rank == 0)
            self._previous = shared.coordinator
        return collected

    def start_ahead(self, step: int) -> None:
        """[all] Generate for a step until only verdicts and environments are awaited. The engine may then sleep or load
        weights before `collect` continues.
        """
        world, engine = self._world, self._engine
        assert not self._ahead and not self._player.running, "a step that has started has not been collected"
        self._ahead = run = self._start_step(step)
        with world.phase("generate"), engine.awake():
            with run.driven():
                if engine.leads:
                    self._runner.run(run.until_idle())
            # Ranks wait for each other here, since a collective of the update may have a time limit.
            world.barrier(AHEAD)  # [all]
        run.pause()

    def _play(self, run: StepRun) -> None:
        with run.driven():
            if self._engine.leads:
                self._runner.run(run.until_end())

    def _start_step(self, step: int) -> StepRun:
        s = self._settings.rollout
        with self._world.phase("coordination"):
            plan = plan_step(self._cursor, s, self._carried, self._priority)
            coordinator = coordinate(self._world.store, f"step{step}", plan, self._num_replicas)
            claim = claims(s.claim, coordinator, self._replica, self._num_replicas)
            shared = SharedStep(coordinator, claim, s, self._world.rank)
        return StepRun(step, shared, self._player)

    def _priority(self, ticket: int) -> float:
        return self.prompts.ticket(ticket, self._settings.seed)[1].priority

    def answer(
        self, prompts: Sequence[Prompt], sampling: Sequence[Sampling], kept: KeptAnswers | None = None
    ) -> list[Group]:
        """[all] Return this rank's share of the answers, one sample per `sampling`. kept: earlier answers, and the file
        for new ones.
        """
        mine = QuestionShare((prompts, sampling), self._replica, self._num_replicas, kept)
        with self._engine.awake(), self._engine.driven():
            if self._engine.leads:
                self._runner.run(self._player.answer(mine.claim, mine.finish))
        return mine.groups()
