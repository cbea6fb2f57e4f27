"""`CrewExchange`: what a training rank serves to jobs that attach, which may send anything, stop or die at any moment.

All training ranks keep weights for their ranks and hold what these have generated; the first one has the `Desk`. What
is not understood is dropped and costs nothing but a line: an attached job never ends the training job.
"""

import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
import zmq

from spmd_rl import wire
from spmd_rl.curve_keys import HostKeys
from spmd_rl.errors import tell
from spmd_rl.sidecar.sockets import received
from spmd_rl.split import crew_messages
from spmd_rl.split.desk import Desk
from spmd_rl.split.exchange import Exchange
from spmd_rl.split.works import Place
from spmd_rl.weights import messages

BEAT_SECONDS, BEATS_PER_SECOND = 0.1, 500
"""Between beats of a member, at least; and how many of all members a training rank answers."""
KEPT_STEPS = 8
"""A piece that is deposited and never counts is forgotten once so many later steps or versions were taken."""

T = TypeVar("T")
_Key = tuple[str, int]


class CrewExchange(Exchange):
    """An `Exchange`; see there. Its senders are the members of a desk, by number."""

    codec = crew_messages.FROM_CREW

    def __init__(self, bind: str, keys: HostKeys | None, lease_seconds: float) -> None:
        self.desk: Desk | None = None
        """On the first training rank."""
        self.welcome = crew_messages.Welcome({}, [], lease_seconds)
        self._lease, self._newest, self._over = lease_seconds, b"", False
        self._heard: dict[int, float] = {}
        """When each member was last heard of here, in the seconds in which this exchange ran."""
        self._silenced: set[int] = set()
        """Members that were silent for too long, whatever they say later."""
        self._deposits: dict[_Key, dict[tuple[int, Place], bytes]] = {}
        super().__init__(bind, keys)

    # -- for the main thread ---------------------------------------------------------------------------------------

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds in which this exchange ran: a training job that was stopped gives nobody up for that."""
        return lambda: self._loop.now

    def open(self, desk: Desk | None, values: dict[str, str], addresses: list[str]) -> None:
        """Answer those that ask what the training job is from now on."""
        with self._lock:
            self.desk, self.welcome = desk, crew_messages.Welcome(values, addresses, self._lease)

    def at_desk(self, do: Callable[[Desk], T]) -> T:
        """Return what `do` finds at the desk, or does there."""
        assert self.desk is not None, "the first training rank has the desk"
        with self._lock:
            return do(self.desk)

    def announce(self, announcement: bytes) -> None:
        """Let members know of the newest version."""
        with self._lock:
            self._newest = announcement

    def wait(self, seconds: float, until: Callable[[Desk], bool]) -> bool:
        """Wait, so many seconds at most; return whether it has come to that."""
        assert self.desk is not None, "the first training rank has the desk"
        deadline = time.monotonic() + seconds
        with self._lock:
            while not (found := until(self.desk)) and time.monotonic() < deadline:
                self._wait()
            return found

    def collect(self, kind: str, number: int, pieces: list[tuple[int, Place]]) -> list[bytes]:
        """Return these pieces, by member and place, which lie here; forget the others of this work, and old ones."""
        with self._lock:
            found = self._deposits.pop((kind, number), {})
            for key in [key for key in self._deposits if key[0] == kind and key[1] < number - KEPT_STEPS]:
                del self._deposits[key]
        return [found[piece] for piece in pieces]

    def say_over(self, seconds: float) -> None:
        """Tell all members that the run has ended, and wait, so many seconds at most, until they have left."""
        with self._lock:
            self._over = True
        if self.desk is not None:
            self.wait(seconds, lambda desk: not desk.members)

    def _wait(self) -> None:
        super()._wait()
        self._expire()

    def _expire(self) -> None:
        """Those that are silent fetch nothing any more."""
        now = self._loop.now
        for member in [member for member, heard in self._heard.items() if now - heard > self._lease]:
            self._silenced.add(member)
            self._gone(member)
        if self.desk is not None:
            self.desk.expire()

    def _gone(self, member: int) -> None:
        self._heard.pop(member, None)
        self.weights.forget(member)
        self._lock.notify_all()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        for peer, *frames in received(self._socket, copy=False):
            try:
                header, *payload = frames
                self._answer(peer.bytes, self.codec.decode(header.bytes), payload)
            except (wire.WireError, msgspec.MsgspecError, ValueError, LookupError) as error:
                tell(f"attached: a message that makes no sense: {error}")

    def _answer(self, peer: bytes, message: wire.WireMessage, payload: list[zmq.Frame]) -> None:
        with self._lock:
            if (member := getattr(message, "member", getattr(message, "sender", None))) in self._heard:
                self._heard[member] = self._loop.now
            reply = self._reply(message, payload)
            self._lock.notify_all()
            if reply is not None:
                self._socket.send_multipart([peer, wire.encode(reply)])
            elif isinstance(message, messages.REQUESTS):
                super()._answer(peer, message, payload)

    def _reply(self, message: wire.WireMessage, payload: list[zmq.Frame]) -> wire.WireMessage | None:
        """The answer, if it is not that of every exchange."""
        match message:
            case crew_messages.Hello():
                return self.welcome if self.welcome.addresses else None
            case crew_messages.Beat(member) if member in self._silenced:
                return crew_messages.News(False)
            case crew_messages.Beat(member):
                self._heard[member] = self._loop.now
                return self._news(message)
            case messages.Hold(version, sender) if sender in self._silenced:
                return crew_messages.Missing(version)
            case crew_messages.Leave(member):
                self._gone(member)
                if self.desk is not None:
                    self.desk.leave(member)
            case crew_messages.Deposit(member, kind, number, place, digest):
                content = payload[0].bytes
                if whole := messages.digest(content) == digest:
                    self._deposits.setdefault((kind, number), {})[member, tuple(place)] = content
                return crew_messages.Kept(whole)
            case messages.FetchPiece(version, index) if not self.weights.keeps(version, index):
                return crew_messages.Missing(version)
            case messages.Hold(version, sender) if sender not in self._heard:
                return messages.Held(version, False, False)
            case _:
                return self._at_desk(message, payload) if self.desk is not None else None
        return None

    def _at_desk(self, message: wire.WireMessage, payload: list[zmq.Frame]) -> wire.WireMessage | None:
        match message:
            case crew_messages.Join(name, leads):
                member = self.desk.join(name, leads)
                self._heard[member] = self._loop.now
                return crew_messages.Joined(member)
            case crew_messages.Claim(member, kind, number, version, room):
                return crew_messages.Claimed(*self.desk.claim(member, kind, number, version, room))
            case crew_messages.Report(member, kind, number, place, digest):
                content, known = payload[0].bytes, member in self.desk.members
                whole = messages.digest(content) == digest
                accepted = whole and self.desk.report(member, kind, number, tuple(place), content)
                return crew_messages.Reported(known, accepted)
        return None

    def _news(self, beat: crew_messages.Beat) -> crew_messages.News:
        if self.desk is None:
            return crew_messages.News(True)
        desk = self.desk
        return crew_messages.News(
            known=desk.beat(beat.member, beat.progress, beat.ready),
            step=desk.horizon.step,
            oldest=max(0, desk.oldest),
            newest=self._newest or None,
            asked=desk.offers_eval(self.weights.newest),
            over=self._over,
            pause=max(BEAT_SECONDS, len(desk.members) / BEATS_PER_SECOND),
        )
