"""The collection: one step of generating and scoring on every rank, or a set of held-out answers.

The loop of a replica: claim slices of groups while there is room, run their episodes over the engine, resolve the
tickets whose verdicts are all in, until the step has ended. What is left then is surplus: aborted and started again in
a later step, or carried on.

Left out: the rules of a step (`rounds.py`, `coordinator.py`, `claims.py`) and what its end means (`collected.py`).
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from spmd_rl.config.schema import RlvrConfig
from spmd_rl.data import EnvTasks, Prompts, counter_seed
from spmd_rl.distributed import World
from spmd_rl.distributed.notice import Notice
from spmd_rl.engine.base import Engine
from spmd_rl.errors import tell
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.rollout.claims import always, claims
from spmd_rl.rollout.collected import Collected, Generated, RankReport, StepResult, left_slices, review
from spmd_rl.rollout.coordinator import Coordinator, coordinate
from spmd_rl.rollout.engine_loop import EngineLoop
from spmd_rl.rollout.episode import Budget, Context, Episode, Sampling, first_of, in_order, play, single_turn
from spmd_rl.rollout.expected import ExpectedVerdicts
from spmd_rl.rollout.filters import reject_reason
from spmd_rl.rollout.outcomes import AnswerRow, SliceReport, answer_rows
from spmd_rl.rollout.prompt_lengths import check_room, drop_overlong
from spmd_rl.rollout.rounds import Cursor, GroupSlice, num_slots, plan_round
from spmd_rl.rollout.swap import Swap
from spmd_rl.rollout.tape import Begun, Handover, Tape, given
from spmd_rl.rollout.under_way import StepUnderWay
from spmd_rl.targets import import_coroutine
from spmd_rl.types import Environments, Group, Prompt, Sample, Scorer

END = "generate: end of step"
"""The collective at which the replicas meet when they know the step's end."""

BEGUN = "generate: begun ahead"
"""The collective at which the replicas meet when all that a step asks for waits for verdicts and environments."""

LEAVE_SECONDS = 0.01
"""What was asked last leaves this process meanwhile."""

SCORE_POLLS = 200
"""Polls, at most, until a rank that waits for verdicts asks again for a ticket."""

Samples = asyncio.Future[list[list[Sample]]]

_pack, _unpack = msgspec.msgpack.encode, msgspec.msgpack.Decoder(list[AnswerRow]).decode


