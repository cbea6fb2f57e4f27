"""`Player`: plays the episodes of slices and of held-out prompts over this replica's engine.

Slices may run on from one step into the next; the step that starts one need not be the step that it counts for.

Left out: which slices to start, and where they go when they have finished (`step_run.py`).
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from spmd_rl.config.generation import GenerationSettings
from spmd_rl.data import EnvTasks, Prompts, counter_seed
from spmd_rl.distributed import World
from spmd_rl.distributed.wait_message import WaitMessage
from spmd_rl.engine.base import Engine
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.plugins.targets import import_coroutine
from spmd_rl.rollout.engine_loop import EngineLoop
from spmd_rl.rollout.episode import Budget, Context, Episode, Sampling, first_of, in_order, play, single_turn
from spmd_rl.rollout.expected import ExpectedVerdicts
from spmd_rl.rollout.replay_log import Migration, PartialRollouts, ReplayLog
from spmd_rl.rollout.rounds import GroupSlice, num_slots
from spmd_rl.types import Environments, Group, Prompt, Sample, Scorer

SCORE_POLLS = 200
"""Polls, at most, until a rank that waits for verdicts asks again for a ticket."""

Samples = asyncio.Future[list[list[Sample]]]


@dataclass(frozen=True, slots=True)
class Services:
    """What episodes ask beside the engine."""

    scorer: Scorer
    tokenizer: Tokenizer
    episode: Episode | None = None
    """By default the one that `rollout.target` names, or one turn."""
    environments: Environments | None = None
    """Where prompts are tasks of environments, what plays these."""


class Player:
    """The episodes of one replica; only its first rank plays."""

    def __init__(
        self,
        settings: GenerationSettings,
        engine: Engine,
        prompts: Prompts | EnvTasks,
        services: Services,
        world: World,
        num_replicas: int,
        migration: Migration | None = None,
    ) -> None:
        self.settings, self.engine, self.world, self.migration = settings, engine, world, migration
        self.engine_loop = EngineLoop(engine, world)
        self.running: dict[GroupSlice, Samples] = {}
        """Slices that have started here and have not finished."""
        self._logs: dict[GroupSlice, dict[int, ReplayLog]] = {}
        """Of slices that run here, by answer."""
        self._prompts, self._tokenizer, self._environments = prompts, services.tokenizer, services.environments
        self._scorer = ExpectedVerdicts(services.scorer, settings.reward, world.journal)
        s = settings.rollout
        self._episode = services.episode or (import_coroutine("rollout.target", s.target) if s.target else single_turn)
        self._budget = Budget(s.max_context_tokens or engine.capacity.max_tokens, s.max_turns)
        self._num_slots = num_slots(s, num_replicas, engine.capacity.max_running)
        self._wait_message = WaitMessage(world.rank)

    async def start_slices(self, claim: Callable[[int], list[GroupSlice]]) -> None:
        """Start as many slices as there is room for."""
        while slices := claim((self._num_slots - self.engine_loop.num_requests) // self.settings.rollout.slice_size):
            for group_slice in slices:
                self.running[group_slice] = self._start_slice(group_slice)
            await asyncio.sleep(0)  # their requests now stand in the engine loop, and count

    def _start_slice(self, group_slice: GroupSlice) -> Samples:
        s, seed = self.settings.rollout, self.settings.seed
        epoch, prompt = self._prompts.ticket(group_slice.ticket, seed)
        sampling = Sampling(seed, "train", s.temperature, s.max_new_tokens, stop=s.stop_strings, **s.truncation)
        first = group_slice.number * s.slice_size
        answers = dict.fromkeys(
            range(s.answers_per_prompt + s.redundancy)[first:][: s.slice_size + s.redundancy], sampling
        )
        if self.settings.uses_greedy and first + s.slice_size >= s.answers_per_prompt:
            answers[s.answers_per_prompt] = replace(sampling, temperature=0.0)  # one more, with the last slice
        partial_rollouts: PartialRollouts = self.migration.claim(group_slice) if self.migration else {}
        logs = self._logs[group_slice] = {n: ReplayLog(partial_rollouts.get(n, ())) for n in answers}
        return self._start(prompt, group_slice.ticket, epoch, answers, self.engine_loop, s.redundancy, logs)

    def _start(
        self,
        prompt: Prompt,
        ticket: int,
        epoch: int,
        answers: Mapping[int, Sampling],
        engine_loop: EngineLoop,
        spare: int = 0,
        logs: Mapping[int, ReplayLog] | None = None,
    ) -> Samples:
        """One episode per answer, which is drawn as `answers` says. The future of all their samples, in order.

        spare: how many episodes, the last to end, are given up.
        """
        any_of_them = next(iter(answers.values()))
        seed = partial(counter_seed, any_of_them.seed, any_of_them.split, epoch, prompt.id)
        fixed = (self._budget, self._tokenizer, engine_loop, self._scorer, self._environments)
        logs = logs or {answer: ReplayLog() for answer in answers}
        contexts = [
            Context(prompt, ticket, answer, seed, sampling, *fixed, log=logs[answer])
            for answer, sampling in answers.items()
        ]
        tasks = [asyncio.ensure_future(play(self._episode, ctx)) for ctx in contexts]
        samples = asyncio.ensure_future(first_of(tasks, len(tasks) - spare)) if spare else asyncio.gather(*tasks)
        samples.add_done_callback(lambda _: engine_loop.wake())
        return samples

    def finished(self) -> Iterator[tuple[GroupSlice, Group]]:
        """Yield the slices whose episodes have all ended, in order; they run no more."""
        for group_slice in sorted(group_slice for group_slice, samples in self.running.items() if samples.done()):
            samples = in_order(self.running.pop(group_slice).result())
            _, prompt = self._prompts.ticket(group_slice.ticket, self.settings.seed)
            yield group_slice, Group(prompt, group_slice.ticket, samples)

    async def poll(self, ended: Callable[[], bool]) -> None:
        """Poll the engine loop once, or, with only verdicts to wait for, until one of them arrives or the step ended.

        A replica without tickets waits for those of the others.
        """
        if self.engine_loop.num_requests or not self._outstanding:
            await self.engine_loop.poll()
            self._report_wait(self.engine_loop)
            return
        with self.world.phase("score"):
            waiting = self._outstanding
            for _ in range(SCORE_POLLS):
                await self.engine_loop.poll()
                self._report_wait(self.engine_loop)
                if self.engine_loop.num_requests or self._outstanding != waiting or ended():
                    break

    async def engine_is_idle(self) -> bool:
        """Whether the engine has nothing to compute, nor soon will have: see `placement.patience`."""
        turns_follow = self._episode is not single_turn  # a verdict or a reply of an environment
        until = time.perf_counter() + (self.settings.patience if turns_follow else 0.0)
        while not self.engine_loop.num_requests:
            if time.perf_counter() >= until or not self._outstanding:
                return True
            await self.engine_loop.poll()
        return False

    async def end_step(self) -> int:
        """Empty the engine. Slices that run are kept, offered to other ranks or given up, as the settings say.

        Returns the number of requests stopped.
        """
        self._wait_message.over()
        num_stopped = await self.engine_loop.drain()
        carries, leaves = self.settings.rollout.partial_rollout, bool(self.migration and self.migration.leaves)
        self._logs = {one: self._logs[one] for one in self.running if carries}
        if leaves:
            self.migration.offer({one: {n: log.records for n, log in self._logs[one].items()} for one in self._logs})
        if leaves or not carries:
            await self.cancel()
            self.engine_loop.clear()
        return num_stopped

    async def cancel(self) -> None:
        """Cancel all episodes, and wait until they have ended."""
        for samples in self.running.values():
            samples.cancel()
        await asyncio.gather(*self.running.values(), return_exceptions=True)
        self.running.clear()

    async def answer(self, prompts: Sequence[tuple[int, Prompt]], sampling: Sequence[Sampling]) -> list[Group]:
        """Return an answer to each numbered prompt for each `sampling`; no tickets and no filter."""
        engine_loop = EngineLoop(self.engine, self.world)  # not the one in which carried requests wait
        answers = dict(enumerate(sampling))
        started = [(prompt, n, self._start(prompt, n, 0, answers, engine_loop)) for n, prompt in prompts]
        while not all(samples.done() for _, _, samples in started):
            await engine_loop.poll()
            self._report_wait(engine_loop)
        self._wait_message.over()
        self.world.journal.idle(False)
        return [Group(prompt, n, in_order(samples.result())) for prompt, n, samples in started]

    def waiting(self, name: str) -> AbstractContextManager[object]:
        """While nothing runs here, a hang report finds this rank waiting for `name`."""
        return nullcontext() if self.running else self.world.journal.waiting(name)

    def _report_wait(self, engine_loop: EngineLoop) -> None:
        """Print what is waited for while the engine has nothing to do, if that takes long."""
        if engine_loop.num_requests:
            self._wait_message.over()
        else:
            self._wait_message(f"waiting for {self._awaited}")

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
