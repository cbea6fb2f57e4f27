"""An attached rank's connections to the training job: how it finds it, shows that it lives, and asks for work.

welcome = find(cfg.placement.attach, Path(cfg.run.dir), keys, seconds)
link = Link(welcome, name, leads, journal, keys)       # joins; beats from a thread of its own
courier = CrewCourier(link, progress, keys)            # claims, deposits, reports; fetches weights
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from spmd_rl import wire
from spmd_rl.curve_keys import ClientKeys
from spmd_rl.distributed import Journal
from spmd_rl.distributed.wait_message import WaitMessage
from spmd_rl.errors import RunFailed, UserError
from spmd_rl.sidecar.sockets import open_dealer, send
from spmd_rl.split import crew_messages
from spmd_rl.split.courier import Courier
from spmd_rl.split.works import Place
from spmd_rl.weights.messages import digest

ADDRESS_FILE = "attach.json"
"""In the run directory of a training job, while attached jobs can find it there."""
HELLO_MS = 1_000
SILENT_SECONDS = 10.0
"""A training job that answers nothing for so long, and for as long as a lease, is gone."""


def write_address(folder: Path, address: str) -> None:
    """Write where the training job can be reached, for this user alone."""
    draft = folder / f"{ADDRESS_FILE}.tmp"
    folder.mkdir(parents=True, exist_ok=True)
    draft.touch(mode=0o600)
    draft.write_text(json.dumps({"address": address}))
    draft.replace(folder / ADDRESS_FILE)


def _address(attach: str, folder: Path) -> str | None:
    """What `placement.attach` stands for now; None where no training job is there yet."""
    if attach.startswith("tcp://"):
        return attach
    try:
        return json.loads((folder / ADDRESS_FILE).read_text())["address"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"placement.attach: {folder / ADDRESS_FILE} is no address of a training job") from None


def find(attach: str, folder: Path, keys: ClientKeys | None, seconds: float) -> crew_messages.Welcome:
    """Wait for the training job, and return what it says of itself. RunFailed after so many seconds."""
    where = attach if attach.startswith("tcp://") else str(folder)
    deadline, message = time.monotonic() + seconds, WaitMessage(0)
    while time.monotonic() < deadline:
        message(f"waiting for a training job at {where}")
        if (address := _address(attach, folder)) is None:
            time.sleep(0.1)
            continue
        with zmq.Context() as context:
            dealer = open_dealer(context, address, keys)
            send(dealer, crew_messages.Hello())
            if dealer.poll(HELLO_MS):
                message.over()
                reply = crew_messages.TO_CREW.decode(dealer.recv())
                dealer.close()
                assert isinstance(reply, crew_messages.Welcome), f"{type(reply).__name__} is no welcome"
                return reply
            dealer.close()
    raise RunFailed(f"placement.attach: no training job has answered at {where} for {seconds:g} s")


class Link:
    """Joins, and beats until it is closed. A rank whose thread cannot beat is one that cannot work."""

    def __init__(
        self,
        welcome: crew_messages.Welcome,
        name: str,
        leads: bool,
        journal: Journal,
        keys: ClientKeys | None,
    ) -> None:
        """name: for people."""
        self.addresses = welcome.addresses
        self.news = crew_messages.News(True)
        self.ready = False
        """Whether this rank's engine is built."""
        self._silent_seconds, self._journal = max(welcome.lease_seconds, SILENT_SECONDS), journal
        self._lease, self._lost = welcome.lease_seconds, ""
        self._began, self._num_waits = journal.progress, 0
        self._context = zmq.Context()
        self._sockets = [open_dealer(self._context, address, keys) for address in self.addresses]
        send(self._sockets[0], crew_messages.Join(name, leads))
        if not self._sockets[0].poll(1000 * self._silent_seconds):
            self._context.destroy(linger=0)
            raise RunFailed(f"placement.attach: the training job at {self.addresses[0]} does not answer")
        reply = crew_messages.TO_CREW.decode(self._sockets[0].recv())
        assert isinstance(reply, crew_messages.Joined), f"{type(reply).__name__} is no place"
        self.member = reply.member
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """RunFailed, once, and from then on always, when the training job is gone or has given this rank up."""
        if self._lost:
            raise RunFailed(self._lost)

    def wait(self) -> None:
        """Say that this rank has nothing to do while the training job lives: no stall here, and no progress there."""
        self._num_waits += 1
        self._journal.progress += 1

    def give_up(self) -> None:
        """RunFailed: the training job counts on this rank no more."""
        self._lost = self._lost or (
            f"the training job has given this rank up, after more than placement.lease_seconds={self._lease:g} without "
            "a sign of life (was it stopped?); what it was about is done by others; start it again to attach anew"
        )
        self.check()

    def close(self) -> None:
        """Leave; idempotent."""
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=500)

    def _run(self) -> None:
        silent, last = 0.0, time.monotonic()
        while not self._closing.wait(self.news.pause):
            moved = max(0, self._journal.progress - self._began - self._num_waits)
            for dealer in self._sockets:
                send(dealer, crew_messages.Beat(self.member, moved, self.ready))
            heard = self._hear()
            now = time.monotonic()
            silent = 0.0 if heard else silent + min(now - last, 1.0)  # a pause of this process is none of the others'
            last = now
            if silent > self._silent_seconds and not self._lost:
                self._lost = f"the training job at {self.addresses[0]} has not answered for {silent:.0f} s: it is gone"
        for dealer in self._sockets:
            send(dealer, crew_messages.Leave(self.member))

    def _hear(self) -> bool:
        """Read what has come; whether the first training rank has said anything."""
        heard = False
        for index, dealer in enumerate(self._sockets):
            while dealer.poll(0):
                news = crew_messages.TO_CREW.decode(dealer.recv())
                assert isinstance(news, crew_messages.News), f"{type(news).__name__} is no news"
                if index == 0:
                    self.news, heard = news, True
                if not news.known:
                    with contextlib.suppress(RunFailed):
                        self.give_up()
        return heard


