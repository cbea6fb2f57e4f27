"""`HandedOver`: what generating ranks hand over, seen from a training rank as if it had generated it itself."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import msgspec

from spmd_rl.config.schema import PipelineConfig
from spmd_rl.data import EnvTasks, Prompts
from spmd_rl.distributed import World
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.rollout import Collected, RankReport, Sampling, check_errors
from spmd_rl.rollout.coordinator import coordinate
from spmd_rl.rollout.prompt_lengths import drop_overlong
from spmd_rl.rollout.rounds import Cursor, GroupSlice, plan_round
from spmd_rl.split.exchange import Exchange
from spmd_rl.split.groups import unpack_groups, unpack_step
from spmd_rl.split.sides import TrainSide
from spmd_rl.types import Group, Prompt


class Told(msgspec.Struct, array_like=True):
    """What training ranks tell each other of a step that was handed over to them."""

    report: RankReport
    waited: float
    swaps: list[float]


@dataclass(frozen=True, slots=True)
class Arrived:
    """What generating ranks have made of a step, as a training rank sees it."""

    told: list[Told]
    """Of all of them."""
    finished: dict[GroupSlice, Group]
    """What they handed over to this rank."""
    seconds: float
    """For which this rank waited."""

    def pace(self, collected: Collected, swap: str, world: World) -> Mapping[str, float]:
        """[all] that train: how the two sides keep up with each other; means over the ranks of a side."""
        lag = collected.table.answers["lag"]
        pace = {
            "placement/train_wait_seconds": world.reduce("generate: wait", {"s": self.seconds}, "mean")["s"],  # [all]
            "placement/generate_wait_seconds": fmean(one.waited for one in self.told),
            "rollout/lag/max": float(lag.max(initial=0)),
        }
        if swap != "step":
            pace["placement/swaps"] = fmean(len(one.swaps) for one in self.told)
            pace["placement/swap_seconds"] = fmean(sum(one.swaps) for one in self.told)
        return pace


def take_step(step: int, exchange: Exchange, senders: Sequence[int], world: World) -> Arrived:
    """[all] that train: wait until the generating ranks have made a step. senders: who hands over to this rank."""
    with world.phase("generate"):
        began = time.perf_counter()
        with world.journal.waiting(f"generate: step {step} from ranks that generate"):
            delivered = exchange.take("step", step, senders)
        seconds = time.perf_counter() - began
        parts = {sender: unpack_step(payload) for sender, payload in sorted(delivered.items())}
    with world.phase("coordination"):
        mine = [(sender, Told(part.report, part.waited, part.swaps)) for sender, part in parts.items()]
        gathered = world.gather("generate: reports", mine, list[tuple[int, Told]])  # [all]
        told = [told for _, told in sorted((pair for theirs in gathered for pair in theirs), key=lambda p: p[0])]
    finished = {group_slice: group for part in parts.values() for group_slice, group in part.finished}
    return Arrived(told, finished, seconds)


class HandedOver:
    """Stateful, like `Rollouts`: the cursor says which tickets no step has trained on."""

    def __init__(
        self,
        cfg: PipelineConfig,
        prompts: Prompts | EnvTasks,
        tokenizer: Tokenizer,
        side: TrainSide,
    ) -> None:
        """[all] that train. prompts: of tasks, what they say is known when they begin."""
        self.prompts = prompts
        if isinstance(prompts, Prompts):
            sections = cfg.rollout, cfg.data, cfg.reward
            self.prompts, *_ = drop_overlong(prompts, tokenizer, *sections, side.world)  # [all]
        self._cfg, self._exchange, self._world, self._senders = cfg, side.exchange, side.world, side.senders
        self._cursor = Cursor()

    def state(self) -> dict[str, Any]:
        """See `checkpoint.Stateful`."""
        return self._cursor.state(self.prompts.fingerprint())

    def load_state(self, state: dict[str, Any]) -> None:
        """See `checkpoint.Stateful`. UserError if the tickets would now stand for other prompts."""
        self._cursor = Cursor.of_state(state, self.prompts.fingerprint())

    def collect(self, step: int) -> Collected:
        """[all] Wait until the generating ranks have made this step, and return what of it lies on this rank."""
        world = self._world
        arrived = take_step(step, self._exchange, self._senders, world)  # [all]
        with world.phase("coordination"):
            collected = self._collected(step, [one.report for one in arrived.told], arrived.finished)
        collected = replace(collected, pace=arrived.pace(collected, self._cfg.placement.swap, world))  # [all]
        return check_errors(collected, self._cfg.reward, self._cfg.rollout, world)  # [all]

    def _collected(self, step: int, reports: list[RankReport], finished: Mapping[GroupSlice, Group]) -> Collected:
        """What the reports of all generating ranks make of a step, of which this rank has what is `finished`."""
        settings = self._cfg.rollout
        coordinator = coordinate(self._world.store, f"step{step}", plan_round(self._cursor, settings))
        collected = Collected.of(step, settings, coordinator, reports, finished)
        self._cursor = self._cursor.after(collected.table.tickets.tolist())
        return collected

    def answer(self, prompts: Sequence[Prompt], sampling: Sequence[Sampling]) -> list[Group]:
        """[all] Wait for the answers to held-out prompts by the newest version of the policy.

        The generating ranks know by themselves what is asked when (`learn.Evaluation`).
        """
        with self._world.journal.waiting("eval: answers of ranks that generate"):
            delivered = self._exchange.take("eval", self._exchange.weights.newest, self._senders)
        return [group for _, payload in sorted(delivered.items()) for group in unpack_groups(payload)]
