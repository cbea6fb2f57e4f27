"""`RolloutSource`: the source of a pipeline's steps."""

from collections.abc import Sequence
from typing import Any, Protocol

from spmd_rl.data import EnvTasks, Prompts
from spmd_rl.rollout.collected import Collected
from spmd_rl.rollout.episode import Sampling
from spmd_rl.types import Group, Prompt


class RolloutSource(Protocol):
    """Generator and scorer of steps, on these ranks (`Rollouts`) or others (`placement.trainers.ReceivedRollouts`)."""

    @property
    def prompts(self) -> Prompts | EnvTasks:
        """Prompts of tickets, and held-out prompts."""
        ...

    def collect(self, step: int) -> Collected:
        """[train] Return a step's answers, of version `step - 1` or older."""
        ...

    def answer(self, prompts: Sequence[Prompt], sampling: Sequence[Sampling]) -> list[Group]:
        """[train] Return this rank's share of the answers to held-out prompts, one per `sampling` and prompt."""
        ...

    def rest(self) -> None:
        """Free the engine's memory until the next publish, as `collect` does."""
        ...

    def state(self) -> dict[str, Any]:
        """See `checkpoint.Stateful`."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """See `checkpoint.Stateful`."""
        ...
