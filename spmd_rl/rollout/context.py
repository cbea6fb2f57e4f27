"""What a rollout is: a coroutine over a `Context`. Single-turn is four lines; a user's own is one function.

async def my_rollout(ctx: Context) -> Sample:
    turn = await ctx.generate(ctx.render(ctx.prompt.messages))
    verdict = await ctx.score(turn.text)
    return ctx.sample(verdict)
"""

from array import array
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmd_rl.data.seeds import Seeds
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.rollout.pump import Pump
from spmd_rl.types import AnswerInfo, Message, Prompt, Request, Sample, Scorer, Turn, Verdict, concat


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn."""

    seed: int
    """the run's seed"""
    split: str
    """`train` or `eval`: the two never share noise"""
    temperature: float
    max_new_tokens: int


@dataclass(slots=True)
class Context:
    """One sample's view of the world."""

    prompt: Prompt
    ticket: int
    answer: int
    seeds: Seeds
    """of the prompt's answers in this epoch: what this one draws follows from its number, its turn and its tokens"""
    sampling: Sampling
    tokenizer: Tokenizer
    pump: Pump
    scorer: Scorer
    turns: list[Turn] = field(default_factory=list)
    num_sampled: int = 0
    """tokens of all turns that the policy sampled"""

    def render(self, messages: Sequence[Message]) -> array:
        """Token ids of the messages under the model's chat template, ready for an answer."""
        return self.tokenizer.render(messages)

    async def generate(self, prompt_ids: array) -> Turn:
        """Append `prompt_ids` to all tokens so far and let the policy answer. No token is ever rendered twice.

        An answer that the end of a step cut short goes on in the next one, with that step's policy.
        """
        before = prompt_ids
        if self.turns:
            history = [part for turn in self.turns for part in (turn.prompt_ids, turn.token_ids)]
            before = concat([*history, prompt_ids], "i")
        c = await self.pump.generate(self._request(before, 0))
        token_ids, logprobs, versions = c.token_ids, c.logprobs, c.versions
        while c.finish_reason == "abort":
            c = await self.pump.generate(self._request(before + token_ids, len(token_ids)))
            token_ids, logprobs, versions = token_ids + c.token_ids, logprobs + c.logprobs, versions + c.versions
        turn = Turn(prompt_ids, token_ids, logprobs, versions, c.finish_reason, self.tokenizer.decode(token_ids))
        self.turns.append(turn)
        self.num_sampled += len(token_ids)
        return turn

    def _request(self, tokens: array, num_begun: int) -> Request:
        """Go on after these `tokens`, the last `num_begun` of which belong to the next turn."""
        s, ticket, answer, number = self.sampling, self.ticket, self.answer, len(self.turns)
        return Request(
            id=f"{s.split}/{ticket}/{answer}/{number}",
            prompt_ids=tokens,
            max_new_tokens=s.max_new_tokens - num_begun,
            temperature=s.temperature,
            seed=self.seeds.seed(answer, number, self.num_sampled + num_begun),
            order=(ticket, answer, number),
            stop_ids=self.tokenizer.stop_ids,
        )

    def score(self, answer: str) -> Awaitable[Verdict]:
        """Await the verdict of the prompt's rewarder."""
        info = AnswerInfo(self.num_sampled, self.turns[-1].finish_reason, len(self.turns))
        return self.scorer.score(self.prompt, answer, info)

    def sample(self, verdict: Verdict) -> Sample:
        """The finished rollout."""
        return Sample(self.ticket, self.answer, tuple(self.turns), verdict, greedy=self.sampling.temperature == 0)


Rollout = Callable[[Context], Coroutine[Any, Any, Sample]]


async def single_turn(ctx: Context) -> Sample:
    """Ask once, judge once."""
    turn = await ctx.generate(ctx.render(ctx.prompt.messages))
    verdict = await ctx.score(turn.text)
    return ctx.sample(verdict)
