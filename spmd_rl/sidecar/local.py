"""Rewarders and environments in this process, for `debug=true`: `breakpoint()` works there, a hang or crash ends the
run.
"""

import asyncio
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from spmd_rl.base.process import Overtime, deadline
from spmd_rl.base.targets import build_target, start_target
from spmd_rl.sidecar import wire
from spmd_rl.sidecar.clients import OpenSession
from spmd_rl.sidecar.env_worker import EnvSlot
from spmd_rl.sidecar.launcher import env_pool_spec
from spmd_rl.sidecar.services import service_factories
from spmd_rl.sidecar.worker import judge
from spmd_rl.types import AnswerInfo, EnvReply, Prompt, SessionLost, Verdict

if TYPE_CHECKING:
    from spmd_rl.config.schema import EnvsConfig, RewardsConfig


class LocalScorer:
    """A `Scorer` that calls rewarders directly. UserError if one cannot be built."""

    def __init__(self, rewards: "RewardsConfig | None") -> None:
        self._rewarders = {}
        for domain, reward in rewards.domains.items() if rewards else ():
            section = f"reward.{domain}"
            services = service_factories(section, reward.sandbox, packages=reward.packages)
            self._rewarders[domain] = build_target(section, reward.target, reward.args, services=services)
            start_target(section, reward.target, self._rewarders[domain])
        self.outstanding = 0

    async def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Judge one answer in this process."""
        if (rewarder := self._rewarders.get(prompt.domain)) is None:
            return Verdict("error", detail=f"no reward.{prompt.domain} is set")
        self.outstanding += 1
        try:
            return await judge(rewarder, wire.ScoreInput(prompt, answer, info))
        finally:
            self.outstanding -= 1


class LocalEnvironments:
    """`Environments` in this process, one call at a time. UserError if one cannot be built."""

    def __init__(self, envs: "EnvsConfig | None", timed: bool = False) -> None:
        """timed: enforce the timeouts of `reset` and `step` (main thread only)."""
        self._timed = timed
        self.outstanding = 0
        self._specs = {tag: env_pool_spec(env) for tag, env in (envs.tags.items() if envs else ())}
        self._free = {tag: [self._new_slot(tag)] for tag in self._specs}
        for tag in self._specs:
            self._free[tag][0].build()

    async def reset(self, tag: str, seed: int, held_out: bool = False, solve: bool = False) -> OpenSession:
        """See `Environments`. Any number of sessions may be open."""
        if tag not in self._specs:
            raise SessionLost("error", f"no env.{tag} is set")
        spec = self._specs[tag]
        slot = self._free[tag].pop() if self._free[tag] else self._new_slot(tag)
        try:
            reply = await self._play(slot, spec.reset_timeout, wire.ResetRequest(0, tag, seed, held_out, solve))
        except SessionLost:
            self._free[tag].append(slot)
            raise
        return OpenSession(
            0, tag, reply, partial(self._play, slot, spec.step_timeout), partial(self._free[tag].append, slot)
        )

    async def _play(self, slot: EnvSlot, seconds: float, call: wire.ResetRequest | wire.StepRequest) -> EnvReply:
        self.outstanding += 1
        try:
            # `wait_for` cancels an `async def` first; the signal, a second later, interrupts plain functions.
            with deadline(seconds + 1) if self._timed else nullcontext():
                outcome = await asyncio.wait_for(slot.answer(call), seconds if self._timed else None)
        except (TimeoutError, Overtime):
            raise SessionLost("timeout", f"not finished after {seconds:g} s") from None
        finally:
            self.outstanding -= 1
        if isinstance(outcome, wire.SessionFailure):
            raise SessionLost(outcome.reason, outcome.detail, outcome.traceback)
        return wire.ENV_REPLY.unpack(outcome.reply)

    def close(self) -> None:
        """Close the environments of all ended sessions."""
        for slots in self._free.values():
            for slot in slots:
                slot.close()

    def _new_slot(self, tag: str) -> EnvSlot:
        spec = self._specs[tag]
        return EnvSlot(tag, spec, service_factories(f"env.{tag}", spec.sandbox, packages=spec.packages))
