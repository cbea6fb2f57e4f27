"""Meetings of the ranks that train with those that generate: `placement.mode=split` and `lent`.

    meetings.open(Meeting("hand over", 12))       # [all] that train: once all of them are here
    if meeting := meetings.next(): ...            # a rank that generates, between two steps of its engine
    meetings.end()                                # every rank that was there

*Hand over*: a step, or an evaluation, has ended; its samples go to ranks that train (`hand_over.py`). *Publish*: an
update is done; its weights go to ranks that generate (`weights/collective.py`). In between the two sides do not wait
for each other: tickets are claimed from the store (`rollout/coordinator.py`), whose rules know `max_staleness`.

R1   Trainers come first. A meeting is opened when all of them have reached it and, for a hand over, the coordinator has
     ended the step. Replicas see it then, and enter at their next engine step; none waits for an update.
R2   One number orders all meetings: hand over, publish, hand over of an evaluation, the end of the run. Trainers alone
     announce meeting k + 1, after k has ended; each rank does k, k + 1, ... and never chooses.
R3   A replica of several ranks comes between two ticks: its first rank sends the meeting as the tick's message, and the
     others enter with it.
R4   Before a publish, requests are taken out of the engine, with what they have sampled. Then weights are loaded and
     probed, and the requests put back: keys and values are computed anew, and no sampled token is overwritten. Replicas
     do not wait for the verdict on their probe, which trainers find among themselves.
R5   A meeting holds the ranks that it concerns. A frozen role's forward is one of the trainers and its own ranks
     (`learn/frozen.py`). A rank is in one meeting at a time.
R6   A lent replica joins the step that its trainers wait for, after its publish, and leaves at that step's end: it
     takes what it has out of its engine (R4), writes down which slices these are, and hands them over with the step to
     replicas that stay, which go on with them. A replica that stays waits for that list alone, of those that have
     joined, before it begins the next step. Only then may a meeting be opened. In a publish a lent replica is a source,
     and its engine reads what it sends.
R7   An evaluation of version n is answered by engines that hold n, before tickets: each replica answers its share once
     it has loaded n. No publish is opened until it is handed over, so that every held-out token is of version n.
R8   The clocks of episodes and their leases run while their rank exchanges messages (`sidecar/sessions.py`), and so
     stand still in a meeting; replies queue. A replica without work waits for the store and for replies, never inside
     its engine, and comes within 20 ms.
R9   Waiting for a meeting is no progress, each bucket is; a hang report names the collective and who has not come.
     Communicators are opened by a small collective in the phase `start`. An engine's device is idle when weights come.
R10  No rank holds more of the weights than its own, a bucket, and the largest tensor.
R11  INT8, FP8 and adapters are applied before the bucket, in which each tensor begins at a multiple of 16 bytes.
R12  Adapters alone go into engines of the same process only; the settings refuse them here.
R13  A checkpoint holds the tickets that no step has used, and no claims. No meeting is open while one is written.

A death ends the job, and torchrun starts it again from the checkpoint.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec

from spmd_rl.distributed import World
from spmd_rl.rollout.coordinator import Store

LOOK_SECONDS = 0.002
"""Least seconds between two polls of a replica for a meeting; an engine step takes longer."""
IDLE_SECONDS = 0.01
"""Seconds between two polls of an idle replica."""


class Meeting(msgspec.Struct, array_like=True, frozen=True):
    """An entry of the store, which opens a meeting."""

    kind: Literal["hand over", "publish", "eval", "end"]
    number: int = 0
    """Step that is handed over, or version of the policy."""
    probed: bool = False
    """True for a publish in which engines answer the probe."""


class Meetings:
    """The meetings of a run as one rank sees them, in their order."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        """store: that all ranks share. clock: paces the looks."""
        self.number = 1
        """Number of the next meeting."""
        self._store, self._clock = store, clock
        self._found: Meeting | None = None
        self._look_at = 0.0

    def announce(self, meeting: Meeting) -> None:
        """Open the next meeting, for all ranks that train, on the first of them."""
        self._store.set(self._key(self.number), msgspec.msgpack.encode(meeting))

    @contextmanager
    def opened(self, trainers: World, meeting: Meeting) -> Iterator[None]:
        """[all] that train: wait for each other, open a meeting, and hold it inside."""
        trainers.barrier(f"meeting: {meeting.kind}")  # [all] that train
        if trainers.rank == 0:
            self.announce(meeting)
        yield
        self.end(forgets=trainers.rank == 0)

    def next(self) -> Meeting | None:
        """Return the next meeting, if it has been opened: on a rank that generates."""
        if self._found is None and self._clock() >= self._look_at:
            key = self._key(self.number)
            if self._store.check([key]):
                self._found = msgspec.msgpack.decode(self._store.get(key), type=Meeting)
            self._look_at = self._clock() + LOOK_SECONDS
        return self._found

    def end(self, forgets: bool = False) -> None:
        """Go on to the next one. forgets: this rank deletes what no rank reads any more."""
        if forgets and self.number > 1:
            self._store.delete_key(self._key(self.number - 1))
        self.number, self._found, self._look_at = self.number + 1, None, 0.0

    def _key(self, number: int) -> str:
        return f"meeting/{number}"
