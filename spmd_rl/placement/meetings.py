"""Meetings of trainer ranks with generator ranks: `placement.mode=split` and `lent`.

    with meetings.opened(trainers, Meeting("hand over", 12)): ...   # [train] once all of them are here
    if meeting := meetings.next(): ...            # a generator rank, between two steps of its engine
    meetings.end()                                # on a generator rank, after the meeting

*Hand over*: a step, or an evaluation, has ended; its samples go to trainer ranks (`hand_over.py`). *Publish*: an update
is done; its weights go to generator ranks (`weights/collective.py`). Tickets are claimed from counters in the store
(`rollout/coordinator.py`), which refuse one that would exceed `max_staleness`.

R1   A meeting is opened when all trainers have reached it and, for a hand over, the step's counters in the store
     say that it has ended. Replicas enter at their next engine step. None is in a meeting while an update runs.
R2   One number orders all meetings: hand over, publish, hand over of an evaluation, the end of the run. Trainers
     alone announce meeting k + 1, after k has ended.
R3   The first rank of a replica drives the others by broadcasts, the ticks (`engine/replicated.py`). It sends a
     meeting as a tick's message, and the others enter with it.
R4   Before a publish, requests are taken out of the engine, with what they have sampled. Then weights are loaded and
     probed, and the requests put back: keys and values are recomputed, and no sampled token is overwritten. Replicas
     do not wait for the result of the probe, which trainers compute and share.
R5   Only ranks that give or take something join. The forward pass of a separate reference is a collective of trainer
     ranks and the holders of the role (`learn/frozen.py`). A rank is in one meeting at a time.
R6   After a publish, a lent replica joins the step that its trainers wait for. At the step's end it takes its
     requests out of its engine (R4), and lists in the store the slices that go on elsewhere. The other replicas read
     all lists, and only then begin the next step, in which they go on with these slices, which come with the hand
     over. In a publish a lent replica is a source, and its engine reads what it sends.
R7   An evaluation of version n is answered by engines that hold n, before tickets. The next publish is opened after
     its hand over.
R8   Time limits of episodes and environments do not count while their rank is in a meeting (`sidecar/sessions.py`).
R9   For the hang watchdog, waiting for a meeting is no progress, and each bucket is. Communicators are opened by a
     small collective in the phase `start`.
R10  A checkpoint holds unused tickets and no claims. No meeting is open while one is written.

A death ends the job, and torchrun starts it again from the checkpoint.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec

from spmd_rl.distributed import World
from spmd_rl.rollout.coordinator import Store

MEETING_POLL_SECONDS = 0.002
"""Least interval of a replica's polls for a meeting: short engine steps must not load the store."""
IDLE_SECONDS = 0.01
"""Interval of an idle replica's polls."""


class Meeting(msgspec.Struct, array_like=True, frozen=True):
    """An entry of the store, which opens a meeting."""

    kind: Literal["hand over", "publish", "eval", "end"]
    number: int = 0
    """Step of a hand over, or version of the policy."""
    probed: bool = False
    """True for a publish in which engines answer the probe."""


class Meetings:
    """The meetings of a run as one rank sees them, in order."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        """store: that all ranks share. clock: paces polls."""
        self.number = 1
        self._store, self._clock = store, clock
        self._found: Meeting | None = None
        self._look_at = 0.0

    def announce(self, meeting: Meeting) -> None:
        """Write the next meeting to the store; only on the first trainer rank."""
        self._store.set(self._key(self.number), msgspec.msgpack.encode(meeting))

    @contextmanager
    def opened(self, trainers: World, meeting: Meeting) -> Iterator[None]:
        """[train]: wait for each other, open a meeting, and hold it in this context."""
        trainers.barrier(f"meeting: {meeting.kind}")  # [train]
        if trainers.rank == 0:
            self.announce(meeting)
        yield
        self.end(forgets=trainers.rank == 0)

    def next(self) -> Meeting | None:
        """Return the next meeting, if open; on generator ranks."""
        if self._found is None and self._clock() >= self._look_at:
            key = self._key(self.number)
            if self._store.check([key]):
                self._found = msgspec.msgpack.decode(self._store.get(key), type=Meeting)
            self._look_at = self._clock() + MEETING_POLL_SECONDS
        return self._found

    def end(self, forgets: bool = False) -> None:
        """Go on to the next meeting. forgets: delete keys that no rank reads any more."""
        if forgets and self.number > 1:
            self._store.delete_key(self._key(self.number - 1))
        self.number, self._found, self._look_at = self.number + 1, None, 0.0

    def _key(self, number: int) -> str:
        return f"meeting/{number}"