class CrewCourier(Courier):
    """A `Courier` of an attached rank; not for several threads."""

    codec = crew_messages.TO_CREW

    def __init__(self, link: Link, progress: Callable[[], None], keys: ClientKeys | None) -> None:
        super().__init__(link.addresses, link.member, progress, keys)
        self.link = link

    def claim(self, kind: crew_messages.Kind, number: int, version: int, room: int) -> tuple[bool, list[Place]]:
        """Return whether this work has ended, and what of it this rank shall do."""
        self.send(0, crew_messages.Claim(self.sender, kind, number, version, room))
        claimed, *_ = self.receive(0, crew_messages.Claimed)
        if not claimed.known:
            self.link.give_up()
        return claimed.ended, [tuple(place) for place in claimed.places]

    def deliver(self, kind: str, number: int, payload: bytes) -> None:
        """Hand in what the engine answers to a probe; see `Courier`."""
        assert kind == "probe", "an attached rank hands in pieces of what it has claimed, or the answer to a probe"
        self.hand_in("probe", number, (), payload, b"")

    def hand_in(self, kind: crew_messages.Kind, number: int, place: Place, piece: bytes, content: bytes) -> bool:
        """Deposit a finished piece with the training rank `holder` and report `content` of it; whether it counts."""
        header = self.sender, kind, number, list(place)
        deposit = crew_messages.Deposit(*header, digest(piece))
        self.send(self.holder, deposit, piece)
        kept, *_ = self.receive(self.holder, crew_messages.Kept)
        if not kept.whole:
            raise RunFailed(f"{kind} {number} {place} arrived damaged at training rank {self.holder}")
        report = crew_messages.Report(*header, digest(content))
        self.send(0, report, content)
        reported, *_ = self.receive(0, crew_messages.Reported)
        if not reported.known:
            self.link.give_up()
        return reported.accepted

    def check(self) -> None:
        """See `WeightClient`."""
        self.link.check()

    def decode(self, header: bytes) -> wire.WireMessage:
        """See `WeightClient`."""
        message = super().decode(header)
        if isinstance(message, crew_messages.Missing):  # what a rank holds is let go once it counts as dead
            self.link.give_up()
        return message
