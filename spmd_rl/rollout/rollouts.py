"""`Rollouts`: generate and score one step's groups on every rank, or a set of held-out answers.

The loop of a replica: claim parts of tickets while there is room, pump, resolve the tickets whose verdicts are all in,
until the step has ended. What is left then is surplus: aborted, and started again in a later step, or carried on.

Left out: the rules of a step (`rounds.py`, `accept.py`, `claims.py`) and what its end makes of it all (`harvest.py`).
"""

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from spmd_rl.config.schema import RlvrConfig
from spmd_rl.data.prompts import Prompts
from spmd_rl.data.seeds import Seeds
from spmd_rl.distributed import World
from spmd_rl.engine.base import Engine
from spmd_rl.errors import UserError
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.rollout import harvest
from spmd_rl.rollout.accept import tickets
from spmd_rl.rollout.claims import Claim, claim
from spmd_rl.rollout.collected import Collected
from spmd_rl.rollout.context import Context, Rollout, Sampling, single_turn
from spmd_rl.rollout.filters import why_not
from spmd_rl.rollout.outcomes import Finished, Report, finished, joined
from spmd_rl.rollout.pump import Pump
from spmd_rl.rollout.replica import Replica
from spmd_rl.rollout.rounds import Cursor, Part, plan_round, slots
from spmd_rl.rollout.tickets import StepTickets
from spmd_rl.rollout.under_way import UnderWay
from spmd_rl.types import Group, Prompt, Scorer

END = "generate: end of step"
"""The collective at which the replicas meet when they know the step's end."""

SCORE_TURNS = 200
"""Turns of the pump, at most, until a rank that waits for verdicts asks again for a ticket."""


