"""`Roofline`: the least seconds that a step can take on its devices, by phase; see `track/roofline.py`."""

import numpy as np
import torch

from spmd_rl.config.schema import RlvrConfig
from spmd_rl.distributed import World
from spmd_rl.learn.balance import begins
from spmd_rl.learn.prepare import Plan
from spmd_rl.rollout import Collected
from spmd_rl.track.roofline import Devices, Pass, TokenCounts, find_device_spec, roofline
from spmd_rl.train.base import CriticBackend, Metrics, TrainBackend


class Roofline:
    """The work of one step on the devices of this run. It has no metrics where the rates of a device are not known."""

    def __init__(
        self,
        cfg: RlvrConfig,
        policy: TrainBackend,
        reference: TrainBackend | None,
        critic: CriticBackend | None,
        world: World,
    ) -> None:
        """`world`: all ranks, which are all devices."""
        self._policy, self._reference, self._critic = policy, reference, critic
        self._warmup = cfg.algorithm.critic_warmup
        self._spec = find_device_spec(cfg.track.device, world.device, cfg.policy.dtype)
        self._devices = Devices(world.size, cfg.engine.tp, getattr(torch, cfg.policy.dtype).itemsize)

    def metrics(self, collected: Collected, plan: Plan, needs_old: bool) -> Metrics:
        """Seconds by phase, equal on all ranks. needs_old: the policy's logprobs were computed before the update."""
        if self._spec is None:
            return {}
        answers = collected.outcomes.answers
        width = 1 + answers["answer"].max(initial=0)
        trains = np.isin(answers["ticket"] * width + answers["answer"], plan.keys @ (width, 1))
        passes = [Pass(self._policy.size, int(needs_old), plan.step > self._warmup)]
        passes += [Pass(self._reference.size, 1, False)] if self._reference else []
        passes += [Pass(self._critic.size, 1, True)] if self._critic else []
        seconds = roofline(
            _tokens(answers), _tokens(answers[trains]), self._policy.size, passes, self._devices, self._spec
        )
        return {f"roofline/{phase}": value for phase, value in seconds.items()}


def _tokens(answers: np.ndarray) -> TokenCounts:
    """Of rows of `ANSWER`, those of a ticket side by side."""
    rows = answers[["num_prompt_tokens", "num_answer_tokens", "num_tokens"]]
    bounds = np.flatnonzero(begins(answers["ticket"]))[1:]
    return TokenCounts.of(group.tolist() for group in np.split(rows, bounds))
