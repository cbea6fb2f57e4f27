"""What a rollout is: a coroutine over a `Context`. Single-turn is four lines; a user's own is one function.

async def my_rollout(ctx: Context) -> Sample:
    turn = await ctx.generate(ctx.render(ctx.prompt.messages))
    verdict = await ctx.score(ctx.text(turn))
    return ctx.sample(verdict)
"""

from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from spmd_rl.data.seeds import counter_seed
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
    epoch: int
    answer: int
    sampling: Sampling
    tokenizer: Tokenizer
    pump: Pump
    scorer: Scorer
    turns: list[Turn] = field(default_factory=list)

    def render(self, messages: Sequence[Message]) -> array:
        """Token ids of the messages under the model's chat template, ready for an answer."""
        return self.tokenizer.render(messages)

    async def generate(self, prompt_ids: array) -> Turn:
        """Append `prompt_ids` to all tokens so far and let the policy answer. No token is ever rendered twice.

        An answer that the end of a step cut short goes on in the next one, with that step's policy.
        """
        history = [part for turn in self.turns for part in (turn.prompt_ids, turn.token_ids)]
        before = concat([*history, prompt_ids], "i")
        turn = Turn(prompt_ids, array("i"), array("f"), array("i"), "abort")
        while turn.finish_reason == "abort":
            c = await self.pump.generate(self._request(before, turn.token_ids))
            turn = Turn(
                prompt_ids,
                turn.token_ids + c.token_ids,
                turn.logprobs + c.logprobs,
                turn.versions + c.versions,
                c.finish_reason,
            )
        self.turns.append(turn)
        return turn

    def _request(self, before: array, begun: array) -> Request:
        """Continue the `begun` tokens of the next turn, which follow on all that was `before`."""
        s, number = self.sampling, len(self.turns)
        sampled = len(begun) + sum(len(turn.token_ids) for turn in self.turns)
        return Request(
            id=f"{s.split}/{self.ticket}/{self.answer}/{number}",
            prompt_ids=before + begun,
            max_new_tokens=s.max_new_tokens - len(begun),
            temperature=s.temperature,
            seed=counter_seed(s.seed, s.split, self.epoch, self.prompt.id, self.answer, number, sampled),
            order=(self.ticket, self.answer, number),
            stop_ids=self.tokenizer.stop_ids,
        )

    def text(self, turn: Turn) -> str:
        """The answer's text, without special tokens."""
        return self.tokenizer.decode(turn.token_ids)

    async def score(self, answer: str) -> Verdict:
        """The verdict of the prompt's rewarder."""
        num_tokens = sum(len(turn.token_ids) for turn in self.turns)
        info = AnswerInfo(num_tokens, self.turns[-1].finish_reason, len(self.turns))
        return await self.scorer.score(self.prompt, answer, info)

    def sample(self, verdict: Verdict) -> Sample:
        """The finished rollout."""
        return Sample(self.ticket, self.answer, tuple(self.turns), verdict, greedy=self.sampling.temperature == 0)


Rollout = Callable[[Context], Awaitable[Sample]]


async def single_turn(ctx: Context) -> Sample:
    """Ask once, judge once."""
    turn = await ctx.generate(ctx.render(ctx.prompt.messages))
    verdict = await ctx.score(ctx.text(turn))
    return ctx.sample(verdict)