class Rollouts:
    """Stateful: the cursor says which tickets no step has used. What is carried starts again after a resume."""

    def __init__(
        self,
        cfg: RlvrConfig,
        engine: Engine,
        prompts: Prompts,
        scorer: Scorer,
        tokenizer: Tokenizer,
        world: World,
        rollout: Rollout = single_turn,
    ) -> None:
        """[all]"""
        self.prompts = prompts
        self._cfg, self._settings = cfg, cfg.rollout
        self._engine, self._scorer, self._tokenizer, self._world = engine, scorer, tokenizer, world
        self._rollout = rollout
        self._replica = Replica(engine, world, cfg.engine.tp)  # [all]
        self._pump = Pump(self._replica)
        self._runner = asyncio.Runner()
        self._cursor = Cursor()
        self._running: dict[Part, UnderWay] = {}
        self._ended: list[Part] = []
        """of these, since anyone looked"""
        self._finished: dict[Part, Group] = {}
        """Of this step; with `carry`, also what an earlier step did not use."""
        self._reports: dict[Part, Finished] = {}
        """What this step tells the others of each of these."""
        self._carried: frozenset[Part] = frozenset()
        """Of all replicas."""
        self._old: StepTickets | None = None
        s = self._settings
        self._per_part = s.answers_per_part
        self._slots = slots(s, self._replica.count, engine.capacity.max_running)

    def state(self) -> dict[str, Any]:
        """See `checkpoint.Stateful`."""
        cursor = {"next_ticket": self._cursor.next, "holes": list(self._cursor.holes)}
        return cursor | {"prompts": self.prompts.fingerprint()}

    def load_state(self, state: dict[str, Any]) -> None:
        """See `checkpoint.Stateful`. UserError if the tickets would now stand for other prompts."""
        if state["prompts"] != self.prompts.fingerprint():
            raise UserError("data.train: the prompts are not those of the checkpoint")
        self._cursor = Cursor(state["next_ticket"], tuple(state["holes"]))

    def close(self) -> None:
        """Give up what is under way; idempotent."""
        if self._running:
            self._runner.run(self._give_up())
        self._runner.close()

    def check(self) -> None:
        """[all] UserError, alike on all ranks, for a prompt or an answer that cannot fit."""
        limit = self._settings.max_prompt_tokens
        mine = (*self.prompts.train, *self.prompts.eval)[self._world.rank :: self._world.size]
        longest = max(((len(self._tokenizer.render(p.messages)), p.id) for p in mine), default=(0, ""))
        length, prompt_id = max(map(tuple, self._world.gather("start: prompt lengths", longest)))
        if length > limit:
            raise UserError(f"rollout.max_prompt_tokens={limit}: prompt {prompt_id} has {length} tokens")
        new, room = self._settings.max_new_tokens, self._engine.capacity.max_tokens
        if length + new > room:
            raise UserError(
                f"rollout.max_new_tokens={new}: with a prompt of {length} tokens it exceeds the {room} that fit "
                f"(engine.kv_tokens={self._cfg.engine.kv_tokens}, and the model's own limit)"
            )
        if self._cfg.eval.every and not self.prompts.eval and self._world.rank == 0:
            print("warning: eval.every: no prompt is held out, nothing is evaluated", file=sys.stderr, flush=True)

    def collect(self, step: int) -> Collected:
        """[all] Generate and score, with the policy after `step - 1` updates, until the step has its groups."""
        s, world, replica = self._settings, self._world, self._replica
        with world.phase("coordination"):
            round = plan_round(self._cursor, s, self._carried)
            book = tickets(world.store, f"step{step}", round, replica.count)
        with world.phase("generate"), self._engine.awake():
            began, self._pump.idle_seconds, num_aborted = time.perf_counter(), 0.0, 0
            if replica.leads:
                claims = claim(s.claim, book, replica.index, replica.count)
                num_aborted = self._runner.run(self._until_end(claims, book, step))
            else:
                replica.follow()
            told = harvest.Told(
                finished=Report.of(self._reports.values()),
                running=sorted(self._running),
                counted=sorted(book.counted),
                end=book.end_mark(),
                idle_seconds=self._pump.idle_seconds if replica.leads else None,
                seconds=time.perf_counter() - began,
                num_aborted=0 if s.carry else num_aborted,
            )
            records = world.gather(END, told, harvest.Told)  # [all] who comes early waits here for the others' verdicts
        with world.phase("coordination"):
            yielded = harvest.harvest(self._cfg.rollout, book, records)
            collected = yielded.collected(step, self._finished)
            self._cursor = self._cursor.after(yielded.used)
            self._carried = yielded.carried
            self._finished = {part: group for part, group in self._finished.items() if part in yielded.carried}
            if self._old:
                self._old.forget(shared=world.rank == 0)
            self._old = book
        harvest.review(collected, self._cfg, world.rank)
        return collected

    async def _until_end(self, claims: Claim, book: StepTickets, step: int) -> int:
        """Fill `_finished`, until the step has ended. Returns the number of requests stopped then."""
        self._reports.clear()
        self._report(self._finished, book, step)
        while True:
            with self._noted():
                if book.ended(self._under_way(book)):
                    break
                await self._start_parts(claims)
            with self._noted():
                await self._turn(book)
            if self._ended:
                for part in self._ended:
                    answers = self._running.pop(part)
                    self._finished[part] = Group(answers.prompt, part.ticket, answers.samples())
                self._report(self._ended, book, step)
                self._ended.clear()
        return await self._pause()

    def _noted(self) -> AbstractContextManager[object]:
        """While nothing runs here, a hang report finds this rank on its way to the step's end."""
        return nullcontext() if self._running else self._world.journal.waiting(END)

    async def _start_parts(self, claims: Claim) -> None:
        """As many as there is room for."""
        while parts := claims.next(self._room()):
            for part in parts:
                self._running[part] = self._start_part(part)
            await asyncio.sleep(0)  # their requests now stand in the pump, and count in `_room`

    def _under_way(self, book: StepTickets) -> int | None:
        """The place of one of the tickets that this replica works on."""
        return next((book.round.order.place(part.ticket) for part in self._running), None)

    def _report(self, parts: Iterable[Part], book: StepTickets, step: int) -> None:
        """The verdicts of these parts are all in; resolve the tickets of which they were the last."""
        outcomes: dict[int, bool] = {}
        for part in sorted(parts):
            place = book.round.order.place(part.ticket)
            mine = finished(self._finished[part], part.number, self._world.rank, step - 1)
            self._reports[part] = mine
            pooled = book.pool(place, part.number, mine.answers)
            if pooled is not None:
                mine.why_not = why_not(joined(pooled), self._settings.min_answers, self._settings.filter)
                outcomes[place] = mine.why_not is None
        if outcomes:
            book.resolve(outcomes)

    async def _pause(self) -> int:
        """Empty the engine; unless they are carried, give up the coroutines too."""
        num_stopped = await self._pump.pause()
        if not self._settings.carry:
            await self._give_up()
            self._pump.clear()
        self._replica.end()
        return num_stopped

    async def _give_up(self) -> None:
        """Cancel all coroutines."""
        await asyncio.gather(*[answers.cancel() for answers in self._running.values()])
        self._running.clear()
        self._ended.clear()

    def _start_part(self, part: Part) -> UnderWay:
        s = self._settings
        epoch, prompt = self.prompts.ticket(part.ticket, self._cfg.seed)
        sampling = Sampling(self._cfg.seed, "train", s.temperature, s.max_new_tokens)
        first = part.number * self._per_part
        answers = dict.fromkeys(range(s.answers_per_prompt)[first:][: self._per_part], sampling)
        if self._cfg.algorithm.uses_greedy and first + self._per_part >= s.answers_per_prompt:
            answers[s.answers_per_prompt] = replace(sampling, temperature=0.0)  # one more, with the last part
        return self._start(prompt, part.ticket, epoch, answers, self._pump, partial(self._ended.append, part))

    def _start(
        self,
        prompt: Prompt,
        ticket: int,
        epoch: int,
        sampling: dict[int, Sampling],
        pump: Pump,
        ended: Callable[[], object],
    ) -> UnderWay:
        """One coroutine per sample: answer number -> how it is drawn."""
        first = next(iter(sampling.values()))
        seeds = Seeds(first.seed, first.split, epoch, prompt.id)
        fixed = (self._tokenizer, pump, self._scorer)
        contexts = [Context(prompt, ticket, answer, seeds, s, *fixed) for answer, s in sampling.items()]
        return UnderWay(prompt, map(self._rollout, contexts), ended)

    def _room(self) -> int:
        """Parts that fit beside what is under way."""
        return (self._slots - self._pump.num_requests) // self._per_part

    async def _turn(self, book: StepTickets) -> None:
        """One turn of the pump, or, with only verdicts left to wait for, turns until one of them arrives.

        A replica without tickets waits for those of the others.
        """
        if self._pump.num_requests or not self._scorer.outstanding:
            await self._pump.turn()
        else:
            with self._world.phase("score"):
                waiting = self._scorer.outstanding
                for _ in range(SCORE_TURNS):
                    await self._pump.turn()
                    moved = self._pump.num_requests or self._scorer.outstanding != waiting
                    if moved or book.ended(self._under_way(book)):
                        break

    def answer(self, prompts: Sequence[Prompt], sampling: Sequence[Sampling]) -> list[Group]:
        """[all] This rank's share of `prompts`, one sample for each `sampling`; no tickets and no filter."""
        replica = self._replica
        mine = list(enumerate(prompts))[replica.index :: replica.count]
        with self._engine.awake():
            if replica.leads:
                return self._runner.run(self._answer_all(mine, dict(enumerate(sampling))))
            replica.follow()
            return []

    async def _answer_all(self, mine: list[tuple[int, Prompt]], sampling: dict[int, Sampling]) -> list[Group]:
        pump = Pump(self._replica)  # not the one in which carried requests wait
        ended: list[int] = []
        started = {n: self._start(prompt, n, 0, sampling, pump, partial(ended.append, n)) for n, prompt in mine}
        groups: dict[int, Group] = {}
        while len(groups) < len(started):
            await pump.turn()
            groups |= {n: Group(started[n].prompt, n, started[n].samples()) for n in ended}
            ended.clear()
        self._replica.end()
        return [groups[number] for number in started]
