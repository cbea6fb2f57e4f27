"""The episode of an agent: observe, answer, act, until the environment or a budget ends it.

    reset -> [ prompt -> answer -> action -> step ] x turns -> Sample, or one for each segment

By default an episode is one conversation whose tokens are never rendered again. Where the chat template would change
what was said before (thoughts left out), or `env.<tag>.history` asks for fresh prompts, a new segment begins, which is
a sample of its own; `env/<tag>/segments` counts them.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from statistics import fmean
from typing import Any

from msgspec.structs import replace

from spmd_rl.config.sections.env import EnvConfig, EnvsConfig
from spmd_rl.errors import RunFailed
from spmd_rl.rollout.episode import BudgetSpent, Context, abandoned
from spmd_rl.rollout.prompt_text import messages_of, next_messages
from spmd_rl.types import AgentStep, EnvReply, Sample, Session, SessionLost, Verdict

AGGREGATES = {"mean": fmean, "sum": sum, "max": max, "min": min, "last": lambda values: values[-1]}
"""How the numbers of the steps become one of the episode: `info["metrics_agg_mode"]`."""
STOP = "stop/"
"""Prefix of the verdict's part that says why an episode ended."""


class Agent:
    """An `Episode` that plays the environment of `ctx.prompt`'s tag."""

    def __init__(self, envs: EnvsConfig) -> None:
        self._envs = envs.tags

    async def __call__(self, ctx: Context) -> list[Sample]:
        """Play until it has been played to its end, or as often as `env.<tag>.retries` allows."""
        env = self._envs[ctx.prompt.domain]
        while True:
            try:
                return await play_once(ctx, env)
            except SessionLost as lost:
                if ctx.attempt < env.retries:
                    ctx.begin_again()
                    continue
                return _given_up(ctx, env, lost)


async def play_once(ctx: Context, env: EnvConfig) -> list[Sample]:
    """Play an episode to its end. SessionLost: the environment could not."""
    seed, held_out = ctx.prompt.extra["seed"], ctx.prompt.extra["held_out"]
    session = await ctx.environments.reset(ctx.prompt.domain, seed, held_out)
    try:
        return _finished(ctx, await _turns(ctx, env, session))
    finally:
        await session.close()


async def _turns(ctx: Context, env: EnvConfig, session: Session) -> str:
    """Take turns until one of both sides ends the episode. Returns why it ended."""
    start, reply, past = session.reply, session.reply, []
    while not reply.done:
        try:
            turn = await ctx.generate(_prompt_ids(ctx, env, start, reply, past))
        except BudgetSpent:
            return "max_turns" if ctx.num_turns == ctx.budget.max_turns else "max_context"
        action = find_action(env, turn.text)
        state = _state(reply)
        reply = await session.step(action or "")
        penalty = env.format_penalty if action is None or not reply.info.get("metrics", {}).get("action_is_valid", 1) else 0
        ctx.record(_step(reply, state, action, penalty))
        past.append((turn.text, reply.observation))
        if ctx.num_turns == ctx.budget.max_turns and not reply.done:
            return "max_turns"
    return "terminated" if reply.terminated else "truncated"
