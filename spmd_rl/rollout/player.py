"""`Player`: runs the episodes of slices and of held-out prompts on this replica's engine."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from spmd_rl.base.targets import import_coroutine
from spmd_rl.base.waits import Wait
from spmd_rl.config.generation import GenerationSettings
from spmd_rl.config.sections.rollout import RolloutConfig
from spmd_rl.data import EnvTasks, Prompts, counter_seed
from spmd_rl.distributed import World
from spmd_rl.engine.base import Engine
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.rollout.engine_loop import EngineLoop
from spmd_rl.rollout.episode import Budget, Context, Episode, Sampling, first_of, in_order, play, single_turn
from spmd_rl.rollout.expected import ExpectedVerdicts
from spmd_rl.rollout.step_plan import GroupSlice, num_slots
from spmd_rl.rollout.thinking import thinking
from spmd_rl.rollout.transcript import PolicyAnswer, Transcript
from spmd_rl.types import Environments, Group, Prompt, Sample, Scorer

SCORE_POLLS = 200
"""Polls until a rank that waits for verdicts claims again."""

Samples = asyncio.Future[list[list[Sample]]]
Begun = dict[int, list[PolicyAnswer]]
"""Earlier answers of the policy, by answer of the slice."""


@dataclass(frozen=True, slots=True)
class Services:
    """Services of episodes besides the engine."""

    scorer: Scorer
    tokenizer: Tokenizer
    episode: Episode | None = None
    """Default: `rollout.target`, or a single turn."""
    environments: Environments | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out prompt, and the sampling of its missing answers."""

    number: int
    prompt: Prompt
    answers: Mapping[int, Sampling]


Claim = Callable[[int], Sequence[Question]]


class QuestionRun:
    """Held-out questions of a replica, some of them running."""

    def __init__(
        self, player: "Player", engine_loop: EngineLoop, claim: Claim, finish: Callable[[Group], object]
    ) -> None:
        self.engine_loop = engine_loop
        self._player, self._claim, self._finish = player, claim, finish
        self._running: list[tuple[Question, Samples]] = []
        self._asks = True

    @property
    def open(self) -> bool:
        """True if an answer is missing."""
        return self._asks or bool(self._running)

    async def fill(self) -> None:
        """Start questions in the free slots; at least one, if none runs."""
        while self._asks:
            busy = len(self._running) if self._player.asks_again else self.engine_loop.num_requests
            room = self._player.engine.capacity.max_running - busy
            room = room if self._running else max(room, 1)
            if room <= 0:
                break
            questions = self._claim(room)
            self._asks = bool(questions)
            self._running += [(one, self._player.ask(one, self.engine_loop)) for one in questions]
            # Lets the new episodes reach their `generate`, so that their requests count as running.
            await asyncio.sleep(0)
        self.engine_loop.admit()

    def report(self) -> None:
        """Pass finished answers to `finish`."""
        for one, samples in self._running:
            if samples.done():
                self._finish(Group(one.prompt, one.number, in_order(samples.result())))
        self._running = [pair for pair in self._running if not pair[1].done()]


