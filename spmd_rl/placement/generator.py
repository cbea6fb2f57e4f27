"""`Generator`: a rank that only generates, at most `placement.max_staleness` steps ahead of training.

Its replica claims slices of the open step while its policy is new enough, goes on to the next step by itself, and keeps
finished slices until their hand over. Between two engine steps it looks for meetings.
"""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from spmd_rl.config.schema import RlConfig
from spmd_rl.data import EnvTasks, Prompts
from spmd_rl.distributed import World
from spmd_rl.learn import Evaluation
from spmd_rl.placement.hand_over import gather_reports, parts_of, places, send_slices
from spmd_rl.placement.meetings import IDLE_SECONDS, Meeting, Meetings
from spmd_rl.rollout.ahead import StepsAhead
from spmd_rl.rollout.collected import RankReport
from spmd_rl.rollout.coordinator import Coordinator
from spmd_rl.rollout.pace import is_evaluated
from spmd_rl.rollout.player import Player
from spmd_rl.rollout.questions import QuestionShare
from spmd_rl.rollout.shared_step import SharedStep
from spmd_rl.rollout.step_plan import Cursor, GroupSlice
from spmd_rl.rollout.step_run import StepRun
from spmd_rl.types import Group
from spmd_rl.weights import WeightReceiver

ANSWERED = "eval{}/answered"
"""Counter of replicas that have answered their share of an evaluation."""


class Begin(msgspec.Struct, array_like=True):
    """The first trainer rank's message that starts generation. `next` and `skipped`: see `Cursor`."""

    first: int
    """First step that is generated."""
    start: int
    """Version from which the run goes on."""
    next: int
    skipped: list[int]


@dataclass(frozen=True, slots=True)
class EndedStep:
    """A step that has ended on one replica."""

    shared: SharedStep
    report: RankReport


class _RunIsOver(Exception):
    """The end of the run, as its last meeting said."""


