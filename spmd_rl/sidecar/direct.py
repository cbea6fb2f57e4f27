"""Scoring in this process, without any sidecar: what `debug=true` uses, so that `breakpoint()` works in a reward.

Leaves out deadlines and isolation: a rewarder that hangs or dies takes the run with it.
"""

from typing import TYPE_CHECKING

from spmd_rl import wire
from spmd_rl.sidecar.services import services
from spmd_rl.sidecar.worker import judge
from spmd_rl.targets import build_target, start_target
from spmd_rl.types import AnswerInfo, Prompt, Verdict

if TYPE_CHECKING:
    from spmd_rl.config.schema import RewardsConfig


class Direct:
    """A `Scorer` that calls the rewarders itself. UserError at construction if one cannot be built."""

    def __init__(self, rewards: "RewardsConfig") -> None:
        self._rewarders = {
            domain: build_target(
                f"reward.{domain}", reward.target, reward.args, services=services(domain, reward.sandbox)
            )
            for domain, reward in rewards.domains.items()
        }
        for domain, rewarder in self._rewarders.items():
            start_target(f"reward.{domain}", rewards.domains[domain].target, rewarder)
        self.outstanding = 0

    async def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Judge one answer, here and now; an `async def score` is awaited."""
        if (rewarder := self._rewarders.get(prompt.domain)) is None:
            return Verdict("error", detail=f"no reward.{prompt.domain} is set")
        self.outstanding += 1
        try:
            return await judge(rewarder, wire.Question(prompt, answer, info))
        finally:
            self.outstanding -= 1
