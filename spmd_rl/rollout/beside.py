"""Held-out questions that are answered beside a step, by the same weights: they fill what its long answers leave idle.

    rollouts = BesideRollouts(rollouts, questions)    # `questions(held_out, step)`: of the weights after `step`
    rollouts.collect(step)                            # [all] also answers questions(held_out, step - 1)
    rollouts.answer(*questions(held_out, step - 1))   # [all] what came of them

A slice of the step goes first wherever there is room for one, and the step ends when it would without the questions;
the rest of these then have the engine to themselves.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from spmd_rl.rollout.collected import Collected
from spmd_rl.rollout.episode import Sampling, in_order
from spmd_rl.rollout.kept import KeptAnswers
from spmd_rl.rollout.player import Question
from spmd_rl.types import Group, Prompt

Questions = tuple[Sequence[Prompt], Sequence[Sampling]]
"""Held-out prompts, and how each answer to them is drawn."""


class QuestionShare:
    """What one replica answers of some questions: no tickets and no filter."""

    def __init__(self, questions: Questions, replica: int, num_replicas: int, kept: KeptAnswers | None = None) -> None:
        """kept: answers that are there already, and where each one is written as soon as it has ended."""
        self._prompts, sampling = questions
        there = kept.numbers if kept else frozenset()
        missing = [[a for a in range(len(sampling)) if (n, a) not in there] for n in range(len(self._prompts))]
        dealt = [n for n, answers in enumerate(missing) if answers][replica::num_replicas]
        self._open = deque(Question(n, self._prompts[n], {a: sampling[a]}) for n in dealt for a in missing[n])
        self._samples = defaultdict(list, kept.samples() if kept else {})
        self._kept = kept

    def claim(self, room: int) -> list[Question]:
        """Return the next questions, as many as there is room for."""
        return [self._open.popleft() for _ in range(min(room, len(self._open)))]

    def finish(self, group: Group) -> None:
        """Take an answer."""
        self._samples[group.ticket] += group.samples
        if self._kept:
            self._kept.write(group.samples)

    def groups(self) -> list[Group]:
        """Return this replica's answers, by prompt."""
        return [Group(self._prompts[n], n, in_order([self._samples[n]])) for n in sorted(self._samples)]


class BesideRollouts:
    """Rollouts that answer the questions of an evaluation beside the step that follows it."""

    def __init__(self, rollouts: Any, questions: Callable[[Sequence[Prompt], int], Questions]) -> None:
        """rollouts: a `Rollouts`. questions: from the held-out prompts, those of the weights after a step; none where
        it is not due."""
        self._rollouts, self._questions, self.prompts = rollouts, questions, rollouts.prompts
        self._answers: list[Group] | None = None
        self.state, self.load_state = rollouts.state, rollouts.load_state

    def collect(self, step: int) -> Collected:
        """[all] See `Rollouts.collect`."""
        questions = self._questions(self.prompts.eval, step - 1)
        share = self._rollouts.share(questions) if questions[1] else None
        collected = self._rollouts.collect(step, share)  # [all]
        self._answers = share.groups() if share else None
        return collected

    def answer(self, prompts: Sequence[Prompt], sampling: Sequence[Sampling]) -> list[Group]:
        """[all] See `Rollouts.answer`; what was asked beside the last step is there already."""
        found, self._answers = self._answers, None
        return self._rollouts.answer(prompts, sampling) if found is None else found  # [all]
