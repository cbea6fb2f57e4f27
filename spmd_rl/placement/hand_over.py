"""The hand over: samples of a step, or of an evaluation, go to trainer ranks.

The metadata of all slices is gathered. Used tickets are assigned to trainer ranks in turn, so all ranks know where each
goes; samples are sent in one all-to-all. In the metadata the receiver replaces the generating rank, for
`learn/transfer.py`. Unfinished slices of lent replicas go the same way, to the replicas that continue them.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import torch

from spmd_rl.distributed import World
from spmd_rl.rollout.collected import RankReport
from spmd_rl.rollout.player import Begun
from spmd_rl.rollout.step_plan import GroupSlice
from spmd_rl.rollout.table import ANSWER
from spmd_rl.types import Sample
from spmd_rl.types.encoded import pack, unpack

RANK = ANSWER.names.index("rank")
Slices = Mapping[GroupSlice, Sequence[Sample]]


class SentSlice(msgspec.Struct, array_like=True, frozen=True):
    """A slice in a message."""

    ticket: int
    number: int
    samples: tuple[Sample, ...] = ()
    begun: Begun = {}
    """Answers so far of an unfinished slice."""

    @property
    def place(self) -> GroupSlice:
        """The slice itself."""
        return GroupSlice(self.ticket, self.number)


Parts = dict[int, list[SentSlice]]


def places(tickets: Iterable[int], num_trainers: int) -> dict[int, int]:
    """Return the receiving trainer's index for each ticket, in turn."""
    return {ticket: place % num_trainers for place, ticket in enumerate(sorted(tickets))}


def gather_reports(world: World, report: RankReport, to: Mapping[int, int] | None) -> list[RankReport]:
    """[all] Return the reports of all ranks, with the `rank` of each used answer replaced by its receiver.

    to: on trainer ranks, the receiver of each used ticket; None on others, which need no replacement.
    """
    reports = world.gather("hand over: reports", report, RankReport)  # [all]
    for finished in (finished for report_of_rank in reports for finished in report_of_rank.finished):
        if to and finished.ticket in to:
            finished.answers = [(*row[:RANK], to[finished.ticket], *row[RANK + 1 :]) for row in finished.answers]
    return reports


def parts_of(slices: Slices, trainers: Sequence[int], to: Mapping[int, int]) -> Parts:
    """Return the slices for each trainer rank. to: index of a ticket's trainer."""
    parts: Parts = defaultdict(list)
    for one in sorted(slices):
        parts[trainers[to[one.ticket]]].append(SentSlice(*one, tuple(slices[one])))
    return parts


def send_slices(world: World, parts: Parts) -> list[SentSlice]:
    """[all] Send each rank its part; return this rank's slices. world: trainer and generator ranks."""
    payloads = {rank: pack(part) for rank, part in sorted(parts.items())}
    own = [(rank, len(payload)) for rank, payload in payloads.items()]
    sizes = world.gather("hand over: sizes", own, list[tuple[int, int]])  # [all]
    sent = [len(payloads.get(rank, b"")) for rank in range(world.size)]
    received = [dict(theirs).get(world.rank, 0) for theirs in sizes]
    rows = torch.frombuffer(bytearray(b"".join(payloads.values())) or bytearray(1), dtype=torch.uint8)[: sum(sent)]
    arrived = world.exchange("hand over: samples", rows.reshape(-1, 1), sent, received, agreed=sizes)  # [all]
    found, begin, flat = list[SentSlice](), 0, memoryview(arrived.reshape(-1).numpy())
    for size in filter(None, received):
        found += unpack(flat[begin : begin + size], list[SentSlice])
        begin += size
    return found
