"""`TrainerClient`: a generating rank's connections to all training ranks, to fetch weights, claim and hand in."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from spmd_rl.curve_keys import ClientKeys
from spmd_rl.errors import RunFailed
from spmd_rl.rollout.replay_log import PartialRollouts
from spmd_rl.sidecar import wire
from spmd_rl.split import messages
from spmd_rl.split.link import MemberLink
from spmd_rl.split.messages import Kind, Stats
from spmd_rl.split.pieces import DAMAGED
from spmd_rl.split.queues import Place
from spmd_rl.types import Sample
from spmd_rl.types.encoded import pack, unpack
from spmd_rl.weights.client import WeightClient
from spmd_rl.weights.messages import digest

NOTHING = Stats()
"""Where nobody asks how an engine fared."""


class Task(NamedTuple):
    """A piece that this rank has claimed, in the words in which it speaks of it."""

    kind: Kind
    number: int
    place: Place
    claim: int
    signature: bytes
    begun_by: int | None = None


class TrainerClient(WeightClient):
    """A `WeightClient` that also claims, deposits and reports."""

    codec = messages.TO_MEMBERS

    def __init__(
        self,
        link: MemberLink,
        addresses: Sequence[str],
        progress: Callable[[], None],
        keys: ClientKeys | None = None,
        trainers: Sequence[int] = (),
    ) -> None:
        """link: of this rank, which shows that it lives. trainers: their ranks, where they are of this job."""
        super().__init__(addresses, link.membership, progress, keys)
        self.link, self._trainers = link, trainers

    @property
    def holder(self) -> int:
        """Index of the training rank to which this rank delivers."""
        return self.membership.member % self.num_trainers

    def claim(self, kind: Kind, number: int, version: int, room: int) -> tuple[bool, list[Task]]:
        """Return whether this work has ended, and what of it this rank shall do."""
        reply, *_ = self._ask(
            0, messages.ClaimReply, messages.ClaimRequest(*self.membership, kind, number, version, room)
        )
        if not reply.known:
            self.link.give_up()
        tasks = [Task(kind, number, tuple(one.place), one.claim, one.signature, one.begun_by) for one in reply.pieces]
        return reply.ended, tasks

    def hand_in(self, task: Task, samples: Sequence[Sample], stats: Stats = NOTHING) -> messages.Reported | None:
        """Deposit a finished piece with the training rank `holder` and report it; None where that is too late."""
        return self._hand_in(task, pack(samples), stats)

    def hand_in_probe(self, version: int, answers: bytes) -> None:
        """Hand in what the engine answers to the probe of a version."""
        self._hand_in(Task("probe", version, (), 0, self.membership.secret), answers, NOTHING)

    def leave_slice(self, task: Task, begun: PartialRollouts) -> None:
        """Let others go on with a slice of which this much has been done."""
        self._deposit(task, pack(begun), begun=True)
        self._ask(0, messages.Reported, messages.GiveBack(*self._about(task), True))

    def take_begun(self, task: Task) -> PartialRollouts:
        """Return what another rank had begun of a slice. RunFailed if it arrives damaged."""
        trainer = task.begun_by % self.num_trainers
        header, payload = self._ask(trainer, messages.Begun, messages.TakeBegun(*self.membership, list(task.place)))
        try:
            if digest(payload) != header.digest:
                raise ValueError("its digest differs")
            return unpack(payload, PartialRollouts)
        except DAMAGED as error:
            raise RunFailed(f"what training rank {trainer} had of slice {task.place} is damaged: {error}") from None

    def _ask(self, trainer: int, kind: type, message: wire.WireMessage, *payload: bytes) -> tuple:
        """What a training rank answers. This rank does nothing else meanwhile: where that one hangs, so does this."""
        ranks = (self._trainers[trainer],) if self._trainers else ()
        name = f"generate: answer of rank {ranks[0]}" if ranks else f"generate: answer of training rank {trainer}"
        with self.link.journal.blocked(name, ranks):
            self.send(trainer, message, *payload)
            return self.receive(trainer, kind)

    def _about(self, task: Task) -> tuple:
        return *self.membership, task.kind, task.number, list(task.place)

    def _deposit(self, task: Task, payload: bytes, begun: bool) -> tuple[messages.Deposited, memoryview]:
        deposit = messages.Deposit(*self._about(task), task.claim, task.signature, digest(payload), begun)
        deposited, report = self._ask(self.holder, messages.Deposited, deposit, payload)
        if deposited.state == "refused":
            what = f"{task.kind} {task.number} {list(task.place)}"
            raise RunFailed(f"training rank {self.holder} refuses a piece, {what}: {deposited.why}")
        return deposited, report

    def _hand_in(self, task: Task, payload: bytes, stats: Stats) -> messages.Reported | None:
        deposited, report = self._deposit(task, payload, begun=False)
        if deposited.state == "late":
            return None
        done = messages.Report(*self._about(task), deposited.signature, stats)
        reported, *_ = self._ask(0, messages.Reported, done, bytes(report))
        if not reported.known:
            self.link.give_up()
        return reported

    def refused(self, what: str, trainer: int) -> NoReturn:
        """See `WeightClient`."""
        self.link.give_up()
        super().refused(what, trainer)

    def check(self) -> None:
        """See `WeightClient`."""
        super().check()
        self.link.check()
