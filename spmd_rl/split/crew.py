"""`Crew`: the ranks of an attached job: load the newest policy, claim what there is to do, hand in each piece at once.

The ranks of one job go from work to work together, as a replica may have several of them; the ranks of different jobs
know nothing of each other. Whatever a rank has not handed in when it dies, another does again, with the same noise.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from spmd_rl.config.schema import PipelineConfig
from spmd_rl.curve_keys import ClientKeys
from spmd_rl.distributed import World
from spmd_rl.distributed.agreement import check_values
from spmd_rl.rollout.rounds import GroupSlice
from spmd_rl.rollout.step_run import StepRun
from spmd_rl.rollout.table import SliceReport
from spmd_rl.split.crew_link import CrewCourier, Link, find
from spmd_rl.split.crew_messages import Welcome
from spmd_rl.split.generator import LOOK_SECONDS, Generator
from spmd_rl.split.groups import pack
from spmd_rl.split.sides import GenerateSide
from spmd_rl.split.works import SliceDone, Stats
from spmd_rl.types import Group, Prompt
from spmd_rl.weights.messages import Announcement

CLAIM_SECONDS = 0.05
"""The pause before a rank that got nothing to do asks again."""


class Task(msgspec.Struct, array_like=True):
    """What the ranks of an attached job do next."""

    kind: Literal["load", "step", "eval", "over"]
    number: int = 0
    newest: Announcement | None = None


@contextmanager
def attach(cfg: PipelineConfig, data: dict[str, str], world: World) -> Iterator[GenerateSide]:
    """[all] Find the training job, make sure that it is this one's, and join it.

    data: digests of what the settings do not show, by name. UserError for another model, other settings or data.
    """
    keys = ClientKeys.load(cfg.sidecar.keys) if cfg.sidecar.keys else None
    seconds = cfg.placement.absent_seconds
    with world.phase("start"), world.journal.extend_timeout(seconds):
        found = None
        if world.rank == 0:
            with world.journal.waiting("start: training job"):
                found = msgspec.to_builtins(find(cfg.placement.attach, training_dir(cfg), keys, seconds))
        welcome = world.broadcast("start: training job", found)  # [all]
        welcome = msgspec.convert(welcome, Welcome)
        check_values(cfg, data, welcome.values)
    name = f"rank {world.rank} of {socket.gethostname()}:{os.getpid()}"
    link = Link(welcome, name, world.rank % cfg.engine.tp == 0, world.journal, keys)
    world.on_exit(link.close)
    world.journal.note("attached", member=link.member, to=welcome.addresses[0])
    courier = CrewCourier(link, world.progress, keys)
    try:
        yield GenerateSide(world, courier, lambda: CrewCourier(link, world.progress, keys), world)
    finally:
        courier.close()
        link.close()


def training_dir(cfg: PipelineConfig) -> Path:
    """Return the run directory of the training job: as `placement.attach` says, or that of the same line."""
    auto = cfg.placement.attach == "auto"
    return Path(cfg.run.dir).parents[1] if auto else Path(cfg.placement.attach).expanduser()


class ClaimedStep:
    """A `rollout.step_run.StepSource`: one step of the training job as an attached rank sees it."""

    def __init__(self, courier: CrewCourier, step: int, version: Callable[[], int]) -> None:
        """version: what the engine of this rank holds now."""
        self._courier, self._step, self._version = courier, step, version
        self._has_ended, self._ask_again = False, 0.0
        self.num_accepted = 0
        """Slices of this rank's that count."""

    def next(self, room: int) -> list[GroupSlice]:
        """See `Claim`."""
        if room <= 0 or self._has_ended or time.monotonic() < self._ask_again:
            return []
        self._has_ended, places = self._courier.claim("step", self._step, self._version(), room)
        if not places:
            self._ask_again = time.monotonic() + CLAIM_SECONDS
            self._courier.link.wait()
        return [GroupSlice(*place) for place in places]

    def ended(self) -> bool:
        """Whether the step has ended, as far as this rank knows. RunFailed where it is given up."""
        self._courier.link.check()
        news = self._courier.link.news
        return self._has_ended or news.over or news.step > self._step

    def finish(self, group_slice: GroupSlice, group: Group, run: StepRun) -> None:
        """See `StepSource`. Where a slice counts no more, the step has ended."""
        report = SliceReport.of(group, group_slice.number, self._courier.holder, run.number - 1)
        content = msgspec.msgpack.encode(SliceDone(report, Stats(*run.costs())))
        if self._courier.hand_in("step", self._step, tuple(group_slice), pack([group]), content):
            self.num_accepted += 1
        else:
            self._has_ended = True


class Crew(Generator):
    """A `Generator` whose work comes from the training job that it is attached to."""

    _last_step = 0
    """The last step that has ended here."""

    def run_attached(self) -> None:
        """[all] Work until the run is over. RunFailed if the training job is gone, or has given this rank up."""
        self._courier.link.ready = True
        while (task := self._next()).kind != "over":  # [all]
            self._world.journal.set_step(self._courier.link.news.step)
            if task.kind == "load":
                self._load(task.newest)  # [all]
                self._met = task.number
            elif task.kind == "eval":
                self._answer(task.number)  # [all]
            else:
                self._world.journal.set_step(task.number)
                claimed = ClaimedStep(self._courier, task.number, lambda: self._receiver.version)
                self._in_flight.begin()
                self._rollouts.generate_from(claimed, task.number, self._in_flight)  # [all]
                self._in_flight.settle()  # [all] of the replica
                self._last_step = task.number
                self._world.journal.note("handed in", slices=claimed.num_accepted)

    def _answer(self, version: int) -> None:
        """[all] ranks of a replica: answer held-out prompts as long as there are some that nobody has claimed."""
        held_out, samplings = self._evaluation.questions(self._rollouts.prompts.eval, version)
        courier = self._courier

        def claim(room: int) -> list[tuple[int, Prompt]]:
            return [(index, held_out[index]) for (index,) in courier.claim("eval", version, version, room)[1]]

        with self._world.phase("eval"):
            finish = lambda group: courier.hand_in("eval", version, (group.ticket,), pack([group]), b"")  # noqa: E731
            self._rollouts.answer_from(claim, samplings, finish)

    def _next(self) -> Task:
        """[all] What the first rank finds; it waits where there is nothing to do."""
        waits = "attached: something to do"
        return self._first_finds("attached: next task", waits, self._look_for_work, Task)  # [all]

    def _announced(self) -> Announcement | None:
        newest = self._courier.link.news.newest
        return msgspec.msgpack.decode(newest, type=Announcement) if newest else None

    def _look_for_work(self) -> Task | None:
        """What there is to do now; pause if there is nothing."""
        link = self._courier.link
        link.check()
        news = link.news
        if news.over:
            return Task("over")
        newest = self._announced()
        if newest and newest.version > self._met:
            if self._courier.hold(newest.version):
                return Task("load", newest.version, newest)
        elif news.asked:
            return Task("eval", self._met)
        elif self._last_step < news.step <= self._cfg.steps and self._met >= news.oldest:
            return Task("step", news.step)
        time.sleep(LOOK_SECONDS)
        link.wait()
        return None
