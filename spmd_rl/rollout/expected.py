"""`ExpectedVerdicts`: a scorer whose verdicts are progress, and may take as long as the settings allow them.

A rank with nothing to do but to wait for a slow judge is no stall. Waiting for longer than any verdict may take is one.
"""

from spmd_rl.config.schema import RewardsConfig
from spmd_rl.distributed import Journal
from spmd_rl.types import AnswerInfo, Prompt, Scorer, Verdict

MARGIN_SECONDS = 60.0
"""By then the sidecar's client has given up; see its `GRACE_SECONDS`."""


class ExpectedVerdicts:
    """A `Scorer` around another."""

    def __init__(self, scorer: Scorer, rewards: RewardsConfig, journal: Journal) -> None:
        self._scorer, self._journal = scorer, journal
        longest = max((domain.timeout + domain.start_seconds for domain in rewards.domains.values()), default=0.0)
        self._patience = longest + MARGIN_SECONDS

    @property
    def outstanding(self) -> int:
        """Answers whose verdict is not there yet."""
        return self._scorer.outstanding

    async def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """See `Scorer`."""
        self._journal.expect(self._patience)
        try:
            return await self._scorer.score(prompt, answer, info)
        finally:
            self._journal.progress += 1
            self._journal.expect(self._patience if self._scorer.outstanding else 0.0)
