"""`Rollouts`: generate and score one step's groups on every rank, or a set of held-out answers.

The loop of a replica: claim tickets while there is room, pump, resolve the tickets whose verdicts are all in, until the
step has ended (`tickets.py`). What is left then is surplus: aborted, and started again in a later step.

Left out: replicas of several ranks, carried partial rollouts.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from spmd_rl.config.schema import RlvrConfig
from spmd_rl.data.prompts import Prompts
from spmd_rl.dist import World
from spmd_rl.engine.base import Engine
from spmd_rl.errors import RunFailed, UserError
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.rollout.collected import Collected, Outcome, outcome
from spmd_rl.rollout.context import Context, Rollout, Sampling, single_turn
from spmd_rl.rollout.filters import why_not
from spmd_rl.rollout.pump import Pump
from spmd_rl.rollout.tickets import Claim, StepTickets, claim
from spmd_rl.types import Group, Prompt, Sample, Scorer

END = "generate: end of step"
"""The collective at which the replicas meet when they know the step's end."""


SCORE_TURNS = 200
"""Turns of the pump, at most, until a rank that waits for verdicts asks again for a ticket."""


class Rollouts:
    """Stateful: `next_ticket` is the cursor, the first ticket no step has used."""

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
        self.prompts = prompts
        self._cfg, self._settings = cfg, cfg.rollout
        self._engine, self._scorer, self._tokenizer, self._world = engine, scorer, tokenizer, world
        self._rollout = rollout
        self._pump = Pump(engine, world)
        self._runner = asyncio.Runner()
        self._next_ticket = 0
        self._old: StepTickets | None = None
        s = self._settings
        self._limit = s.max_tickets_per_step or 4 * s.prompts_per_step
        share = -(-(s.prompts_per_step + s.extra_prompts) // world.size)
        self._slots = max(s.answers_per_prompt, min(engine.capacity.max_running, share * s.answers_per_prompt))

    def state(self) -> dict[str, Any]:
        """See `checkpoint.Stateful`."""
        return {"next_ticket": self._next_ticket, "prompts": self.prompts.fingerprint()}

    def load_state(self, state: dict[str, Any]) -> None:
        """See `checkpoint.Stateful`. UserError if the tickets would now stand for other prompts."""
        if state["prompts"] != self.prompts.fingerprint():
            raise UserError("data.train: the prompts are not those of the checkpoint")
        self._next_ticket = state["next_ticket"]

    def close(self) -> None:
        """Close the event loop; idempotent."""
        self._runner.close()

    def check(self) -> None:
        """[all] All ranks read the same prompts, and none exceeds `rollout.max_prompt_tokens`; UserError otherwise."""
        self._world.agree("start: prompts", self.prompts.fingerprint())
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
        s, world = self._settings, self._world
        tickets = StepTickets(
            world.store, f"step{step}", self._next_ticket, s.prompts_per_step, s.extra_prompts, self._limit
        )
        claims = claim(s.claim, tickets, world.rank, world.size)
        with world.phase("generate"), self._engine.awake():
            began, self._pump.idle_seconds = time.perf_counter(), 0.0
            finished, end, num_aborted = self._runner.run(self._until_end(claims, tickets))
            idle_from = time.perf_counter()
            world.barrier(END)
            now = time.perf_counter()
            bubble = (self._pump.idle_seconds + now - idle_from) / (now - began)
        with world.phase("coordination"):
            collected = self._exchange(step, finished, end, bubble, num_aborted)
            if self._old:
                self._old.forget(shared=world.rank == 0)
        self._old, self._next_ticket = tickets, end
        return collected

    async def _until_end(
        self, claims: Claim, tickets: StepTickets
    ) -> tuple[dict[int, tuple[Group, str | None]], int, int]:
        """This rank's finished groups with the reason why each does not train, the step's end, requests aborted."""
        s = self._settings
        sampling = [Sampling(self._cfg.seed, "train", s.temperature, s.max_new_tokens)] * s.answers_per_prompt
        running: dict[int, tuple[Prompt, asyncio.Future[list[Sample]]]] = {}
        finished: dict[int, tuple[Group, str | None]] = {}
        while (end := tickets.end()) is None:
            while (ticket := claims.next(self._has_room())) is not None:
                epoch, prompt = self.prompts.ticket(ticket, self._cfg.seed)
                running[ticket] = (prompt, self._start(prompt, ticket, epoch, sampling))
                await asyncio.sleep(0)  # its requests now stand in the pump, and count in `_has_room`
            await self._turn(tickets, idle=not running)
            for ticket in sorted(t for t, (_, samples) in running.items() if samples.done()):
                prompt, samples = running.pop(ticket)
                group = Group(prompt, ticket, tuple(samples.result()))
                reason = why_not(group, s.min_answers, s.filter)
                finished[ticket] = (group, reason)
                tickets.resolve(ticket, reason is None)
        num_aborted = self._pump.abort_all()
        surplus = [samples for _, samples in running.values()]
        for samples in surplus:
            samples.cancel()
        await asyncio.gather(*surplus, return_exceptions=True)
        return finished, end, num_aborted

    def _start(
        self, prompt: Prompt, ticket: int, epoch: int, sampling: Sequence[Sampling]
    ) -> asyncio.Future[list[Sample]]:
        """One coroutine per sample of the ticket."""
        fixed = (self._tokenizer, self._pump, self._scorer)
        contexts = [Context(prompt, ticket, epoch, answer, s, *fixed) for answer, s in enumerate(sampling)]
        return asyncio.gather(*map(self._rollout, contexts))

    def _has_room(self) -> bool:
        return self._pump.num_requests + self._settings.answers_per_prompt <= self._slots

    async def _turn(self, tickets: StepTickets, idle: bool) -> None:
        """One turn of the pump, or, with only verdicts left to wait for, turns until one of them arrives.

        `idle`: this rank has no ticket; it waits for those of the others.
        """
        if idle:
            with self._world.journal.waiting(END):
                await self._pump.turn()
        elif self._pump.num_requests or not self._scorer.outstanding:
            await self._pump.turn()
        else:
            with self._world.phase("score"):
                waiting = self._scorer.outstanding
                for _ in range(SCORE_TURNS):
                    await self._pump.turn()
                    if self._pump.num_requests or self._scorer.outstanding != waiting or tickets.end() is not None:
                        break

    def _exchange(
        self, step: int, finished: dict[int, tuple[Group, str | None]], end: int, bubble: float, num_aborted: int
    ) -> Collected:
        """[all] Gather the metadata, check that the tickets are whole, and keep the error budget."""
        used = {t: pair for t, pair in sorted(finished.items()) if t < end}
        mine = [outcome(group, self._world.rank, reason, step - 1) for group, reason in used.values()]
        records = self._world.gather("collect: outcomes", [end, bubble, num_aborted, mine])
        outcomes = sorted((o for r in records for o in msgspec.convert(r[3], list[Outcome])), key=lambda o: o.ticket)
        assert {r[0] for r in records} == {end}, "ranks disagree on the step's end"
        assert [o.ticket for o in outcomes] == list(range(self._next_ticket, end)), "a ticket is lost or used twice"
        collected = Collected(
            step=step,
            groups=tuple(group for group, reason in used.values() if reason is None),
            dropped=tuple(
                (group, reason if t < end else "surplus")
                for t, (group, reason) in sorted(finished.items())
                if reason is not None or t >= end
            ),
            outcomes=tuple(outcomes),
            bubble=sum(r[1] for r in records) / len(records),
            num_aborted=sum(r[2] for r in records),
        )
        budget = self._cfg.reward.error_budget
        if collected.error_share > budget:
            example = next(o.detail for o in outcomes if o.detail)
            raise RunFailed(
                f"reward.error_budget={budget}: {collected.error_share:.0%} of the answers of step {step} "
                f"got no score; the first: {example}"
            )
        return collected

    def answer(self, prompts: Sequence[Prompt], sampling: Sequence[Sampling]) -> list[Group]:
        """This rank's share of `prompts`, one sample for each `sampling`; no tickets, no filter, no collective."""
        mine = list(enumerate(prompts))[self._world.rank :: self._world.size]
        with self._engine.awake():
            return self._runner.run(self._answer_all(mine, sampling))

    async def _answer_all(self, mine: list[tuple[int, Prompt]], sampling: Sequence[Sampling]) -> list[Group]:
        everything = asyncio.gather(*(self._start(prompt, number, 0, sampling) for number, prompt in mine))
        while not everything.done():
            await self._pump.turn()
        return [
            Group(prompt, number, tuple(samples))
            for (number, prompt), samples in zip(mine, everything.result(), strict=True)
        ]
