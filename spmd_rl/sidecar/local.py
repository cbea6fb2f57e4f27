"""Scoring in this process, without a sidecar, as `debug=true` asks for: `breakpoint()` works in a rewarder.

There are no deadlines and there is no isolation: a rewarder that hangs or dies takes the run with it.
"""

from typing import TYPE_CHECKING

from spmd_rl import wire
from spmd_rl.sidecar.services import service_factories
from spmd_rl.sidecar.worker import judge
from spmd_rl.targets import build_target, start_target
from spmd_rl.types import AnswerInfo, Prompt, Verdict

if TYPE_CHECKING:
    from spmd_rl.config.schema import RewardsConfig


class LocalScorer:
    """A `Scorer` that calls the rewarders itself. UserError at construction if one cannot be built."""

    def __init__(self, rewards: "RewardsConfig") -> None:
        self._rewarders = {}
        for domain, reward in rewards.domains.items():
            section, services = f"reward.{domain}", service_factories(domain, reward.sandbox, packages=reward.packages)
            self._rewarders[domain] = build_target(section, reward.target, reward.args, services=services)
            start_target(section, reward.target, self._rewarders[domain])
        self.outstanding = 0
        """The number of answers whose verdict is not there yet."""

    async def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Judge one answer in this process; an `async def score` is awaited."""
        if (rewarder := self._rewarders.get(prompt.domain)) is None:
            return Verdict("error", detail=f"no reward.{prompt.domain} is set")
        self.outstanding += 1
        try:
            return await judge(rewarder, wire.ScoreInput(prompt, answer, info))
        finally:
            self.outstanding -= 1
