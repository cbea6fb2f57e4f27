"""A task of reasoning-gym: the seed draws the question, and the first answer ends the episode.

    env.sums.target=envs.adapters.reasoning_gym_task:ReasoningGymEnv env.sums.args.task=chain_sum

Many of its scorers give a little for a wrong answer: `strict` leaves only the full score, as a reward should.
"""

from collections.abc import Mapping
from typing import Any


class ReasoningGymEnv:
    """An environment with one question of `reasoning_gym.create_dataset(task, **args)` an episode."""

    def __init__(self, task: str, args: Mapping[str, Any] | None = None, strict: bool = True) -> None:
        """Prepare the task; reasoning-gym's exceptions for unknown tasks or arguments pass through."""
        import reasoning_gym

        self._create, self._task, self._args, self._strict = reasoning_gym.create_dataset, task, args or {}, strict
        self._dataset, self._entry = self._drawn(0)

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Draw a question. Seeds are cut to 31 bits."""
        self._dataset, self._entry = self._drawn(seed % 2**31)
        return str(self._entry["question"]), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Judge the answer and end the episode."""
        answer = action.strip()
        score = float(self._dataset.score_answer(answer, self._entry)) if answer else 0.0
        metrics = {"success": float(score >= 1.0), "task_score": score, "action_is_valid": float(bool(answer))}
        reward = metrics["success"] if self._strict else score
        info = {"metrics": metrics, "metrics_agg_mode": {"success": "last", "task_score": "last"}}
        return "", reward, True, False, info

    def _drawn(self, seed: int) -> tuple[Any, dict[str, Any]]:
        dataset = self._create(self._task, size=1, seed=seed, **self._args)
        return dataset, dataset[0]
