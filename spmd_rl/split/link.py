"""How a generating rank finds the training job, shows that it lives, and hears how things stand.

welcome = find(cfg.placement.attach, Path(cfg.run.dir), keys, seconds)
membership = join(welcome, name, leads, keys)
link = MemberLink(welcome.addresses, membership, journal, keys, welcome.lease_seconds)  # beats from a thread of its own
client = TrainerClient(link, welcome.addresses, progress, keys)                   # claims, deposits, reports; fetches
"""

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path

import zmq

from spmd_rl.curve_keys import ClientKeys
from spmd_rl.distributed import Journal
from spmd_rl.distributed.wait_message import WaitMessage
from spmd_rl.errors import RunFailed, UserError
from spmd_rl.sidecar import wire
from spmd_rl.sidecar.sockets import open_dealer, send
from spmd_rl.split import messages
from spmd_rl.weights.messages import MemberId

ADDRESS_FILE = "attach.json"
"""In the run directory of a training job, while attached jobs can find it there."""
HELLO_SECONDS = 1.0
ANSWER_MS = 50
"""For so long a beat waits for its answer; else the next one reads it."""
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


def _asked(address: str, keys: ClientKeys | None, message: wire.WireMessage, seconds: float) -> wire.WireMessage | None:
    """What the training job answers; None where it does not in time."""
    with zmq.Context() as context, contextlib.closing(open_dealer(context, address, keys)) as dealer:
        send(dealer, message)
        return messages.TO_MEMBERS.decode(dealer.recv()) if dealer.poll(1000 * seconds) else None


def find(attach: str, folder: Path, keys: ClientKeys | None, seconds: float) -> messages.Welcome:
    """Wait for the training job, and return what it says of itself. RunFailed after so many seconds."""
    where = attach if attach.startswith("tcp://") else str(folder)
    deadline, notice = time.monotonic() + seconds, WaitMessage(0)
    while time.monotonic() < deadline:
        notice(f"waiting for a training job at {where}")
        if (address := _address(attach, folder)) is None:
            time.sleep(0.1)
            continue
        if reply := _asked(address, keys, messages.Hello(), HELLO_SECONDS):
            notice.over()
            assert isinstance(reply, messages.Welcome), f"{type(reply).__name__} is no welcome"
            return reply
    raise RunFailed(f"placement.attach: no training job has answered at {where} for {seconds:g} s")


def join(welcome: messages.Welcome, name: str, leads: bool, keys: ClientKeys | None) -> MemberId:
    """Become a member. name: for people. RunFailed where the training job takes nobody."""
    seconds = max(welcome.lease_seconds, SILENT_SECONDS)
    reply = _asked(welcome.addresses[0], keys, messages.Join(name, leads), seconds)
    if reply is None:
        raise RunFailed(f"placement.attach: the training job at {welcome.addresses[0]} takes no new member")
    assert isinstance(reply, messages.Joined), f"{type(reply).__name__} is no membership"
    return MemberId(reply.member, reply.secret)


class MemberLink:
    """Beats until it is closed. A rank whose thread cannot beat is one that cannot work."""

    def __init__(
        self,
        addresses: Sequence[str],
        membership: MemberId,
        journal: Journal,
        keys: ClientKeys | None,
        lease_seconds: float = inf,
    ) -> None:
        """lease_seconds: what the training job gives a member that is silent. Without, this is a rank of its job, and
        the supervision of that ends it."""
        self.membership, self.news = membership, messages.News(True)
        self.ready = False
        """Whether this rank's engine is built."""
        self.journal, self._address, self._lease, self._lost = journal, addresses[0], lease_seconds, ""
        self._silent_seconds = max(lease_seconds, SILENT_SECONDS)
        self._began, self._num_waits = journal.progress, 0
        self._context = zmq.Context()
        self._sockets = [open_dealer(self._context, address, keys) for address in addresses]
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """RunFailed, once, and from then on always, when the training job is gone or has given this rank up."""
        if self._lost:
            raise RunFailed(self._lost)

    def wait(self) -> None:
        """Say that this rank has nothing to do while the training job lives: of an attached job that is no stall here,
        and no progress there."""
        if self._lease < inf:
            self._num_waits += 1
            self.journal.progress += 1

    def give_up(self) -> None:
        """RunFailed: the training job counts on this rank no more."""
        if self._lease < inf:
            self._lost = self._lost or (
                f"the training job has given this rank up, after more than placement.lease_seconds={self._lease:g} "
                "without a sign of life (was it stopped?); what it was about is done by others; start it again to "
                "attach anew"
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
            moved = max(0, self.journal.progress - self._began - self._num_waits)
            for dealer in self._sockets:
                send(dealer, messages.Beat(*self.membership, moved, self.ready))
            self._sockets[0].poll(ANSWER_MS)
            heard = self._hear()
            now = time.monotonic()
            silent = 0.0 if heard else silent + min(now - last, 1.0)  # a pause of this process is none of the others'
            last = now
            if silent > self._silent_seconds and not self._lost:
                self._lost = f"the training job at {self._address} has not answered for {silent:.0f} s: it is gone"
        for dealer in self._sockets:
            send(dealer, messages.Leave(*self.membership))

    def _hear(self) -> bool:
        """Read what has come; whether the first training rank has said anything."""
        heard = False
        for index, dealer in enumerate(self._sockets):
            while dealer.poll(0):
                news = messages.TO_MEMBERS.decode(dealer.recv())
                assert isinstance(news, messages.News), f"{type(news).__name__} is no news"
                if index == 0:
                    self.news, heard = news, True
                if not news.known:
                    with contextlib.suppress(RunFailed):
                        self.give_up()
        return heard
