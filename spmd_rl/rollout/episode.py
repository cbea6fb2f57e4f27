"""The episode: a coroutine over a `Context` that makes one trajectory. Another episode needs one setting:

    # my_file.py, on PYTHONPATH; rollout.target=my_file:second_chance
    from spmd_rl.types import Message

    RETRY = (Message("user", "That is wrong. Look again, and answer once more."),)

    async def second_chance(ctx):
        turn = await ctx.generate(ctx.render(ctx.prompt.messages))
        verdict = await ctx.score(turn.text)
        if verdict.score < 1:
            turn = await ctx.generate(ctx.reply(RETRY))
            verdict = await ctx.score(turn.text)
        return ctx.sample(verdict)

An episode that exceeds its budget (`rollout.max_context_tokens`, `rollout.max_turns`) ends as truncated and its last
answer is scored; without an answer it is an `error`. An exception is an `error` verdict of that trajectory alone.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from spmd_rl.base.errors import RunFailed, UserError, located, traceback_of
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.rollout.engine_loop import EngineLoop
from spmd_rl.rollout.transcript import Transcript
from spmd_rl.types import (
    AgentStep,
    AnswerInfo,
    Completion,
    Environments,
    Message,
    Prompt,
    Request,
    Sample,
    Scorer,
    Turn,
    Verdict,
    concat,
)
from spmd_rl.types.pictures import first_id, pictures_in, pictures_of

SEGMENTS = 1 << 16
"""Segment n of answer a is the sample number a + n * SEGMENTS."""


class BudgetSpent(Exception):
    """Error of `Context.generate`: no token or turn left. Harmless if not caught."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of an answer."""

    seed: int
    split: str
    """`train` or `eval`, which never share noise."""
    temperature: float
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one trajectory."""

    max_context_tokens: int
    """Tokens of a segment, prompts included."""
    max_turns: int | None = None


@dataclass(frozen=True, slots=True)
class SoftLimit:
    """A stop of a turn at `num_tokens`, unless `may_exceed` allows its full limit."""

    num_tokens: int
    may_exceed: Callable[[array], bool]
    """Decides from the answer's tokens ('i')."""


