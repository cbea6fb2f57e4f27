"""An environment of SkyRL-gym by its id, over rows of your own.

    env.gsm.target=envs.adapters.skyrl_gym:SkyRlGymEnv env.gsm.args.id=gsm8k_multi_turn env.gsm.args.rows=gsm8k.jsonl

A row has a `prompt`, chat messages or a text; its other columns (`reward_spec`, ...) are the environment's `extras`. An
environment exists for one episode. Its own metrics are passed on; it succeeds with a last reward of 1.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from ..rows import read_rows, split_prompt


class SkyRlGymEnv:
    """An environment that plays `skyrl_gym.make(id, env_config=config, extras=row)`."""

    def __init__(self, id: str, rows: str, config: Mapping[str, Any] | None = None) -> None:
        """Read `rows`, a JSONL file of which the seed picks a line. ValueError for an empty file."""
        import skyrl_gym

        self._make, self._id, self._config = skyrl_gym.make, id, SimpleNamespace(**(config or {}))
        self._rows, self._env = read_rows(rows), None

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Make the environment of a row."""
        self.close()
        row = dict(self._rows[seed % len(self._rows)])
        prompt = row.pop("prompt", "")
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]
        self._env = self._make(self._id, env_config=self._config, extras=row)
        begun, _ = self._env.init(messages)
        system, text = split_prompt(begun)
        return text, {"instruction": system} if system else {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Act. The new messages are the observation."""
        assert self._env is not None, "reset comes first"
        out = self._env.step(action)
        reward, done = float(out["reward"]), bool(out["done"])
        metrics = {"success": float(done and reward >= 1.0), "action_is_valid": float(bool(action.strip()))}
        own = self._env.get_metrics() if done else {}
        metrics |= {name: float(value) for name, value in own.items() if isinstance(value, int | float)}
        text = "\n".join(str(message["content"]) for message in out["observations"])
        return text, reward, done, False, {"metrics": metrics, "metrics_agg_mode": dict.fromkeys(metrics, "last")}

    def close(self) -> None:
        """Close the environment of the last episode."""
        if self._env is not None:
            self._env.close()
        self._env = None
