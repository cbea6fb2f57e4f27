"""An environment of GEM (axon-rl/gem, the package `gem-llm`) by its id. An action without `\\boxed{}` gets one.

    env.number.target=envs.adapters.gem_id:GemEnv env.number.args.id=game:GuessTheNumber-v0-easy
    env.sums.target=envs.adapters.gem_id:GemEnv env.sums.args={id: "math:GSM8K", rows: gsm8k.jsonl, python: true}

GEM draws from the global generators, see `global_random`. Its games treat invalid actions by their own rules: most end,
with a negative reward, by which they are recognised here. An episode succeeds with a last reward of 1. Environments
over a dataset take its rows in turn and ignore the seed; here the seed chooses the row.
"""

import re
from collections.abc import Mapping
from typing import Any

from spmd_rl.types import RunLimits, Sandbox

from ..rows import read_rows
from .global_random import OwnRandom

PROGRAM = re.compile(r"<python>(.*?)</python>|```\n?python\n(.*?)```", re.DOTALL)
METRICS = {"success": "last", "tool_calls": "sum", "tool_failures": "sum"}


class GemEnv:
    """An environment that plays `gem.make(id, **args)`."""

    def __init__(
        self,
        id: str,
        args: Mapping[str, Any] | None = None,
        boxed: bool = True,
        rows: str | None = None,
        python: bool = False,
        max_tool_uses: int = 1,
        tool_success_reward: float = 0.0,
        sandbox: Sandbox | None = None,
    ) -> None:
        """Make the environment; GEM's exceptions for unknown ids or arguments pass through.

        `boxed`: put `\\boxed{}` around actions. `rows`: a JSONL file in place of the dataset that GEM would download.
        `python`: GEM's tool, whose programs (`<python>...</python>`) run in the sandbox; the answer comes after
        `max_tool_uses` of them at the latest.
        """
        import gem

        args = dict(args or {})
        if rows is not None:
            from datasets import Dataset

            args["dataset"] = Dataset.from_list(read_rows(rows))
        # With the tool a turn is reasoning, and its answer has a box already.
        self._random, self._boxed, self._seen, self._calls = OwnRandom(), boxed and not python, "", (0, 0)
        with self._random.in_place():
            self._bare = self._env = gem.make(id, **args)
        if python:
            self._env = _with_python(self._bare, sandbox, max_tool_uses, tool_success_reward)

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Begin an episode by its seed."""
        if (dataset := getattr(self._bare, "dataset", None)) is not None:
            self._bare.idx = seed % len(dataset)
            if hasattr(self._bare, "dataset_iter"):
                self._bare.dataset_iter = iter([dataset[self._bare.idx]])
        with self._random.in_place(seed):
            observation, info = self._env.reset(seed=seed % 2**32)
        self._seen, self._calls = str(observation), (0, 0)
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
        if self._env is not self._bare:
            calls, good = info["tool_use_counter"], info["tool_success_counter"]
            earlier, self._calls = self._calls, (calls, calls - good)
            metrics |= {"tool_calls": float(calls - earlier[0]), "tool_failures": float(calls - good - earlier[1])}
        info = _kept(info) | {"metrics": metrics, "metrics_agg_mode": METRICS}
        return f"{info.pop('prefix', '')}{self._seen}", float(reward), bool(terminated), bool(truncated), info

    def close(self) -> None:
        """Close the environment, if it has a `close`."""
        if hasattr(self._bare, "close"):
            self._bare.close()


def _with_python(env: Any, sandbox: Sandbox | None, max_tool_uses: int, success_reward: float) -> Any:
    """Return an environment of GEM in its wrapper of tools, with its Python tool in our sandbox."""
    from gem.tools.python_code_tool import PythonCodeTool
    from gem.tools.tool_env_wrapper import ToolEnvWrapper

    class SandboxedTool(PythonCodeTool):
        def execute_action(self, action: str) -> tuple[bool, bool, str, str]:
            if not (found := PROGRAM.search(action)):
                return False, True, "", action
            if sandbox is None:
                raise RuntimeError("there is no sandbox here")
            result = sandbox.run((found[1] or found[2]).strip(), "", RunLimits())
            failed = result.end != "exit" or result.code != 0
            said = f"{result.stdout}\n{result.stderr}".strip() if failed else result.stdout.strip()
            return True, failed, f"Code execution result: {said[-1000:]}\n", action[: found.end()]

    return ToolEnvWrapper(env, [SandboxedTool()], tool_success_reward=success_reward, max_tool_uses=max_tool_uses)


def _kept(info: Mapping[str, Any]) -> dict[str, Any]:
    return {name: str(info[name]) for name in ("suffix",) if info.get(name)}
