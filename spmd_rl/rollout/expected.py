"""`ExpectedVerdicts`: waiting for a slow judge is a stall only beyond the longest timeout of a verdict."""

from collections import Counter

from spmd_rl.config.schema import RewardsConfig
from spmd_rl.distributed import Journal
from spmd_rl.types import AnswerInfo, Prompt, Scorer, Verdict

MARGIN_SECONDS = 60.0
"""Seconds beyond `GRACE_SECONDS` of the sidecar's client."""


class ExpectedVerdicts:
    """A scorer whose pending verdicts are no stall before the longest reward timeout."""

    def __init__(self, scorer: Scorer, rewards: RewardsConfig, journal: Journal) -> None:
        self._scorer, self._journal = scorer, journal
        longest = max((domain.timeout + domain.start_seconds for domain in rewards.domains.values()), default=0.0)
        self._patience = longest + MARGIN_SECONDS
        self._waiting: Counter[str] = Counter()

    @property
    def outstanding(self) -> int:
        """Number of pending verdicts."""
        return self._scorer.outstanding

    def __str__(self) -> str:
        domains = {domain: count for domain, count in sorted(self._waiting.items()) if count}
        named = ", ".join(domains if len(domains) == 1 else [f"{domain} {n}" for domain, n in domains.items()])
        return f"{sum(domains.values())} verdicts ({named})"

    async def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """See `Scorer`."""
        self._journal.expect(self._patience)
        self._waiting[prompt.domain] += 1
        try:
            return await self._scorer.score(prompt, answer, info)
        finally:
            self._waiting[prompt.domain] -= 1
            self._journal.progress += 1
            self._journal.expect(self._patience if self._scorer.outstanding else 0.0)
