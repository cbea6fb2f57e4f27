"""An environment of GEM (axon-rl/gem, the package `gem-llm`) by its id. An action without `\\boxed{}` gets one.

    env.number.target=envs.adapters.gem_id:GemEnv env.number.args.id=game:GuessTheNumber-v0-easy

GEM draws from the global generators, see `global_random`. Its games treat invalid actions by their own rules: most end,
with a negative reward, by which they are recognised here. An episode succeeds with a last reward of 1.
"""

from collections.abc import Mapping
from typing import Any

from .global_random import OwnRandom


class GemEnv:
    """An environment that plays `gem.make(id, **args)`."""

    def __init__(self, id: str, args: Mapping[str, Any] | None = None, boxed: bool = True) -> None:
        """Make the environment; GEM's exceptions for unknown ids or arguments pass through. `boxed`: put `\\boxed{}`
        around actions.
        """
        import gem

        self._random, self._boxed, self._seen = OwnRandom(), boxed, ""
        with self._random.in_place():
            self._env = gem.make(id, **(args or {}))

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Begin an episode by its seed."""
        with self._random.in_place(seed):
            observation, info = self._env.reset(seed=seed % 2**32)
        self._seen = str(observation)
        return f"{info.get('prefix', '')}{self._seen}", _kept(info)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Act, and return Gymnasium's five-tuple."""
        said = action if "\\boxed" in action or not self._boxed or not action else f"\\boxed{{{action}}}"
        with self._random.in_place():
            observation, reward, terminated, truncated, info = self._env.step(said)
        before, self._seen = self._seen, str(observation)
        metrics = {
            "success": float(terminated and reward >= 1.0),
            "action_is_valid": float(bool(action.strip()) and reward >= 0.0),
            "action_is_effective": float(self._seen != before),
        }
        info = _kept(info) | {"metrics": metrics, "metrics_agg_mode": {"success": "last"}}
        return f"{info.pop('prefix', '')}{self._seen}", float(reward), bool(terminated), bool(truncated), info

    def close(self) -> None:
        """Close the environment, if it has a `close`."""
        if hasattr(self._env, "close"):
            self._env.close()


def _kept(info: Mapping[str, Any]) -> dict[str, Any]:
    return {name: str(info[name]) for name in ("suffix",) if info.get(name)}
