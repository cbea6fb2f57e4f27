"""The hand over: samples of a step, or of an evaluation, go to the ranks that train.

The metadata of all slices is gathered. Each ticket goes to one rank that trains, by its place among the tickets that
are used, so that all ranks know alike which one; samples travel in one all-to-all. They count as generated there, and
`learn/transfer.py` spreads those that train over the data shards.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import torch

from spmd_rl.distributed import World
from spmd_rl.rollout.collected import RankReport
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
    samples: tuple[Sample, ...]


def places(tickets: Iterable[int], num_trainers: int) -> dict[int, int]:
    """Return the trainer rank of each ticket, by its index: tickets are assigned in turn, in order."""
    return {ticket: place % num_trainers for place, ticket in enumerate(sorted(tickets))}


def gather_reports(world: World, report: RankReport, to: Mapping[int, int] | None) -> list[RankReport]:
    """[all] Return the reports of all ranks, by rank. to: on ranks that train, who will hold each used ticket."""
    reports = world.gather("hand over: reports", report, RankReport)  # [all]
    for one in (one for theirs in reports for one in theirs.finished):
        if to and one.ticket in to:
            one.answers = [(*row[:RANK], to[one.ticket], *row[RANK + 1 :]) for row in one.answers]
    return reports


def send_slices(world: World, trainers: Sequence[int], slices: Slices, to: Mapping[int, int]) -> Slices:
    """[all] Send each slice to the rank that trains on its ticket; return the slices that come to this rank.

    trainers: these ranks, indices in `world`, which holds all that train and all that generate.
    """
    parts: list[list[SentSlice]] = [[] for _ in trainers]
    for one in sorted(slices):
        parts[to[one.ticket]].append(SentSlice(*one, tuple(slices[one])))
    payloads = [pack(part) if part else b"" for part in parts]
    sizes = world.gather("hand over: sizes", [len(payload) for payload in payloads], list[int])  # [all]
    sent, received = [0] * world.size, [0] * world.size
    for place, rank in enumerate(trainers):
        sent[rank] = len(payloads[place])
        if rank == world.rank:
            received = [theirs[place] for theirs in sizes]
    rows = torch.frombuffer(bytearray(b"".join(payloads)) or bytearray(1), dtype=torch.uint8)[: sum(sent)]
    arrived = world.exchange("hand over: samples", rows.reshape(-1, 1), sent, received, agreed=sizes)  # [all]
    found, begin, flat = {}, 0, memoryview(arrived.reshape(-1).numpy())
    for size in received:
        for one in unpack(flat[begin : begin + size], list[SentSlice]) if size else ():
            found[GroupSlice(one.ticket, one.number)] = one.samples
        begin += size
    return found
