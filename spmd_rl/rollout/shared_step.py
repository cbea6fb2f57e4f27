"""`SharedStep`: one step of the tickets that replicas share over the store, as one replica sees it."""

from collections.abc import Mapping

import msgspec

from spmd_rl.config.schema import RolloutConfig
from spmd_rl.rollout.claims import SliceClaim
from spmd_rl.rollout.collected import NO_COUNTS, RankReport
from spmd_rl.rollout.coordinator import Coordinator
from spmd_rl.rollout.filters import reject_reason
from spmd_rl.rollout.step_plan import GroupSlice
from spmd_rl.rollout.step_run import StepRun
from spmd_rl.rollout.table import AnswerRow, SliceReport, answer_rows
from spmd_rl.types import Group

_pack, _unpack = msgspec.msgpack.encode, msgspec.msgpack.Decoder(list[AnswerRow]).decode


class SharedStep:
    """A `StepSource` over a coordinator; keeps finished slices."""

    def __init__(self, coordinator: Coordinator, claim: SliceClaim, settings: RolloutConfig, rank: int) -> None:
        self.coordinator = coordinator
        self._claim, self._settings, self._rank = claim, settings, rank
        self.finished: dict[GroupSlice, Group] = {}
        """Slices that finished here, in this step or an earlier one."""
        self._reports: dict[GroupSlice, SliceReport] = {}

    def next(self, room: int) -> list[GroupSlice]:
        """See `SliceClaim`."""
        return self._claim.next(room)

    def ahead(self, room: int) -> list[GroupSlice]:
        """See `SliceClaim`."""
        return self._claim.ahead(room)

    def ended(self) -> bool:
        """See `StepSource`."""
        return self.coordinator.ended()

    def finish(self, group_slice: GroupSlice, group: Group, run: StepRun) -> None:
        """See `StepSource`. A ticket's last slice resolves it."""
        report = SliceReport.of(group, group_slice.number, self._rank, run.number - 1)
        self.finished[group_slice], self._reports[group_slice] = group, report
        settle(self.coordinator, report, self._settings)

    def begin(self, run: StepRun, unused: Mapping[GroupSlice, Group]) -> None:
        """Count slices that finished in an earlier step."""
        for group_slice in sorted(unused):
            self.finish(group_slice, unused[group_slice], run)

    def report(self, run: StepRun, running: list[GroupSlice], leads: bool) -> RankReport:
        """Return this rank's report at the step's end. leads: True on a replica's first rank."""
        idle_seconds, seconds, token_counts = run.costs()
        return RankReport(
            finished=list(self._reports.values()),
            running=running,
            idle_seconds=idle_seconds if leads else None,
            seconds=seconds,
            num_aborted=0 if self._settings.partial_rollout else run.num_stopped,
            token_counts=token_counts if leads else NO_COUNTS,
        )


def settle(coordinator: Coordinator, report: SliceReport, settings: RolloutConfig) -> None:
    """Pass a slice's answers to the coordinator; a ticket's last slice gets the reject reason."""
    position = coordinator.plan.cursor.position(report.ticket)
    pooled = coordinator.merge_slices(position, report.number, _pack(report.answers))
    if pooled is not None:
        rows = answer_rows(row for answers in pooled for row in _unpack(answers))
        report.reject_reason = reject_reason(rows, settings.min_answers, settings.filter)
        coordinator.resolve(position, report.reject_reason is None)
