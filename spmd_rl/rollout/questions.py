"""Held-out questions of one replica, and its answers."""

from collections import defaultdict, deque
from collections.abc import Sequence

from spmd_rl.rollout.episode import Sampling, in_order
from spmd_rl.rollout.kept import KeptAnswers
from spmd_rl.rollout.player import Question
from spmd_rl.types import Group, Prompt

Questions = tuple[Sequence[Prompt], Sequence[Sampling]]
"""Prompts, and the sampling of each answer to them."""


class QuestionShare:
    """One replica's share of held-out questions."""

    def __init__(self, questions: Questions, replica: int, num_replicas: int, kept: KeptAnswers | None = None) -> None:
        self._prompts, sampling = questions
        there = kept.numbers if kept else frozenset()
        missing = [[a for a in range(len(sampling)) if (n, a) not in there] for n in range(len(self._prompts))]
        dealt = [n for n, answers in enumerate(missing) if answers][replica::num_replicas]
        self._open = deque(Question(n, self._prompts[n], {a: sampling[a]}) for n in dealt for a in missing[n])
        self._samples = defaultdict(list, kept.samples() if kept else {})
        self._kept = kept

    def claim(self, room: int) -> list[Question]:
        """Return at most `room` next questions."""
        return [self._open.popleft() for _ in range(min(room, len(self._open)))]

    def finish(self, group: Group) -> None:
        """Add the answers to a question."""
        self._samples[group.ticket] += group.samples
        if self._kept:
            self._kept.write(group.samples)

    def groups(self) -> list[Group]:
        """Return this replica's answers, by prompt."""
        return [Group(self._prompts[n], n, in_order([self._samples[n]])) for n in sorted(self._samples)]