@dataclass(slots=True)
class Context:
    """State of one trajectory, and the services that its episode may call."""

    prompt: Prompt
    ticket: int
    answer_index: int
    """Index among the answers to the prompt, from 0."""
    seed: Callable[..., int]
    sampling: Sampling
    budget: Budget
    tokenizer: Tokenizer
    engine_loop: EngineLoop
    scorer: Scorer
    environments: Environments | None = None
    """Given if `ctx.prompt` is the task of an environment."""
    transcript: Transcript = field(default_factory=Transcript)
    attempt: int = 0
    turns: list[Turn] = field(default_factory=list)
    """Turns of the present segment."""
    segments: list[tuple[Turn, ...]] = field(default_factory=list)
    """Earlier segments; each begins with a fresh prompt."""
    num_turns: int = 0
    num_sampled: int = 0
    num_tokens: int = 0
    """Tokens of the present segment."""
    shown: dict[int, bytes] = field(default_factory=dict)
    """Encoded pictures in rendered messages, by first token id."""

    def render(self, messages: Sequence[Message]) -> array:
        """Return the token ids ('i') of a new conversation under the model's chat template, ready for an answer."""
        self._show(messages)
        # Not for later messages: a default system prompt would be inserted before them.
        return self.tokenizer.render(messages)

    def reply(self, messages: Sequence[Message], as_sampled: bool = False) -> array:
        """Return the token ids ('i') that put messages after the last answer, ready for the next one.

        Closes an answer that was cut off. UserError, which ends the run, if the template would change earlier messages,
        such as by leaving out thoughts; `as_sampled` keeps those as sampled.
        """
        if not self.turns:
            raise ValueError("ctx.reply follows an answer; a conversation begins with ctx.render")
        self._show(messages)
        bridge = self.tokenizer.bridge(messages)
        if not as_sampled and not self.can_reply(messages):
            what = "leaves out the thoughts of earlier answers"
            if bridge.keeps_thoughts:
                what = "renders earlier answers differently"
            raise UserError(
                f"policy.model: the chat template of {self.tokenizer.name} {what} once another message follows, so "
                "that no turn continues the one before; ctx.reply(messages, as_sampled=True) keeps them as sampled"
            )
        last = self.turns[-1].token_ids[-1:]
        ended = last and last[0] in self.tokenizer.stop_ids and last == bridge.token_ids[:1]
        return bridge.token_ids[1:] if ended else bridge.token_ids

    def can_reply(self, messages: Sequence[Message]) -> bool:
        """Return True if the chat template would render all turns as sampled before these messages."""
        bridge = self.tokenizer.bridge(messages)
        thought = any("</think>" in turn.text for turn in self.turns)
        return bridge.append_only and (bridge.keeps_thoughts or not thought)

    async def generate(
        self, prompt_ids: array, soft_limit: SoftLimit | None = None, max_new_tokens: int | None = None
    ) -> Turn:
        """Append `prompt_ids` ('i') to all tokens so far and sample an answer.

        It ends, with finish reason `length`, at `max_new_tokens`, by default `sampling.max_new_tokens`, or where the
        budget ends. BudgetSpent if nothing is left. With `rollout.partial_rollout` an answer cut short by the end of a
        step continues in the next one, with that step's policy. soft_limit: an earlier limit.
        """
        limit = min(
            max_new_tokens or self.sampling.max_new_tokens,
            self.budget.max_context_tokens - self.num_tokens - len(prompt_ids),
        )
        if limit < 1:
            raise BudgetSpent(f"{self.num_tokens + len(prompt_ids)} tokens leave no room to answer")
        if self.num_turns == self.budget.max_turns:
            raise BudgetSpent(f"it has had {self.num_turns} turns")
        before = prompt_ids
        if self.turns:
            history = [part for turn in self.turns for part in (turn.prompt_ids, turn.token_ids)]
            before = concat([*history, prompt_ids], "i")
        first = limit if soft_limit is None else min(limit, soft_limit.num_tokens)
        seen = self.pictures_in(prompt_ids)
        pictures = (*chain.from_iterable(turn.pictures for turn in self.turns), *seen)
        request = self._request(before, pictures, 0, first)
        c = self.transcript.replay(before) or await self.engine_loop.generate(request)
        # Two reasons to ask again: the engine has aborted the request, or the answer may go on beyond its soft limit.
        while c.finish_reason == "abort" or (len(c.token_ids) == first < limit and c.finish_reason == "length"):
            partial, upto = c, first
            self.transcript.add(before, c)
            if soft_limit is None or soft_limit.may_exceed(c.token_ids):
                upto = limit
            elif len(c.token_ids) == first:
                # The engine may abort a request just as it reaches the soft limit.
                break
            request = self._request(before + c.token_ids, pictures, len(c.token_ids), upto)
            c = _joined(partial, await self.engine_loop.generate(request))
        self.transcript.add(before, c)
        text = self.tokenizer.decode(c.token_ids)
        known = (c.token_ids, c.logprobs, c.versions, c.finish_reason, text, c.candidate_ids)
        return self.append(Turn(prompt_ids, *known, experts=c.experts, pictures=seen))

    def pictures_in(self, prompt_ids: array) -> tuple[bytes, ...]:
        """Return the encoded pictures of these ids ('i'). KeyError for one not rendered here."""
        return pictures_in(prompt_ids, self.shown, self.tokenizer.processor.count) if self.shown else ()

    def _show(self, messages: Sequence[Message]) -> None:
        self.shown.update((first_id(data), data) for data in pictures_of(messages))

    def append(self, turn: Turn) -> Turn:
        """Append a turn, update the counters, and return it."""
        self.turns.append(turn)
        self.num_turns += 1
        self.num_sampled += len(turn.token_ids)
        self.num_tokens += len(turn.prompt_ids) + len(turn.token_ids)
        return turn

    def _request(self, tokens: array, pictures: tuple[bytes, ...], num_begun: int, limit: int) -> Request:
        """Return a request that continues `tokens`; the last `num_begun` of the turn's `limit` tokens exist."""
        s, ticket, answer, number = self.sampling, self.ticket, self.answer_index, self.num_turns
        # A retry with the seeds of the failed attempt would repeat its answers.
        again = ("attempt", self.attempt) if self.attempt else ()
        return Request(
            id=f"{s.split}/{ticket}/{answer}/{number}",
            prompt_ids=tokens,
            max_new_tokens=limit - num_begun,
            temperature=s.temperature,
            seed=self.seed(answer, number, self.num_sampled, *again),
            order=(ticket, answer, number),
            priority=self.prompt.priority,
            stop_ids=self.tokenizer.stop_ids,
            stop=s.stop,
            num_begun=num_begun,
            top_k=s.top_k,
            top_p=s.top_p,
            min_p=s.min_p,
            # A resumed run does not repeat the evaluation before its first step, and must find the same cached prompts:
            # a prompt that is cached in part is computed in other products, which may round differently.
            cache=s.split,
            pictures=pictures,
        )

    def score(self, text: str) -> Awaitable[Verdict]:
        """Await the rewarder's verdict on a text."""
        info = AnswerInfo(self.num_sampled, self.turns[-1].finish_reason, self.num_turns)
        return self.scorer.score(self.prompt, text, info)

    def record(self, step: AgentStep) -> None:
        """Attach the environment's step to the last turn."""
        self.turns[-1] = replace(self.turns[-1], step=step)

    def cut_short(self) -> None:
        """Mark the last turn as ended by a token limit."""
        if not self.turns:
            # The segment has just begun: the last turn belongs to the segment before it.
            self.turns = list(self.segments.pop())
        self.turns[-1] = replace(self.turns[-1], finish_reason="length")

    def begin_segment(self) -> None:
        """Let the next `generate` begin with a fresh prompt."""
        if self.turns:
            self.segments.append(tuple(self.turns))
            self.turns, self.num_tokens = [], 0

    def begin_again(self) -> None:
        """Restart the episode with other random numbers."""
        self.attempt += 1
        self.transcript.clear()
        self.turns, self.segments = [], []
        self.num_turns = self.num_sampled = self.num_tokens = 0

    def samples(self, verdict: Verdict) -> list[Sample]:
        """Return the finished trajectory, a sample per segment."""
        greedy = self.sampling.temperature == 0
        segments = [*self.segments, tuple(self.turns)] if self.turns else self.segments
        if len(segments) == 1:
            return [Sample(self.ticket, self.answer_index, segments[0], verdict, greedy)]
        numbers = [self.answer_index + number * SEGMENTS for number in range(len(segments))]
        return [
            Sample(self.ticket, number, turns, verdict, greedy, self.answer_index, last=number == numbers[-1])
            for number, turns in zip(numbers, segments, strict=True)
        ]

    def sample(self, verdict: Verdict) -> Sample | list[Sample]:
        """Return the finished trajectory: one sample, or one per segment."""
        samples = self.samples(verdict)
        return samples if self.segments else samples[0]


