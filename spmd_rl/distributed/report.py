"""The hang report: who arrived, who did not, and where they are instead. Pure text from the last heartbeats."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from spmd_rl.distributed.journal import Place


class Peer(msgspec.Struct, array_like=True, frozen=True):
    """What never changes about a rank."""

    rank: int
    node: str
    """equal on ranks that share a pid namespace"""
    host: str
    pid: int
    clock: float
    """its monotonic clock, in seconds, at the moment the peers met"""


class Beat(msgspec.Struct, array_like=True, frozen=True):
    """What a rank last said of itself."""

    clock: float
    """its monotonic clock, in seconds"""
    step: int
    phase: str
    place: Place | None
    """the collective it is in"""
    last: Place | None
    """the last one it entered"""


class Pulse(msgspec.Struct, frozen=True):
    """A rank's last heartbeat as seen from here."""

    peer: Peer
    beat: Beat | None
    age: float
    """seconds since the heartbeat"""
    live: bool


def hang_report(pulses: Sequence[Pulse], stall_seconds: float, stacks: str) -> str:
    """Several lines. `stacks`: where the stacks are written, for the reader."""
    live = [pulse for pulse in pulses if pulse.live]
    dead = [pulse for pulse in pulses if not pulse.live]
    awaited = _awaited(live, [pulse.peer.rank for pulse in pulses])
    arrived = [pulse for pulse in live if awaited and pulse.beat and pulse.beat.place == awaited]
    missing = [pulse for pulse in pulses if pulse not in arrived] if awaited else dead
    if awaited and awaited.ranks:
        missing = [pulse for pulse in missing if pulse.peer.rank in awaited.ranks]
    phase = _most_common(pulse.beat.phase for pulse in arrived or live if pulse.beat)
    step = max((pulse.beat.step for pulse in arrived or pulses if pulse.beat), default=0)
    lines = [
        f"spmd_rl: a stall: no progress on any of {len(pulses)} ranks for {stall_seconds:g} s (journal.stall_seconds)",
        f"  step {step}, phase: {phase or 'none'}",
        f"  collective: {_place(awaited)}",
        f"  arrived: {_ranks(arrived)}",
        f"  did not arrive: {_ranks(missing)}",
    ]
    if dead and dead != missing:
        lines.append(f"  stopped, dead or cut off: {_ranks(dead)}")
    lines += [f"    {_where(pulse)}" for pulse in pulses if pulse not in arrived]
    return "\n".join([*lines, f"  stacks: {stacks}"])


def cut_off_report(pulse: Pulse, silent_seconds: float, stall_seconds: float, stacks: str) -> str:
    """The same of a rank that the store has not answered for so long: all it knows is where it is itself."""
    return "\n".join(
        [
            f"spmd_rl: rank {pulse.peer.rank} is cut off: the store is out of reach, without an answer for "
            f"{silent_seconds:.0f} s (journal.stall_seconds={stall_seconds:g}); its node or the way there is lost",
            f"    {_where(pulse)}",
            f"  stacks: {stacks}",
        ]
    )


def _awaited(live: Sequence[Pulse], everyone: Sequence[int]) -> Place | None:
    """The collective in which most ranks are, among those where a dead rank is missing if there are any.

    Ranks with other work wait in a chain: one for another, which waits for the one that is dead. Of several collectives
    it is the end of such a chain: nobody who is missing there waits elsewhere. A meeting says more of where the dead
    one should be than a rank that waits for its answer.
    """
    places = {pulse.peer.rank: pulse.beat.place for pulse in live if pulse.beat and pulse.beat.place}
    dead = set(everyone) - {pulse.peer.rank for pulse in live}

    def missing(place: Place) -> set[int]:
        return {rank for rank in place.ranks or everyone if places.get(rank) != place}

    candidates = [place for place in places.values() if dead & missing(place)] or [*places.values()]
    ends = [place for place in candidates if not missing(place) & places.keys()]
    return _most_common([place for place in ends if len(place.ranks) != 1] or ends or candidates)


def _most_common(items: Any) -> Any:
    """The most frequent item, the earliest rank's among equals; None of nothing."""
    return next((item for item, _ in Counter(items).most_common(1)), None)


def _place(place: Place | None) -> str:
    return f"'{place.name}' #{place.number}" if place else "no rank is in one"


def _ranks(pulses: Sequence[Pulse]) -> str:
    return "rank" + "s" * (len(pulses) > 1) + " " + ", ".join(str(p.peer.rank) for p in pulses) if pulses else "none"


def _where(pulse: Pulse) -> str:
    peer, beat = pulse.peer, pulse.beat
    text = f"rank {peer.rank} (pid {peer.pid} on {peer.host}): "
    if beat is None:
        return text + "no heartbeat ever: stopped, dead or cut off; no stack"
    if not pulse.live:
        text += f"no heartbeat for {pulse.age:.1f} s: stopped, dead or cut off; no stack. Last seen "
    text += f"in phase {beat.phase or 'none'}, "
    if beat.place:
        return text + f"in collective {_place(beat.place)}"
    return text + (f"after collective {_place(beat.last)}" if beat.last else "before any collective")
