"""The training ranks' side of `placement.generate=attached`: what jobs that attach make, as if made in this one.

exchanges: each training rank serves weights and holds what was generated (`CrewExchange`); the first has the `Desk`
HandedIn:  the step's groups, held-out answers; waits for whoever is attached, and announces versions to them
"""

import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import msgspec

from spmd_rl.config.schema import PipelineConfig
from spmd_rl.curve_keys import HostKeys
from spmd_rl.data import EnvTasks, Prompts
from spmd_rl.distributed import World
from spmd_rl.distributed.agreement import common_values
from spmd_rl.distributed.wait_message import WaitMessage
from spmd_rl.errors import tell
from spmd_rl.learn import Evaluation
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.rollout import Collected, RankReport, Sampling, check_errors
from spmd_rl.rollout.rounds import GroupSlice
from spmd_rl.split.crew_exchange import CrewExchange
from spmd_rl.split.crew_link import ADDRESS_FILE, write_address
from spmd_rl.split.desk import Desk
from spmd_rl.split.exchange import bind_of
from spmd_rl.split.groups import unpack_groups
from spmd_rl.split.handed_over import HandedOver
from spmd_rl.split.pace import is_evaluated
from spmd_rl.split.sides import TrainSide
from spmd_rl.split.works import Accepted
from spmd_rl.types import Group, Prompt
from spmd_rl.weights.messages import Announcement

LOOK_SECONDS = 0.5
"""Between two looks whether attached ranks have moved."""
OVER_SECONDS = 5.0
"""How long the end of a run waits for attached ranks to hear of it."""


class Ended(msgspec.Struct, array_like=True):
    """What the first training rank tells the others of a work that has ended."""

    accepted: list[Accepted]
    reports: list[RankReport]
    waited: float


@contextmanager
def serve_attached(cfg: PipelineConfig, data: dict[str, str], world: World) -> Iterator[TrainSide]:
    """[all] Serve jobs that attach, until the end of the block.

    data: digests of what the settings do not show, by name, which these must have in common with this job.
    """
    settings, keys = cfg.placement, cfg.sidecar.keys
    exchange = CrewExchange(bind_of(settings, world), HostKeys.load(keys) if keys else None, settings.lease_seconds)
    place = Path(cfg.run.dir) / ADDRESS_FILE
    try:
        addresses = world.gather("start: exchanges", exchange.address, str)  # [all]
        desk = None
        if world.rank == 0:
            rules = cfg.rollout, settings.max_staleness, settings.lease_seconds
            desk = Desk(*rules, exchange.clock, _teller(world), first=secrets.randbelow(1 << 40) * world.size)
        exchange.open(desk, common_values(cfg, data), addresses)
        world.barrier("start: exchanges are open")  # [all]
        if world.rank == 0:
            write_address(place.parent, addresses[0])
        yield TrainSide(world, exchange, [])
        if world.rank == 0:
            exchange.say_over(OVER_SECONDS)
        world.barrier("end: attached jobs have left")  # [all]
    finally:
        if world.rank == 0:
            place.unlink(missing_ok=True)
        exchange.close()


def _teller(world: World):
    """Prints and writes down who comes and goes."""

    def told(line: str) -> None:
        world.journal.note("attached", text=line)
        tell(line, file=sys.stdout)

    return told