def _joined(partial: Completion, rest: Completion) -> Completion:
    columns = {name: getattr(partial, name) + getattr(rest, name) for name in ("token_ids", "logprobs", "versions")}
    if partial.candidate_ids and rest.candidate_ids:
        columns["candidate_ids"] = partial.candidate_ids + rest.candidate_ids
    if partial.experts and rest.experts:
        columns["experts"] = partial.experts + rest.experts
    return replace(rest, **columns)


Episode = Callable[[Context], Coroutine[Any, Any, Sample | list[Sample]]]


async def single_turn(ctx: Context) -> Sample | list[Sample]:
    """Generate one answer and score it."""
    turn = await ctx.generate(ctx.render(ctx.prompt.messages))
    verdict = await ctx.score(turn.text)
    return ctx.sample(verdict)


async def play(episode: Episode, ctx: Context) -> list[Sample]:
    """Run one episode; a failure becomes its sample's verdict."""
    try:
        found = await episode(ctx)
        samples = found if isinstance(found, list) else [found]
        if not samples or any(not isinstance(sample, Sample) or not sample.turns for sample in samples):
            raise TypeError(f"the episode returned {found!r:.80}, and not ctx.sample(verdict) after a turn")
        return samples
    except BudgetSpent as spent:
        if not ctx.turns:
            return _failed(ctx, spent)
        ctx.cut_short()
        return ctx.samples(await ctx.score(ctx.turns[-1].text))
    except (UserError, RunFailed):
        raise
    except Exception as error:  # noqa: BLE001  a user's code may raise anything
        return _failed(ctx, error)


def _failed(ctx: Context, error: Exception) -> list[Sample]:
    return abandoned(ctx, Verdict("error", detail=located(error), traceback=traceback_of(error)))


def abandoned(ctx: Context, verdict: Verdict) -> list[Sample]:
    """Return the samples of a failed episode, perhaps before its first turn."""
    if not ctx.turns and not ctx.segments:
        # Tables and batches expect a turn in every sample, if only an empty one.
        nothing = array("i"), array("f"), array("i")
        prompt_ids = ctx.render(ctx.prompt.messages) if ctx.prompt.messages else array("i", ctx.tokenizer.stop_ids[:1])
        ctx.turns.append(Turn(prompt_ids, *nothing, "abort", pictures=ctx.pictures_in(prompt_ids)))
    return ctx.samples(verdict)


async def first_of(tasks: Sequence[asyncio.Future[list[Sample]]], count: int) -> list[list[Sample]]:
    """Return the samples of the first `count` episodes to end, in the tasks' order; cancel the others."""
    try:
        left = set(tasks)
        while len(tasks) - len(left) < count:
            ended, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()  # raises what ends the run
        return [task.result() for task in tasks if task.done()][:count]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def in_order(episodes: Iterable[list[Sample]]) -> tuple[Sample, ...]:
    """Return the samples of a group's episodes, by answer."""
    return tuple(sorted(chain.from_iterable(episodes), key=attrgetter("answer")))
