"""`ReceivedRollouts`: samples of other ranks, received by a trainer rank in meetings.

With `placement.mode=lent` its own engine takes part (`LentReplica`), from the end of an update to that of its next
step.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from spmd_rl.config.schema import RlConfig
from spmd_rl.data import EnvTasks, Prompts
from spmd_rl.distributed import World
from spmd_rl.engine.base import Engine
from spmd_rl.placement.generator import ANSWERED, Begin
from spmd_rl.placement.hand_over import Parts, SentSlice, gather_reports, parts_of, places, send_slices
from spmd_rl.placement.meetings import Meeting, Meetings
from spmd_rl.rollout import Collected, RankReport, Sampling, check_errors
from spmd_rl.rollout.ahead import StepsAhead
from spmd_rl.rollout.coordinator import Coordinator
from spmd_rl.rollout.player import Player
from spmd_rl.rollout.questions import QuestionShare
from spmd_rl.rollout.shared_step import SharedStep
from spmd_rl.rollout.step_plan import Cursor, GroupSlice
from spmd_rl.rollout.step_run import StepRun
from spmd_rl.types import Group, Prompt

STEP_POLL_SECONDS = 0.002
"""Interval of polls for the end of a step."""


class LentReplica:
    """The engine of a trainer rank, lent to generation."""

    def __init__(self, cfg: RlConfig, player: Player, steps: StepsAhead) -> None:
        self.engine: Engine = player.engine
        self._cfg, self._player, self._steps = cfg, player, steps
        self._runner = asyncio.Runner()
        self._left: dict[GroupSlice, SentSlice] = {}
        """Slices, finished or not, that the last step did not use."""

    def play(self, step: int) -> tuple[SharedStep, RankReport]:
        """[replica]: generate with the others until the step's end; return its counters and this rank's report."""
        steps, world = self._steps, self._player.world
        # This engine holds the policy after the step before.
        claim = steps.claim(lambda: step - 1)
        shared = SharedStep(steps.coordinator, claim, self._cfg.rollout, world.rank)
        run = StepRun(step, shared, self._player)
        with self.engine.awake(), run.driven():
            if self.engine.leads:
                steps.join()
                self._runner.run(run.until_end())
                self._leave(shared)
        self.engine.sleep()
        return shared, shared.report(run, [*self._left], self.engine.leads)

    def _leave(self, shared: SharedStep) -> None:
        used = set(shared.coordinator.used_tickets())
        self._left = {}
        if self._cfg.rollout.partial_rollout:
            kept = {one: group.samples for one, group in shared.finished.items() if one.ticket not in used}
            self._left = {one: SentSlice(*one, samples) for one, samples in kept.items()}
            self._left |= {one: SentSlice(*one, (), begun) for one, begun in self._player.left.items()}
        self._steps.leave([*self._left])

    def hand_over(self, parts: Parts) -> None:
        """Add the slices that other replicas take over."""
        for one, sent in sorted(self._left.items()):
            parts[self._steps.given[one]].append(sent)

    def answer(self, share: QuestionShare) -> list[Group]:
        """[replica]: answer held-out questions; return the answers, on its first rank."""
        with self.engine.awake(), self.engine.driven():
            if self.engine.leads:
                self._runner.run(self._player.answer(share.claim, share.finish))
        return share.groups() if self.engine.leads else []

    def close(self) -> None:
        """Cancel running episodes; idempotent."""
        if self._player.running:
            self._runner.run(self._player.cancel())
        self._runner.close()


class ReceivedRollouts:
    """Rollouts of other ranks, received in meetings. Stateful, like `Rollouts`."""

    def __init__(
        self,
        cfg: RlConfig,
        prompts: Prompts | EnvTasks,
        world: World,
        trainers: World,
        steps: StepsAhead,
        lent: LentReplica | None = None,
    ) -> None:
        """world: of both sides. trainers: of the trainer ranks."""
        self.prompts, self.meetings = prompts, Meetings(world.store)
        self._cfg, self._world, self._trainers, self._steps, self._lent = cfg, world, trainers, steps, lent
        self._ranks = [world.ranks.index(rank) for rank in trainers.ranks]
        self._cursor, self._version = Cursor(), 0
        self._previous: Coordinator | None = None

    def state(self) -> dict[str, Any]:
        """See `checkpoint.Stateful`."""
        return self._cursor.state(self.prompts.fingerprint())

    def load_state(self, state: dict[str, Any]) -> None:
        """Load a state. UserError if prompts have changed."""
        self._cursor = Cursor.of_state(state, self.prompts.fingerprint())

    def begin(self, start: int) -> None:
        """[all] of both sides: start the generation of steps after `start`."""
        # Warm-up steps on demonstrations generate nothing.
        first, cursor = max(start, self._cfg.num_shown) + 1, self._cursor
        begin = Begin(first, start, cursor.next, list(cursor.skipped))
        self._world.broadcast("start: first step", msgspec.to_builtins(begin), src=self._ranks[0])  # [all]
        self._steps.begin(first, start, cursor)

    def published(self, publish: Callable[[int], dict[str, float]], version: int, probed: bool) -> dict[str, float]:
        """[all] of both sides: publish a version, in a meeting."""
        self._version = version
        with self.meetings.opened(self._trainers, Meeting("publish", version, probed)):  # [train]
            return publish(version)  # [all]

    def collect(self, step: int) -> Collected:
        """[train]: wait until the step is generated, with this rank's help if it is lent."""
        steps, world, began = self._steps, self._world, time.perf_counter()
        coordinator = steps.coordinator
        assert steps.number == step, "steps are collected in order"
        report, finished = RankReport.empty(), {}
        with self._trainers.phase("generate"):
            if self._lent:
                shared, report = self._lent.play(step)  # [replica]
                finished = shared.finished
            self._wait(f"generate: step {step} from generator ranks", coordinator.ended)
            report.pace = {"placement/train_wait_seconds": time.perf_counter() - began}
            with self.meetings.opened(self._trainers, Meeting("hand over", step)):  # [train]
                to = places(coordinator.used_tickets(), self._trainers.size)
                reports = gather_reports(world, report, to)  # [all]
                has_advanced = steps.advance()
                assert has_advanced, "a hand over before every lent replica has listed its unfinished slices"
                slices = {one: group.samples for one, group in finished.items() if one.ticket in to}
                parts = parts_of(slices, self._ranks, to)
                if self._lent:
                    self._lent.hand_over(parts)
                found = {one.place: one.samples for one in send_slices(world, parts)}  # [all]
        with self._trainers.phase("coordination"):
            # By slice: each group has the answers of one slice until the step is collected.
            groups = {
                one: Group(self.prompts.ticket(one.ticket, self._cfg.seed)[1], one.ticket, tuple(samples))
                for one, samples in found.items()
            }
            collected = Collected.of(step, self._cfg.rollout, coordinator, reports, groups)
            lag = float(collected.table.answers["lag"].max(initial=0))
            collected = replace(collected, pace={**collected.pace, "rollout/lag/max": lag})
            if self._previous:
                self._previous.forget(shared=self._trainers.rank == 0)
            self._previous, self._cursor = coordinator, steps.cursor
        return check_errors(collected, self._cfg.reward, self._cfg.rollout, self._trainers)  # [train]

    def rest(self) -> None:
        """Free a lent engine's memory, see `RolloutSource`."""
        if self._lent:
            self._lent.engine.sleep()

    def answer(self, prompts: Sequence[Prompt], sampling: Sequence[Sampling]) -> list[Group]:
        """[train]: return this rank's share of the answers to held-out prompts, by the newest version."""
        version, replicas, mine = self._version, self._steps.replicas, list[Group]()
        key, store = ANSWERED.format(version), self._world.store
        if self._lent:
            mine = self._lent.answer(QuestionShare((prompts, sampling), replicas.mine, replicas.count))
            store.add(key, int(self._lent.engine.leads))
        self._wait("eval: answers from generator ranks", lambda: store.add(key, 0) == replicas.count)
        with self.meetings.opened(self._trainers, Meeting("eval", version)):  # [train]
            slices = {GroupSlice(group.ticket, 0): group.samples for group in mine}
            to = places(range(len(prompts)), self._trainers.size)
            answers = send_slices(self._world, parts_of(slices, self._ranks, to))  # [all]
        if self._trainers.rank == 0:
            store.delete_key(key)
        found = {one.ticket: one.samples for one in answers}
        return [Group(prompts[ticket], ticket, found[ticket]) for ticket in sorted(found)]

    def finish(self) -> None:
        """[train]: end the run of the generator ranks."""
        with self.meetings.opened(self._trainers, Meeting("end")):  # [train]
            pass

    def _wait(self, name: str, until: Callable[[], bool]) -> None:
        """Wait until `until()` is true, on the first trainer rank; the others wait in the next collective."""
        if self._trainers.rank == 0:
            with self._world.journal.waiting(name):
                while not until():
                    time.sleep(STEP_POLL_SECONDS)