class HandedIn(HandedOver):
    """`HandedOver` from members of attached jobs, who may be others tomorrow."""

    def __init__(self, cfg: PipelineConfig, prompts: Prompts | EnvTasks, tokenizer: Tokenizer, side: TrainSide) -> None:
        super().__init__(cfg, prompts, tokenizer, side)
        self._evaluation = Evaluation(cfg.eval, cfg.rollout, cfg.seed, cfg.steps, cfg.reward.error_budget)
        self._wait_message, self._start = WaitMessage(side.world.rank), 0

    def begin(self, start: int) -> None:
        """[all] Open the steps after `start`, and wait until there are `placement.min_generate` ranks to do them."""
        first, wanted = max(start, self._cfg.num_shown) + 1, self._cfg.placement.min_generate
        self._start = start
        if self._world.rank == 0:
            self._exchange.at_desk(lambda desk: desk.begin(start, first, self._cfg.steps, self._cursor))
            if (ready := self._exchange.at_desk(lambda desk: desk.num_ready)) < wanted:
                print(
                    f"placement.min_generate={wanted}: {ready} generating ranks are attached; waiting for the same "
                    "command with placement.attach=auto, as a job of its own",
                    flush=True,
                )
        self._wait(f"start: {wanted} attached ranks", lambda desk: desk.num_ready >= wanted)
        self._world.barrier("start: attached ranks")  # [all]

    def announce(self, announcement: Announcement) -> None:
        """On the first rank: let attached ranks know of a version, and of what is asked of it."""
        version = announcement.version
        prompts, _ = self._evaluation.questions(self.prompts.eval, version)

        def ask(desk: Desk) -> None:
            if announcement.probed:
                desk.ask_probe(version)
            if prompts and is_evaluated(version, self._start):
                desk.ask_eval(version, len(prompts))
            self._exchange.announce(msgspec.msgpack.encode(announcement))

        self._exchange.at_desk(ask)

    def take(self, name: str, kind: str, number: int) -> tuple[Ended, dict[Accepted, bytes]]:
        """[all] Wait for a work's end; what was accepted of it on all ranks, and the pieces that lie on this one."""
        began = perf_counter()
        self._wait(name, lambda desk: desk.ended(kind, number))
        ended = None
        if self._world.rank == 0:
            accepted, reports = self._exchange.at_desk(lambda desk: desk.take(kind, number))
            ended = Ended(accepted, reports, perf_counter() - began)
        ended = msgspec.convert(self._world.broadcast(f"{name}: what came", ended), Ended)  # [all]
        mine = [(one.member, one.place) for one in ended.accepted if one.member % self._world.size == self._world.rank]
        return ended, dict(zip(mine, self._exchange.collect(kind, number, mine), strict=True))

    def _wait(self, name: str, until) -> None:
        """On the first rank, wait for attached ranks. As long as one of them moves this is no stall, and without any
        for `placement.absent_seconds`."""
        if self._world.rank:
            return
        journal, progress = self._world.journal, -1

        def come(desk: Desk) -> bool:
            return until(desk) or desk.progress != progress

        while not self._exchange.at_desk(until):
            progress, there = self._exchange.at_desk(lambda desk: (desk.progress, desk.num_ready))
            with journal.extend_timeout(self._cfg.placement.absent_seconds):
                moved = False
                while not moved:
                    self._wait_message(f"waiting for {name}: {there} generating ranks are attached")
                    with journal.waiting(f"{name} ({there} attached)"):
                        moved = self._exchange.wait(LOOK_SECONDS, come)
                    there = self._exchange.at_desk(lambda desk: desk.num_ready)
        self._wait_message.over()

    def collect(self, step: int) -> Collected:
        """[all] Wait until attached ranks have made this step, and return what of it lies on this rank."""
        world = self._world
        with world.phase("generate"):
            ended, pieces = self.take(f"generate: step {step} of attached jobs", "step", step)  # [all]
        with world.phase("coordination"):
            finished = {GroupSlice(*place): unpack_groups(piece)[0] for (_, place), piece in pieces.items()}
            collected = self._collected(step, ended.reports, finished)
        lag = collected.table.answers["lag"]
        pace = {
            "placement/train_wait_seconds": ended.waited,
            "placement/attached": float(len(ended.reports)),
            "rollout/lag/max": float(lag.max(initial=0)),
        }
        return check_errors(replace(collected, pace=pace), self._cfg.reward, self._cfg.rollout, world)  # [all]

    def answer(self, prompts: Sequence[Prompt], sampling: Sequence[Sampling]) -> list[Group]:
        """[all] Wait for the answers to held-out prompts by the newest version of the policy."""
        _, pieces = self.take("eval: answers of attached jobs", "eval", self._exchange.weights.newest)  # [all]
        return [unpack_groups(piece)[0] for _, piece in sorted(pieces.items(), key=lambda pair: pair[0][1])]

    def probe_answers(self, version: int) -> dict[int, bytes]:
        """[all] Wait for what attached engines answer to the probe of a version; by member, what lies on this rank."""
        _, pieces = self.take("publish: answers of attached engines", "probe", version)  # [all]
        return {member: piece for (member, _), piece in pieces.items()}