class Rollouts:
    """Stateful: the cursor says which tickets no step has used. What is carried starts again after a resume."""

    def __init__(
        self,
        cfg: RlvrConfig,
        engine: Engine,
        prompts: Prompts | EnvTasks,
        scorer: Scorer,
        tokenizer: Tokenizer,
        world: World,
        episode: Episode | None = None,
        environments: Environments | None = None,
        holder: int | None = None,
        handover: Handover | None = None,
        leaves: bool = False,
    ) -> None:
        """[all] `world`: the ranks that generate. `episode`: default, the one that `rollout.target` names, or one turn.

        With `environments`, `prompts` are their tasks, and what they say is known when they begin. holder: the rank,
        of the world that trains, which will hold this rank's samples; default: this rank. handover: where
        some ranks leave between two steps, as this one if it `leaves`, how others go on with what they have begun.
        """
        self.prompts, self._longest = prompts, (cfg.rollout.max_prompt_tokens, "")
        if environments is None:
            sections = cfg.rollout, cfg.data, cfg.reward
            self.prompts, *self._longest = drop_overlong(prompts, tokenizer, *sections, world)  # [all]
        self._cfg, self._settings = cfg, cfg.rollout
        self._engine, self._tokenizer, self._world = engine, tokenizer, world
        self._scorer = ExpectedVerdicts(scorer, cfg.reward, world.journal)
        self._environments = environments
        self._holder = world.rank if holder is None else holder
        self._handover, self._leaves = handover, leaves
        self._tapes: dict[GroupSlice, dict[int, Tape]] = {}
        """Of what runs here, by answer."""
        self._left: dict[GroupSlice, int] = {}
        """What has been begun, and on which rank, and waits for somebody to go on with it."""
        target = cfg.rollout.target
        self._episode = episode or (import_coroutine("rollout.target", target) if target else single_turn)
        leads = world.gather("start: replicas", engine.leads)  # [all]
        self._replica, self._num_replicas = sum(leads[: world.rank]), sum(leads)
        self._engine_loop = EngineLoop(engine, world)
        self._notice = Notice(world.rank)
        self._runner = asyncio.Runner()
        self._cursor = Cursor()
        self._running: dict[GroupSlice, Samples] = {}
        self._finished: dict[GroupSlice, Group] = {}
        """Those of this step; with `partial_rollout`, also what an earlier step did not use."""
        self._reports: dict[GroupSlice, SliceReport] = {}
        """What this rank reports of each of these at the end of the step."""
        self._carried: frozenset[GroupSlice] = frozenset()
        """Those of all replicas."""
        self._previous: Coordinator | None = None
        self._begun: StepUnderWay | None = None
        """Ahead of its step, by `begin`."""
        turns_follow = self._episode is not single_turn  # a verdict or a reply of an environment
        self._patience = cfg.placement.patience if turns_follow else 0.0
        s = self._settings
        self._budget = Budget(s.max_context_tokens or engine.capacity.max_tokens, s.max_turns)
        self._num_slots = num_slots(s, self._num_replicas, engine.capacity.max_running)

    def state(self) -> dict[str, Any]:
        """See `checkpoint.Stateful`."""
        return self._cursor.state(self.prompts.fingerprint())

    def load_state(self, state: dict[str, Any]) -> None:
        """See `checkpoint.Stateful`. UserError if the tickets would now stand for other prompts."""
        self._cursor = Cursor.of_state(state, self.prompts.fingerprint())

    def close(self) -> None:
        """Give up what is under way; idempotent."""
        if self._running:
            self._runner.run(self._cancel())
        self._runner.close()

    def check(self) -> None:
        """UserError, alike on all ranks, for a prompt or an answer that cannot fit."""
        check_room(self._settings, self._cfg.engine.kv_tokens, *self._longest, self._engine.capacity.max_tokens)
        if self._cfg.eval.every and not self.prompts.eval and self._world.rank == 0:
            tell("warning: eval.every: no prompt is held out, nothing is evaluated")

    def collect(self, step: int) -> Collected:
        """[all] Generate and score, with the policy after `step - 1` updates, until the step has its groups."""
        generated = self.generate(step)  # [all]
        with self._world.phase("coordination"):
            collected = generated.result.collected(step, generated.finished)
            collected = replace(collected, pace=generated.pace)
        return review(collected, self._cfg.reward, self._cfg.rollout, self._world)  # [all]

    def generate(self, step: int, swap: Swap | None = None) -> Generated:
        """[all] What comes of a step, before anybody has looked at it; the next call begins the next step's tickets.

        swap: a policy that may come meanwhile.
        """
        s, world, engine = self._settings, self._world, self._engine
        under_way, self._begun = self._begun or self._start_step(step, swap), None
        assert under_way.number == step, "another step has begun"
        under_way.come_back()
        coordinator = under_way.coordinator
        with world.phase("generate"), engine.awake():
            num_aborted = 0
            with under_way.driven(engine, self._engine_loop):
                if engine.leads:
                    num_aborted = self._runner.run(self._until_end(under_way))
            report = RankReport(
                finished=list(self._reports.values()),
                running=sorted(self._running),
                left=sorted(self._tapes) if self._leaves else [],
                leaves=self._leaves,
                counted=sorted(coordinator.counted),
                end=coordinator.end_mark(),
                idle_seconds=under_way.idle_seconds if engine.leads else None,
                seconds=under_way.seconds,
                num_aborted=0 if s.partial_rollout else num_aborted,
                prompt_tokens=(under_way.num_asked, under_way.num_cached) if engine.leads else (0, 0),
            )
            reports = world.gather(END, report, RankReport)  # [all] who comes early waits here for the others' verdicts
        with world.phase("coordination"):
            result = StepResult.of(s, coordinator, reports)
            pace = under_way.pace(result.outcomes.answers["lag"], world)  # [all]
            generated = Generated(report, result, self._finished, pace)
            self._cursor = self._cursor.after(result.used)
            self._carried = result.carried
            self._finished = {
                group_slice: group for group_slice, group in self._finished.items() if group_slice in result.carried
            }
            self._left = left_slices(self._left, reports, result.used)
            if self._previous:
                self._previous.forget(shared=world.rank == 0)
            self._previous = coordinator
        return generated

    def begin(self, step: int) -> None:
        """[all] Generate ahead for a step, until this rank's engine has nothing to compute: all waits for verdicts and
        environments. `collect` goes on with it; before that the engine may sleep, and load a newer policy."""
        world, engine = self._world, self._engine
        assert not self._begun and not self._running, "a step that has begun has not been collected"
        self._begun = under_way = self._start_step(step)
        with world.phase("generate"), engine.awake():
            with under_way.driven(engine, self._engine_loop):
                if engine.leads:
                    self._runner.run(self._until_idle(under_way))
            world.barrier(BEGUN)  # [all] here, and not in a collective of the update that may have a time limit
        under_way.leave()

    def _start_step(self, step: int, swap: Swap | None = None) -> StepUnderWay:
        """Agree on what it asks for, without meeting anybody."""
        with self._world.phase("coordination"):
            round = plan_round(self._cursor, self._settings, self._carried)
            coordinator = coordinate(self._world.store, f"step{step}", round, self._num_replicas)
            may_start = swap.may_start if swap and self._settings.partial_rollout else always
            claim = claims(self._settings.claim, coordinator, self._replica, self._num_replicas, may_start)
            self._reports.clear()
        return StepUnderWay(step, coordinator, claim, swap)

    async def _until_end(self, under_way: StepUnderWay) -> int:
        """Fill `_finished` until the step has ended. Returns the number of requests stopped then."""
        coordinator = under_way.coordinator
        if self._handover:
            coordinator.arrive()
        for group_slice in sorted(self._finished.keys() - self._reports.keys()):  # carried on from an earlier step
            self._report(group_slice, under_way)
        while True:
            with self._on_the_way_to_end():
                if coordinator.ended() and (not self._handover or coordinator.all_arrived()):
                    break
                if (swap := under_way.swap) and swap.due():
                    await self._engine_loop.change_policy(swap)
                await self._start_slices(under_way.claim.next)
            with self._on_the_way_to_end():
                await self._poll(coordinator)
            self._take_finished(under_way)
        self._notice.over()
        num_stopped = await self._engine_loop.drain()
        carries = self._settings.partial_rollout
        self._tapes = {one: self._tapes[one] for one in self._running if carries}
        if self._handover and self._leaves:
            self._handover.leave({one: given(tapes) for one, tapes in self._tapes.items()})
        if self._leaves or not carries:
            await self._cancel()
            self._engine_loop.clear()
        return num_stopped

    async def _until_idle(self, under_way: StepUnderWay) -> None:
        """Fill `_finished` until the engine has nothing to compute, or the step has ended."""
        await self._start_slices(under_way.claim.ahead)
        while not under_way.coordinator.ended() and not await self._engine_is_left():
            await self._engine_loop.poll()
            self._take_finished(under_way)
            await self._start_slices(under_way.claim.ahead)
        await self._engine_loop.drain()  # surplus, where the step has ended
        await asyncio.sleep(LEAVE_SECONDS)

    async def _engine_is_left(self) -> bool:
        """Whether the engine has nothing to compute, nor soon will have: see `placement.patience`."""
        until = time.perf_counter() + self._patience
        while not self._engine_loop.num_requests:
            if time.perf_counter() >= until or not self._outstanding:
                return True
            await self._engine_loop.poll()
        return False

    def _take_finished(self, under_way: StepUnderWay) -> None:
        """Report the slices whose episodes have all ended."""
        for group_slice in sorted(group_slice for group_slice, samples in self._running.items() if samples.done()):
            samples = in_order(self._running.pop(group_slice).result())
            _, prompt = self.prompts.ticket(group_slice.ticket, self._cfg.seed)
            self._finished[group_slice] = Group(prompt, group_slice.ticket, samples)
            self._report(group_slice, under_way)

    def _on_the_way_to_end(self) -> AbstractContextManager[object]:
        """While nothing runs here, a hang report finds this rank waiting for the step's end."""
        return nullcontext() if self._running else self._world.journal.waiting(END)

    async def _start_slices(self, claim: Callable[[int], list[GroupSlice]]) -> None:
        """Start as many as there is room for."""
        while slices := claim((self._num_slots - self._engine_loop.num_requests) // self._settings.slice_size):
            for group_slice in slices:
                self._running[group_slice] = self._start_slice(group_slice)
            await asyncio.sleep(0)  # their requests now stand in the engine loop, and count

    def _start_slice(self, group_slice: GroupSlice) -> Samples:
        s = self._settings
        epoch, prompt = self.prompts.ticket(group_slice.ticket, self._cfg.seed)
        sampling = Sampling(
            self._cfg.seed, "train", s.temperature, s.max_new_tokens, stop=s.stop_strings, **s.truncation
        )
        first = group_slice.number * s.slice_size
        answers = dict.fromkeys(
            range(s.answers_per_prompt + s.redundancy)[first:][: s.slice_size + s.redundancy], sampling
        )
        if self._cfg.algorithm.uses_greedy and first + s.slice_size >= s.answers_per_prompt:
            answers[s.answers_per_prompt] = replace(sampling, temperature=0.0)  # one more, with the last slice
        begun: Begun = {}
        if self._handover and group_slice in self._left:
            begun = self._handover.take(group_slice, self._left.pop(group_slice))
        tapes = self._tapes[group_slice] = {answer: Tape(begun.get(answer, ())) for answer in answers}
        return self._start(prompt, group_slice.ticket, epoch, answers, self._engine_loop, s.redundancy, tapes)

    def _start(
        self,
        prompt: Prompt,
        ticket: int,
        epoch: int,
        answers: dict[int, Sampling],
        engine_loop: EngineLoop,
        spare: int = 0,
        tapes: dict[int, Tape] | None = None,
    ) -> Samples:
        """One episode per answer, which is drawn as `answers` says. The future of all their samples, in order.

        spare: how many episodes, the last to end, are given up.
        """
        any_of_them = next(iter(answers.values()))
        seed = partial(counter_seed, any_of_them.seed, any_of_them.split, epoch, prompt.id)
        fixed = (self._budget, self._tokenizer, engine_loop, self._scorer, self._environments)
        tapes = tapes or {answer: Tape() for answer in answers}
        contexts = [
            Context(prompt, ticket, answer, seed, sampling, *fixed, tape=tapes[answer])
            for answer, sampling in answers.items()
        ]
        tasks = [asyncio.ensure_future(play(self._episode, ctx)) for ctx in contexts]
        samples = asyncio.ensure_future(first_of(tasks, len(tasks) - spare)) if spare else asyncio.gather(*tasks)
        samples.add_done_callback(lambda _: engine_loop.wake())
        return samples

    def _report(self, group_slice: GroupSlice, under_way: StepUnderWay) -> None:
        """The verdicts of this slice are all in; resolve the ticket if it is the last of it."""
        coordinator, version = under_way.coordinator, under_way.number - 1
        report = SliceReport.of(self._finished[group_slice], group_slice.number, self._holder, version)
        self._reports[group_slice] = report
        position = coordinator.round.order.position(group_slice.ticket)
        pooled = coordinator.pool(position, group_slice.number, _pack(report.answers))
        if pooled is not None:
            rows = answer_rows(row for answers in pooled for row in _unpack(answers))
            report.reject_reason = reject_reason(rows, self._settings.min_answers, self._settings.filter)
            coordinator.resolve(position, report.reject_reason is None)

    async def _cancel(self) -> None:
        """Cancel all episodes, and wait until they have ended."""
        for samples in self._running.values():
            samples.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        self._running.clear()

    async def _poll(self, coordinator: Coordinator) -> None:
        """Poll the engine loop once, or, with only verdicts left to wait for, until one of them arrives.

        A replica without tickets waits for those of the others.
        """
        if self._engine_loop.num_requests or not self._outstanding:
            await self._engine_loop.poll()
            self._tell_wait(self._engine_loop)
            return
        with self._world.phase("score"):
            waiting = self._outstanding
            for _ in range(SCORE_POLLS):
                await self._engine_loop.poll()
                self._tell_wait(self._engine_loop)
                if self._engine_loop.num_requests or self._outstanding != waiting or coordinator.ended():
                    break

    def _tell_wait(self, engine_loop: EngineLoop) -> None:
        """Say what is waited for while the engine has nothing to do, if that takes long."""
        if engine_loop.num_requests:
            self._notice.over()
        else:
            self._notice(f"waiting for {self._awaited}")

    @property
    def _outstanding(self) -> int:
        """Verdicts and replies of environments that are not there yet."""
        return self._scorer.outstanding + (self._environments.outstanding if self._environments else 0)

    @property
    def _awaited(self) -> str:
        """What there is to wait for."""
        awaited = [self._scorer] if self._scorer.outstanding else []
        if self._environments and self._environments.outstanding:
            awaited.append(f"{self._environments.outstanding} replies of environments")
        return " and ".join(map(str, awaited)) or "the answers of other ranks"

    def answer(self, prompts: Sequence[Prompt], sampling: Sequence[Sampling]) -> list[Group]:
        """[all] Return this rank's share of `prompts`, one sample for each `sampling`; no tickets and no filter."""
        mine = list(enumerate(prompts))[self._replica :: self._num_replicas]
        groups = []
        with self._engine.awake(), self._engine.driven():
            if self._engine.leads:
                groups = self._runner.run(self._answer_all(mine, dict(enumerate(sampling))))
        return groups

    async def _answer_all(self, mine: list[tuple[int, Prompt]], answers: dict[int, Sampling]) -> list[Group]:
        engine_loop = EngineLoop(self._engine, self._world)  # not the one in which carried requests wait
        started = [(prompt, n, self._start(prompt, n, 0, answers, engine_loop)) for n, prompt in mine]
        while not all(samples.done() for _, _, samples in started):
            await engine_loop.poll()
            self._tell_wait(engine_loop)
        self._notice.over()
        self._world.journal.idle(False)
        return [Group(prompt, n, in_order(samples.result())) for prompt, n, samples in started]
