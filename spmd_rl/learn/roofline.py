"""`Roofline`: the least seconds that a step can take on its devices, by phase; see `track/roofline.py`."""

import numpy as np
import torch

from spmd_rl.config.schema import DeviceSpecConfig
from spmd_rl.learn.advantages import Samples
from spmd_rl.learn.balance import begins
from spmd_rl.learn.prepare import Plan
from spmd_rl.track.roofline import Devices, ModelPasses, TokenCounts, find_device_spec, roofline
from spmd_rl.train import Roles
from spmd_rl.train.base import Metrics


class Roofline:
    """Work of one step on the devices of this run. No metrics if the rates of a device are unknown."""

    def __init__(self, roles: Roles, spec: DeviceSpecConfig, dtype: str, tp: int) -> None:
        """All devices are ranks of the policy. dtype: of the computation. tp: of the engine."""
        self._policy, self._reference, self._critic, teachers = roles
        # Several teachers see different domains, so together they cost about as much as one.
        self._teacher = next(iter(teachers.values()), None)
        world = self._policy.layout.world
        self._spec = find_device_spec(spec, world.device, dtype)
        self._devices = Devices(world.size, tp, getattr(torch, dtype).itemsize)

    def metrics(
        self, collected: Samples, plan: Plan, needs_old: bool, policy_epochs: int, critic_epochs: int
    ) -> Metrics:
        """Return the least seconds of each phase, equal on all ranks.

        needs_old: logprobs are computed before the update. policy_epochs, critic_epochs: passes over the samples that
        update each role.
        """
        if self._spec is None:
            return {}
        answers = collected.table.answers
        width = 1 + answers["answer"].max(initial=0)
        used = np.isin(answers["ticket"] * width + answers["answer"], plan.keys @ (width, 1))
        passes = [ModelPasses(self._policy.size, int(needs_old), policy_epochs)]
        passes += [ModelPasses(self._reference.size, 1, 0)] if self._reference else []
        passes += [ModelPasses(self._teacher.size, 1, 0)] if self._teacher else []
        passes += [ModelPasses(self._critic.size, 1, critic_epochs)] if self._critic else []
        seconds = roofline(
            _tokens(answers), _tokens(answers[used]), self._policy.size, passes, self._devices, self._spec
        )
        return {f"roofline/{phase}": value for phase, value in seconds.items()}


def _tokens(answers: np.ndarray) -> TokenCounts:
    """Return token counts by ticket, from rows of `ANSWER` with equal tickets adjacent."""
    rows = answers[["num_prompt_tokens", "num_answer_tokens", "num_tokens"]]
    bounds = np.flatnonzero(begins(answers["ticket"]))[1:]
    return TokenCounts.of(group.tolist() for group in np.split(rows, bounds))
