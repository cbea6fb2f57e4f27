"""The hang report: who arrived, who did not, and where they are instead. Pure text from the last heartbeats."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from spmd_rl.distributed.journal import CollectiveCall


class Peer(msgspec.Struct, array_like=True, frozen=True):
    """What never changes about a rank."""

    rank: int
    node: str
    """equal on ranks that share a pid namespace"""
    host: str
    pid: int
    clock: float
    """its monotonic clock, in seconds, at the moment the peers met"""


class RankState(msgspec.Struct, array_like=True, frozen=True):
    """Where a rank last was, as it reported itself."""

    clock: float
    """its monotonic clock, in seconds"""
    step: int
    phase: str
    inside: CollectiveCall | None
    """the collective it is in"""
    last: CollectiveCall | None
    """the last one it entered"""


class Heartbeat(msgspec.Struct, frozen=True):
    """A rank's last heartbeat as seen from here."""

    peer: Peer
    state: RankState | None
    age: float
    """seconds since the heartbeat"""
    live: bool


def hang_report(heartbeats: Sequence[Heartbeat], stall_seconds: float, stacks: str) -> str:
    """Several lines. `stacks`: where the stacks are written, for the reader."""
    live = [heartbeat for heartbeat in heartbeats if heartbeat.live]
    dead = [heartbeat for heartbeat in heartbeats if not heartbeat.live]
    awaited = _awaited(live, [heartbeat.peer.rank for heartbeat in heartbeats])
    arrived = [heartbeat for heartbeat in live if awaited and heartbeat.state and heartbeat.state.inside == awaited]
    missing = [heartbeat for heartbeat in heartbeats if heartbeat not in arrived] if awaited else dead
    if awaited and awaited.ranks:
        missing = [heartbeat for heartbeat in missing if heartbeat.peer.rank in awaited.ranks]
    phase = _most_common(heartbeat.state.phase for heartbeat in arrived or live if heartbeat.state)
    step = max((heartbeat.state.step for heartbeat in arrived or heartbeats if heartbeat.state), default=0)
    size = len(heartbeats)
    lines = [
        f"spmd_rl: a stall: no progress on any of {size} ranks for {stall_seconds:g} s (journal.stall_seconds)",
        f"  step {step}, phase: {phase or 'none'}",
        f"  collective: {_call(awaited)}",
        f"  arrived: {_ranks(arrived)}",
        f"  did not arrive: {_ranks(missing)}",
    ]
    if dead and dead != missing:
        lines.append(f"  stopped, dead or cut off: {_ranks(dead)}")
    lines += [f"    {_where(heartbeat)}" for heartbeat in heartbeats if heartbeat not in arrived]
    return "\n".join([*lines, f"  stacks: {stacks}"])


def cut_off_report(heartbeat: Heartbeat, silent_seconds: float, stall_seconds: float, stacks: str) -> str:
    """The same of a rank that the store has not answered for so long: all it knows is where it is itself."""
    return "\n".join(
        [
            f"spmd_rl: rank {heartbeat.peer.rank} is cut off: the store is out of reach, without an answer for "
            f"{silent_seconds:.0f} s (journal.stall_seconds={stall_seconds:g}); its node or the way there is lost",
            f"    {_where(heartbeat)}",
            f"  stacks: {stacks}",
        ]
    )


def _awaited(live: Sequence[Heartbeat], everyone: Sequence[int]) -> CollectiveCall | None:
    """The collective in which most ranks are, among those where a dead rank is missing if there are any.

    Ranks with other work wait in a chain: one for another, which waits for the one that is dead. Of several collectives
    it is the end of such a chain: nobody who is missing there waits elsewhere. A meeting says more of where the dead
    one should be than a rank that waits for its answer.
    """
    calls = {h.peer.rank: h.state.inside for h in live if h.state and h.state.inside}
    dead = set(everyone) - {heartbeat.peer.rank for heartbeat in live}

    def missing(call: CollectiveCall) -> set[int]:
        return {rank for rank in call.ranks or everyone if calls.get(rank) != call}

    candidates = [call for call in calls.values() if dead & missing(call)] or [*calls.values()]
    ends = [call for call in candidates if not missing(call) & calls.keys()]
    return _most_common([call for call in ends if len(call.ranks) != 1] or ends or candidates)


def _most_common(items: Any) -> Any:
    """The most frequent item, the earliest rank's among equals; None of nothing."""
    return next((item for item, _ in Counter(items).most_common(1)), None)


def _call(call: CollectiveCall | None) -> str:
    return f"'{call.name}' #{call.number}" if call else "no rank is in one"


def _ranks(heartbeats: Sequence[Heartbeat]) -> str:
    numbers = ", ".join(str(heartbeat.peer.rank) for heartbeat in heartbeats)
    return f"rank{'s' * (len(heartbeats) > 1)} {numbers}" if heartbeats else "none"


def _where(heartbeat: Heartbeat) -> str:
    peer, state = heartbeat.peer, heartbeat.state
    text = f"rank {peer.rank} (pid {peer.pid} on {peer.host}): "
    if state is None:
        return text + "no heartbeat ever: stopped, dead or cut off; no stack"
    if not heartbeat.live:
        text += f"no heartbeat for {heartbeat.age:.1f} s: stopped, dead or cut off; no stack. Last seen "
    text += f"in phase {state.phase or 'none'}, "
    if state.inside:
        return text + f"in collective {_call(state.inside)}"
    return text + (f"after collective {_call(state.last)}" if state.last else "before any collective")