class Generator:
    """The steps, the policy and the meetings of one generator rank."""

    def __init__(
        self,
        cfg: RlConfig,
        world: World,
        player: Player,
        prompts: Prompts | EnvTasks,
        steps: StepsAhead,
        receiver: WeightReceiver,
        trainers: tuple[int, ...],
    ) -> None:
        """world: of both sides. trainers: indices of the trainer ranks in it."""
        self._cfg, self._player, self._prompts, self._trainers = cfg, player, prompts, trainers
        self._world, self._engine = world, player.engine
        self._steps, self._receiver, self._meetings = steps, receiver, Meetings(world.store)
        self._evaluation = Evaluation.of(cfg)
        self._ended: dict[int, EndedStep] = {}
        """Steps that wait for their hand over."""
        self._answers: list[Group] = []
        self._unused: dict[GroupSlice, Group] = {}
        """Finished slices of no step yet; they count in the next one."""
        self._coming: set[GroupSlice] = set()
        """Slices that a lent replica will hand over to this one."""
        self._previous: Coordinator | None = None
        self._has_left = False
        """True from the end of this replica's part of a step until the next step opens."""
        self._waited, self._publish_seconds = 0.0, list[float]()
        """Seconds in this step: waits for a new policy, and interruptions by each publish."""

    def run(self) -> None:
        """[generate]: work until the run is over."""
        begin = msgspec.convert(self._world.broadcast("start: first step", None, src=self._trainers[0]), Begin)  # [all]
        self._steps.begin(begin.first, begin.start, Cursor(begin.next, tuple(begin.skipped)))
        # Other ranks of the replica follow its first inside `driven`, and return when it ends.
        with self._engine.awake(), self._engine.driven(self._join):
            if self._engine.leads:
                with asyncio.Runner() as runner:
                    with suppress(_RunIsOver):
                        runner.run(self._work())

    async def _work(self) -> None:
        since = time.perf_counter()
        while True:
            if self.poll():
                await self.enter()
            elif self._has_left and self._steps.advance():
                given = {one for one, rank in self._steps.given.items() if rank == self._world.rank}
                self._coming |= given - self._player.running.keys()  # a running one has been handed over
                self._has_left, self._waited, self._publish_seconds = False, 0.0, []
            elif not self._has_left and self._may_begin:
                await self._step()
            else:
                await self._pause()
                self._waited += 0.0 if self._has_left else time.perf_counter() - since
            since = time.perf_counter()

    @property
    def _may_begin(self) -> bool:
        return self._steps.number <= self._cfg.steps and self._receiver.version >= self._steps.oldest

    async def _pause(self) -> None:
        """Decode unfinished slices (`rollout.partial_rollout`), though no step is open; without any, sleep."""
        if self._player.engine_loop.num_requests:
            await self._player.engine_loop.poll()
        else:
            with self._world.journal.waiting(self._awaited):
                await asyncio.sleep(IDLE_SECONDS)

    @property
    def _awaited(self) -> str:
        if self._steps.number > self._cfg.steps:
            return f"meeting {self._meetings.number} of the trainer ranks"
        return f"publish: version {self._steps.oldest} from trainer ranks"

    async def _step(self) -> None:
        steps, player, world = self._steps, self._player, self._world
        world.journal.set_step(steps.number)
        claim = steps.claim(lambda: self._receiver.version)
        shared = SharedStep(steps.coordinator, claim, self._cfg.rollout, world.rank)
        run = StepRun(steps.number, shared, player, self)
        with world.phase("generate"), run.counted():
            shared.begin(run, self._unused)
            await run.until_end()
        running = sorted([*player.running, *self._coming])
        report = shared.report(run, running, leads=True)
        report.pace = {
            "placement/generate_wait_seconds": self._waited,
            "placement/publishes": float(len(self._publish_seconds)),
            "placement/publish_seconds": sum(self._publish_seconds),
        }
        used = set(steps.coordinator.used_tickets())
        kept = shared.finished if player.carries else {}
        self._unused = {one: group for one, group in kept.items() if one.ticket not in used}
        self._ended[steps.number], self._has_left = EndedStep(shared, report), True
        steps.leave([*running, *self._unused])

    # -- meetings --------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Return True if an open meeting can be entered now: a step's hand over follows this replica's part of it."""
        meeting = self._meetings.next()
        return meeting is not None and (meeting.kind != "hand over" or meeting.number in self._ended)

    async def enter(self) -> None:
        """Enter the open meeting, then answer the questions of a due evaluation."""
        meeting, began, busy = self._meetings.next(), time.perf_counter(), 0
        if meeting.kind in ("publish", "end"):
            busy = await self._player.engine_loop.abort_all()
        # Waiting for a verdict is no hang, but waiting for a rank in this meeting may be one: the watchdog counts it.
        self._world.journal.idle(False)
        with self._engine.joined(msgspec.msgpack.encode(meeting)):
            self._meet(meeting)  # [replica]
        if busy:
            self._publish_seconds.append(time.perf_counter() - began)
        if meeting.kind == "publish":
            await self._answer(meeting.number)
        if meeting.kind == "end":
            await self._player.cancel()
            self._player.engine_loop.clear()
            # This replica may be in the middle of a step that will never end.
            raise _RunIsOver

    def _join(self, message: bytes) -> None:
        """[replica]: enter the meeting that its first rank names."""
        self._meet(msgspec.msgpack.decode(message, type=Meeting))  # [replica]

    def _meet(self, meeting: Meeting) -> None:
        """[all] of both sides: run a meeting's collectives."""
        world, kind = self._world, meeting.kind
        if kind == "publish":
            self._receiver.load(meeting.number, meeting.probed)  # [all]
        elif kind == "hand over":
            self._hand_over(self._ended.pop(meeting.number, None))  # [all]
        elif kind == "eval":
            slices = {GroupSlice(group.ticket, 0): group.samples for group in self._answers}
            held_out, _ = self._evaluation.questions(self._prompts.eval, meeting.number)
            to = places(range(len(held_out)), len(self._trainers))
            send_slices(world, parts_of(slices, self._trainers, to))  # [all]
            self._answers = []
        self._meetings.end()

    def _hand_over(self, ended: EndedStep | None) -> None:
        """[all] Send finished samples to trainer ranks, and take over unfinished slices of lent replicas.

        ended: None on all but a replica's first rank.
        """
        report, slices, to = RankReport.empty(), {}, {}
        if ended is not None:
            shared, report = ended.shared, ended.report
            to = places(shared.coordinator.used_tickets(), len(self._trainers))
            slices = {one: group.samples for one, group in shared.finished.items() if one.ticket in to}
        gather_reports(self._world, report, None)  # [all]
        for one in send_slices(self._world, parts_of(slices, self._trainers, to)):  # [all]
            self._coming.discard(one.place)
            self._player.take(one.place, one.begun, one.samples)
        if self._previous:
            self._previous.forget(shared=False)
        self._previous = ended.shared.coordinator if ended else None

    async def _answer(self, version: int) -> None:
        questions = self._evaluation.questions(self._prompts.eval, version)
        if questions[1] and is_evaluated(version, self._steps.start):
            share = QuestionShare(questions, self._steps.replicas.mine, self._steps.replicas.count)
            with self._world.phase("eval"):
                await self._player.answer(share.claim, share.finish)
            self._answers = share.groups()
            self._world.store.add(ANSWERED.format(version), 1)
