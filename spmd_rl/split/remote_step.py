"""`RemoteWork`: the steps of training ranks as a rank sees them that generates for these."""

import time
from collections.abc import Callable, Mapping, Sequence

from spmd_rl.rollout.replay_log import PartialRollouts
from spmd_rl.rollout.step_plan import GroupSlice
from spmd_rl.rollout.step_run import StepRun
from spmd_rl.split.client import Task, TrainerClient
from spmd_rl.split.messages import Stats
from spmd_rl.types import Group

CLAIM_SECONDS = 0.05
"""The pause before a rank that got nothing to do asks again."""


class RemoteWork:
    """A `rollout.step_run.StepSource`, and a `Migration` of slices that this rank has not finished."""

    def __init__(self, client: TrainerClient, leaves: bool = False) -> None:
        """leaves: this rank has other work between two steps."""
        self.leaves = leaves
        """See `Migration`."""
        self.num_accepted = 0
        """Slices of this rank's that count, of this step."""
        self._client, self._step, self._ended, self._ask_again = client, 0, False, 0.0
        self._version: Callable[[], int] = lambda: -1
        self._waited, self._swaps = 0.0, ()
        self._tasks: dict[GroupSlice, Task] = {}

    def begin(self, step: int, version: Callable[[], int], waited: float = 0.0, swaps: Sequence[float] = ()) -> None:
        """Go on with this step. version: what the engine of this rank holds now. waited: seconds for a newer policy.

        swaps: fills with the seconds of each change of the policy.
        """
        self._step, self._version, self._waited, self._swaps = step, version, waited, swaps
        self._ended, self._ask_again, self.num_accepted = False, 0.0, 0

    def next(self, room: int) -> list[GroupSlice]:
        """See `rollout.claims.Claim`."""
        if room <= 0 or self._ended or time.monotonic() < self._ask_again:
            return []
        self._ended, tasks = self._client.claim("step", self._step, self._version(), room)
        if not tasks:
            self._ask_again = time.monotonic() + CLAIM_SECONDS
            self._client.link.wait()
        found = {GroupSlice(*task.place): task for task in tasks}
        self._tasks |= found
        return list(found)

    def ahead(self, room: int) -> list[GroupSlice]:
        """See `rollout.claims.Claim`."""
        return self.next(room)

    def ended(self) -> bool:
        """See `StepSource`. RunFailed where this rank is given up."""
        link = self._client.link
        link.check()
        return self._ended or link.news.over or link.news.step > self._step

    def finish(self, group_slice: GroupSlice, group: Group, run: StepRun) -> None:
        """See `StepSource`. Where it is too late, the step has ended."""
        idle, seconds, tokens = run.costs()
        stats = Stats(min(idle, seconds), max(seconds, 1e-9), tokens, self._waited, len(self._swaps), sum(self._swaps))
        reported = self._client.hand_in(self._tasks.pop(group_slice), group.samples, stats)
        self.num_accepted += bool(reported and reported.accepted)
        self._ended |= reported is None or not reported.accepted or reported.step > self._step

    def offer(self, partial: Mapping[GroupSlice, PartialRollouts]) -> None:
        """See `Migration`."""
        for group_slice, played in partial.items():
            self._client.leave_slice(self._tasks.pop(group_slice), played)

    def claim(self, group_slice: GroupSlice) -> PartialRollouts:
        """See `Migration`."""
        task = self._tasks[group_slice]
        return {} if task.begun_by is None else self._client.take_begun(task)
