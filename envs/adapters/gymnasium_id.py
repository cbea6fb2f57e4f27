"""An environment of Gymnasium by its id. An action is a name or a number; the observation is text or a picture.

    env.lake.target=envs.adapters.gymnasium_id:GymnasiumEnv env.lake.args.id=FrozenLake-v1
    env.lake.args.actions=[left,down,right,up]

The observation is the environment's picture with `picture: true` (`rgb_array`), else its own drawing as text (`ansi`)
with a terminal's highlights in square brackets, else its plain representation. Discrete actions are numbers, or
`actions`, names in the order of the numbers; text spaces take the action unchanged, others as JSON. With a `success`
return, or the id's registered reward threshold, episodes that reach it count as successes.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_ESCAPE = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0m", re.DOTALL)


class GymnasiumEnv:
    """An environment that plays `gymnasium.make(id, **args)`."""

    def __init__(
        self,
        id: str,
        args: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        instruction: str = "",
        success: float | None = None,
        picture: bool = False,
    ) -> None:
        """Make the environment. `instruction`: the model's first text; default: the actions.

        ValueError if the number of names is not that of the actions; Gymnasium's exceptions for unknown ids or
        arguments pass through.
        """
        import gymnasium

        args = {**(args or {}), **({"render_mode": "rgb_array"} if picture else {})}
        env = gymnasium.make(id, **args)
        # The render modes are known only after a first construction.
        if "render_mode" not in args and "ansi" in env.metadata.get("render_modes", ()):
            env.close()
            env = gymnasium.make(id, **args, render_mode="ansi")
        self._env, space = env, env.action_space
        self._drawn, self._picture = env.render_mode == "ansi", picture
        self._space, self._spaces = space, gymnasium.spaces
        self._success = success if success is not None else getattr(env.spec, "reward_threshold", None)
        self._names = [name.lower() for name in actions]
        if self._names and not (isinstance(space, self._spaces.Discrete) and space.n == len(self._names)):
            raise ValueError(f"actions: {len(self._names)} names, and the action space of {id} is {space}")
        self._instruction = instruction or self._how_to_act()
        self._seen, self._shown, self._earned = "", {}, 0.0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Begin an episode. Seeds are cut to 31 bits, which all environments accept."""
        observation, _ = self._env.reset(seed=seed % 2**31)
        self._look(observation)
        self._earned = 0.0
        return self._seen, {"instruction": self._instruction, **self._shown}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Act. An action outside of the space changes nothing."""
        before, reward, terminated, truncated = (self._seen, self._shown), 0.0, False, False
        valid, value = self._parsed(action.strip())
        if valid:
            observation, reward, terminated, truncated, _ = self._env.step(value)
            self._look(observation)
        self._earned += float(reward)
        metrics = {"action_is_valid": float(valid), "action_is_effective": float(not self._is_like(*before))}
        if self._success is not None:
            metrics["success"] = float(self._earned >= self._success and bool(terminated or truncated))
        info = {"metrics": metrics, "metrics_agg_mode": {"success": "last"}, **self._shown}
        return self._seen, float(reward), bool(terminated), bool(truncated), info

    def close(self) -> None:
        """Close the environment, with its windows."""
        self._env.close()

    def _look(self, observation: Any) -> None:
        if self._picture:
            self._shown = {"pictures": [self._env.render()]}
        elif self._drawn:
            self._seen = _ESCAPE.sub(r"[\1]", str(self._env.render())).strip()
        else:
            self._seen = str(observation)

    def _is_like(self, seen: str, shown: Mapping[str, Any]) -> bool:
        """Return True if the state looks as before."""
        pixels = [one.tobytes() for each in (shown, self._shown) for one in each.get("pictures", ())]
        return self._seen == seen and len(set(pixels)) <= 1

    def _parsed(self, text: str) -> tuple[bool, Any]:
        """Return True if a text is an action, and its value."""
        if isinstance(self._space, self._spaces.Text):
            return self._space.contains(text), text
        if text.lower() in self._names:
            return True, self._names.index(text.lower()) + int(self._space.start)
        try:
            value = json.loads(text)
        except ValueError:
            return False, None
        if isinstance(self._space, self._spaces.Discrete):
            # JSON's true is an int in Python.
            return isinstance(value, int) and not isinstance(value, bool) and self._space.contains(value), value
        import numpy

        try:
            value = numpy.asarray(value, dtype=self._space.dtype)
        except (TypeError, ValueError):
            return False, None
        return self._space.contains(value), value

    def _how_to_act(self) -> str:
        if self._names:
            return f"Actions: {', '.join(self._names)}."
        if isinstance(self._space, self._spaces.Discrete):
            first = int(self._space.start)
            return f"An action is a number from {first} to {first + int(self._space.n) - 1}."
        return f"An action is JSON for {self._space}."
