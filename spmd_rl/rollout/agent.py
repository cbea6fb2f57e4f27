"""The episode of an agent: observe, answer, act, until the environment or a budget ends it.

    reset -> [ prompt -> answer -> action -> step ] x turns -> a sample, or one for each segment

By default an episode is one conversation. A new segment begins where the chat template would change earlier messages
(thoughts left out) or `env.<tag>.history` asks for fresh prompts. `env/<tag>/segments` counts segments.
"""

import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from statistics import fmean

from spmd_rl.base.errors import RunFailed
from spmd_rl.config.sections.env import ACTION_FORMATS, EnvConfig, EnvsConfig
from spmd_rl.rollout.episode import BudgetSpent, Context, abandoned
from spmd_rl.rollout.prompt_text import first_messages, fresh_messages, next_messages
from spmd_rl.types import AgentStep, EnvReply, Message, Sample, Session, SessionLost, Turn, Verdict

AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean,
    "sum": sum,
    "max": max,
    "min": min,
    "last": lambda values: values[-1],
}
"""Reductions over the steps of an episode: `info["metrics_agg_mode"]`."""

STOPS = ("terminated", "truncated", "max_turns", "max_context", "env_timeout", "env_error", "env_lost")
"""Ends of an episode: Gymnasium's two, our limits, and failures under `env.<tag>.on_error=zero`."""


class Agent:
    """An `Episode` in the environment of `ctx.prompt`'s tag."""

    def __init__(self, envs: EnvsConfig) -> None:
        self._envs = envs.tags

    async def __call__(self, ctx: Context) -> list[Sample]:
        """Play an episode, with up to `env.<tag>.retries` retries."""
        env = self._envs[ctx.prompt.domain]
        while True:
            try:
                return await _play(ctx, env)
            except SessionLost as lost:
                if ctx.attempt == env.retries:
                    return _given_up(ctx, env, lost)
            ctx.begin_again()


async def _play(ctx: Context, env: EnvConfig) -> list[Sample]:
    assert ctx.environments is not None, "an agent needs environments"
    task = ctx.prompt.extra
    session = await ctx.environments.reset(ctx.prompt.domain, task["seed"], task["held_out"])
    try:
        reason, modes = await _turns(ctx, env, session)
    finally:
        await session.close()
    return ctx.samples(_verdict(ctx, reason, modes))


async def _turns(ctx: Context, env: EnvConfig, session: Session) -> tuple[str, dict[str, str]]:
    conversation = _Conversation(ctx, env, session.reply)
    pattern = env.pattern_for(bool(session.reply.info.get("tools")))
    modes: dict[str, str] = {}
    while not session.reply.done:
        before = session.reply
        try:
            turn = await ctx.generate(conversation.next_prompt(before))
        except BudgetSpent:
            if not ctx.num_turns:
                raise
            ctx.cut_short()
            return "max_context", modes
        action = find_action(pattern, turn.text)
        reply = await session.step(action or "")
        ctx.record(_step(env, before, reply, action))
        modes.update(reply.info.get("metrics_agg_mode", {}))
        conversation.past.append((before, turn.text))
        if ctx.num_turns == ctx.budget.max_turns and not reply.done:
            return "max_turns", modes
    return ("terminated" if session.reply.terminated else "truncated"), modes


class _Conversation:
    def __init__(self, ctx: Context, env: EnvConfig, start: EnvReply) -> None:
        self._ctx, self._env, self._start = ctx, env, start
        self._messages: list[Message] = []
        self.past: list[tuple[EnvReply, str]] = []

    def next_prompt(self, reply: EnvReply) -> array:
        ctx, env, start = self._ctx, self._env, self._start
        numbers = {"turn": ctx.num_turns + 1, "max_tokens": ctx.sampling.max_new_tokens}
        if ctx.budget.max_turns is not None:
            numbers["turns_left"] = ctx.budget.max_turns - ctx.num_turns
        if env.history is not None:
            ctx.begin_segment()
            return ctx.render(fresh_messages(env, start, reply, self.past, numbers))
        if not self.past:
            self._messages = first_messages(env, start, numbers)
            return ctx.render(self._messages)
        following = next_messages(env, start, reply, numbers)
        self._messages += [Message("assistant", self.past[-1][1]), *following]
        if ctx.can_reply(following):
            return ctx.reply(following)
        ctx.begin_segment()
        return ctx.render(self._messages)


def find_action(pattern: str, text: str) -> str | None:
    """Return the stripped action; None unless `env.<tag>.pattern` matches exactly once."""
    named = ACTION_FORMATS.get(pattern)
    found = re.findall(named.pattern if named else pattern, text, re.DOTALL)
    return found[0].strip() or None if len(found) == 1 else None


def _step(env: EnvConfig, before: EnvReply, reply: EnvReply, action: str | None) -> AgentStep:
    key = str(before.info.get("state_key", before.observation)).encode()
    if "state_key" not in before.info:
        key += b"".join(before.pictures)
    state = int.from_bytes(blake2b(key, digest_size=8).digest(), "little", signed=True)
    metrics = {str(name): float(value) for name, value in reply.info.get("metrics", {}).items()}
    penalties = env.penalties(action, metrics)
    return AgentStep(
        reply.observation,
        reply.reward + sum(penalties.values()),
        state,
        action,
        metrics | penalties,
        str(reply.info.get("board", "")),
    )


def _verdict(ctx: Context, reason: str, modes: dict[str, str]) -> Verdict:
    turns: list[Turn] = [turn for segment in (*ctx.segments, tuple(ctx.turns)) for turn in segment]
    steps = [turn.step for turn in turns if turn.step is not None]
    values: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for name, value in step.metrics.items():
            values[name].append(value)
    parts = {name: float(AGGREGATES[modes.get(name, "mean")](found)) for name, found in values.items()}
    parts |= {"num_actions": float(len(steps)), "segments": float(len(ctx.segments) + bool(ctx.turns))}
    cut = sum(turn.finish_reason == "length" for turn in turns) / len(turns)
    stops = {f"stop/{name}": float(name == reason) for name in STOPS}
    return Verdict("ok", sum(step.reward for step in steps), parts | {"cut_short": cut} | stops)


def _given_up(ctx: Context, env: EnvConfig, lost: SessionLost) -> list[Sample]:
    tag = ctx.prompt.domain
    detail = f"env.{tag}: seed {ctx.prompt.extra['seed']}: {lost.reason}: {lost.detail}"
    if env.on_error == "raise":
        raise RunFailed(detail, lost.traceback)
    if env.on_error == "zero" and ctx.num_turns:
        return ctx.samples(_verdict(ctx, f"env_{lost.reason}", {}))
    status = "timeout" if lost.reason == "timeout" else "error"
    return abandoned(ctx, Verdict(status, detail=detail, traceback=lost.traceback))