class Player:
    """The episodes of one replica, on its first rank."""

    def __init__(
        self,
        settings: GenerationSettings,
        engine: Engine,
        prompts: Prompts | EnvTasks,
        services: Services,
        world: World,
        num_replicas: int,
        leaves: bool = False,
    ) -> None:
        """leaves: this replica is lent, and hands its slices over at a step's end."""
        self.settings, self.engine, self.world = settings, engine, world
        self.carries = settings.rollout.partial_rollout and not leaves
        self.engine_loop = EngineLoop(engine, world)
        self.running: dict[GroupSlice, Samples] = {}
        """Unfinished slices that started here."""
        self.left: dict[GroupSlice, Begun] = {}
        """Slices cancelled at the last step's end; a lent replica hands them over."""
        self._transcripts: dict[GroupSlice, dict[int, Transcript]] = {}
        self._prompts, self._tokenizer, self._environments = prompts, services.tokenizer, services.environments
        self._scorer = ExpectedVerdicts(services.scorer, settings.reward, world.journal)
        s = settings.rollout
        self._episode = services.episode or _episode_of(s, self._tokenizer)
        self._budget = Budget(s.max_context_tokens or engine.capacity.max_tokens, s.max_turns)
        self._num_slots = num_slots(s, num_replicas, engine.capacity.max_running)
        self._wait = Wait(world.rank == 0)

    async def start_slices(self, claim: Callable[[int], list[GroupSlice]]) -> None:
        """Start the slices for which there is room."""
        while slices := claim((self._num_slots - self.engine_loop.num_requests) // self.settings.rollout.slice_size):
            for group_slice in slices:
                self.running[group_slice] = self._start_slice(group_slice)
            # Lets the new episodes reach their `generate`, so that `num_requests` counts them in the next claim.
            await asyncio.sleep(0)

    def take(self, group_slice: GroupSlice, begun: Begun, samples: Sequence[Sample]) -> None:
        """Continue another replica's slice; with `samples`, it is finished."""
        if samples:
            self.running[group_slice] = asyncio.get_running_loop().create_future()
            self.running[group_slice].set_result([list(samples)])
        else:
            self.running[group_slice] = self._start_slice(group_slice, begun)

    def _start_slice(self, group_slice: GroupSlice, begun: Begun | None = None) -> Samples:
        s, seed = self.settings.rollout, self.settings.seed
        epoch, prompt = self._prompts.ticket(group_slice.ticket, seed)
        sampling = Sampling(seed, "train", s.temperature, s.max_new_tokens, stop=s.stop_strings, **s.truncation)
        # Slices must not share the index of an answer. So redundancy wants one slice a group and no greedy answer:
        # `AgenticConfig` requires it.
        first = group_slice.number * s.slice_size
        stop = min(first + s.slice_size, s.answers_per_prompt) + s.redundancy
        answers = dict.fromkeys(range(first, stop), sampling)
        if self.settings.uses_greedy and first + s.slice_size >= s.answers_per_prompt:
            answers[s.answers_per_prompt] = replace(sampling, temperature=0.0)  # one more, with the last slice
        earlier = begun or {}
        transcripts = {answer: Transcript(earlier.get(answer, ())) for answer in answers}
        self._transcripts[group_slice] = transcripts
        draws = partial(counter_seed, seed, "train", epoch, prompt.id)
        return self._start(prompt, group_slice.ticket, draws, answers, self.engine_loop, transcripts, s.redundancy)

    def _start(
        self,
        prompt: Prompt,
        ticket: int,
        seed: Callable[..., int],
        answers: Mapping[int, Sampling],
        engine_loop: EngineLoop,
        transcripts: Mapping[int, Transcript],
        spare: int = 0,
    ) -> Samples:
        """Start one episode per answer; return the future of their samples. seed: see `Context`. spare: number of
        episodes, the last to end, that are cancelled.
        """
        context = partial(
            Context,
            prompt=prompt,
            ticket=ticket,
            seed=seed,
            budget=self._budget,
            tokenizer=self._tokenizer,
            engine_loop=engine_loop,
            scorer=self._scorer,
            environments=self._environments,
        )
        contexts = [
            context(answer_index=answer, sampling=sampling, transcript=transcripts[answer])
            for answer, sampling in answers.items()
        ]
        tasks = [asyncio.ensure_future(play(self._episode, ctx)) for ctx in contexts]
        samples = asyncio.ensure_future(first_of(tasks, len(tasks) - spare)) if spare else asyncio.gather(*tasks)

        def ended(samples: Samples) -> None:
            # A run that fails asks no slice for its samples; asyncio would log each as an exception never retrieved.
            _ = samples.cancelled() or samples.exception()
            engine_loop.wake()

        samples.add_done_callback(ended)
        return samples

    def finished(self) -> Iterator[tuple[GroupSlice, Group]]:
        """Yield and remove finished slices, in order."""
        for group_slice in sorted(group_slice for group_slice, samples in self.running.items() if samples.done()):
            samples = in_order(self.running.pop(group_slice).result())
            self._transcripts.pop(group_slice, None)  # none where another replica has finished it
            _, prompt = self._prompts.ticket(group_slice.ticket, self.settings.seed)
            yield group_slice, Group(prompt, group_slice.ticket, samples)

    async def poll(self, ended: Callable[[], bool]) -> None:
        """Poll the engine loop; with only verdicts to wait for, until one arrives or the step ends."""
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
        """Return True if the engine gets no request within `placement.patience`."""
        until = time.perf_counter() + (self.settings.patience if self.asks_again else 0.0)
        while not self.engine_loop.num_requests:
            if time.perf_counter() >= until or not self._outstanding:
                return True
            await self.engine_loop.poll()
        return False

    async def end_step(self) -> int:
        """Empty the engine, keep or cancel running slices, and return the number of aborted requests."""
        self._wait.over()
        num_stopped = await self.engine_loop.abort_all()
        if not self.carries:
            self.left = {
                one: {answer: transcript.answers for answer, transcript in self._transcripts[one].items()}
                for one in self.running
            }
            await self.cancel()
            self.engine_loop.clear()
        return num_stopped

    async def cancel(self) -> None:
        """Cancel all episodes, and wait for their end."""
        for samples in self.running.values():
            samples.cancel()
        await asyncio.gather(*self.running.values(), return_exceptions=True)
        self.running.clear()
        self._transcripts.clear()

    async def answer(self, claim: Claim, finish: Callable[[Group], object]) -> None:
        """Answer the questions of `claim(room)` until it returns none. finish: gets each question's answers."""
        # A loop for these questions alone: aborted training requests wait in `self.engine_loop`.
        await self.rest(QuestionRun(self, EngineLoop(self.engine, self.world), claim, finish))

    async def rest(self, asked: "QuestionRun") -> None:
        """Answer the remaining held-out questions."""
        while asked.open:
            await asked.fill()
            await asked.engine_loop.poll()
            self._report_wait(asked.engine_loop)
            asked.report()
        self._wait.over()
        self.world.journal.idle(False)

    def ask(self, one: Question, engine_loop: EngineLoop) -> Samples:
        """Start the episodes of a question."""
        of = next(iter(one.answers.values()))
        seed = partial(counter_seed, of.seed, of.split, 0, one.prompt.id)
        transcripts = {answer: Transcript() for answer in one.answers}
        return self._start(one.prompt, one.number, seed, one.answers, engine_loop, transcripts)

    @property
    def asks_again(self) -> bool:
        """True if an episode may generate again after a verdict or an environment's reply."""
        return self._episode is not single_turn and not self.settings.rollout.thinking_budget

    def waiting(self, name: str) -> AbstractContextManager[object]:
        """Return a mark for hang reports that this rank waits for `name`, unless a slice runs."""
        return nullcontext() if self.running else self.world.journal.waiting(name)

    def _report_wait(self, engine_loop: EngineLoop) -> None:
        if engine_loop.num_requests:
            self._wait.over()
        else:
            self._wait(f"waiting for {self._awaited}")

    @property
    def _outstanding(self) -> int:
        return self._scorer.outstanding + (self._environments.outstanding if self._environments else 0)

    @property
    def _awaited(self) -> str:
        awaited = [self._scorer] if self._scorer.outstanding else []
        if self._environments and self._environments.outstanding:
            awaited.append(f"{self._environments.outstanding} replies of environments")
        return " and ".join(map(str, awaited)) or "the answers of other ranks"


def _episode_of(settings: RolloutConfig, tokenizer: Tokenizer) -> Episode:
    if settings.target:
        return import_coroutine("rollout.target", settings.target)
    return thinking(settings, tokenizer) if settings.thinking_budget else single_turn
