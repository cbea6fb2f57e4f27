"""The hang report, from last heartbeats: ranks that arrived, ranks that did not, their positions."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from spmd_rl.distributed.journal import CollectiveCall


class Peer(msgspec.Struct, array_like=True, frozen=True):
    """Constant facts about one rank."""

    rank: int
    node: str
    """name equal on ranks of a pid namespace"""
    host: str
    pid: int
    clock: float
    """monotonic clock of the rank, in seconds, when peers met"""


class RankState(msgspec.Struct, array_like=True, frozen=True):
    """A rank's last self-reported position."""

    clock: float
    step: int
    phase: str
    inside: CollectiveCall | None
    last: CollectiveCall | None


class Heartbeat(msgspec.Struct, frozen=True):
    """A rank's last heartbeat as seen from here."""

    peer: Peer
    state: RankState | None
    age: float
    """seconds since the rank's last heartbeat"""
    live: bool


def hang_report(heartbeats: Sequence[Heartbeat], stall_seconds: float, stacks: str) -> str:
    """Return the report of a stall. stacks: path of the stacks, for the reader."""
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
    """Return the report of a rank whose store does not answer; only its own position is known."""
    return "\n".join(
        [
            f"spmd_rl: rank {heartbeat.peer.rank} is cut off: the store is out of reach, without an answer for "
            f"{silent_seconds:.0f} s (journal.stall_seconds={stall_seconds:g}); its node or the way there is lost",
            f"    {_where(heartbeat)}",
            f"  stacks: {stacks}",
        ]
    )


def _awaited(live: Sequence[Heartbeat], everyone: Sequence[int]) -> CollectiveCall | None:
    # Ranks may wait in a chain: one for another, which waits for the dead one. Of several collectives the end of the
    # chain counts: no rank missing there waits elsewhere. One of many ranks is preferred to a single rank's wait.
    calls = {h.peer.rank: h.state.inside for h in live if h.state and h.state.inside}
    dead = set(everyone) - {heartbeat.peer.rank for heartbeat in live}

    def missing(call: CollectiveCall) -> set[int]:
        return {rank for rank in call.ranks or everyone if calls.get(rank) != call}

    candidates = [call for call in calls.values() if dead & missing(call)] or [*calls.values()]
    ends = [call for call in candidates if not missing(call) & calls.keys()]
    # A collective of several ranks says more about the missing one than a single rank's wait.
    return _most_common([call for call in ends if len(call.ranks) != 1] or ends or candidates)


def _most_common(items: Any) -> Any:
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
