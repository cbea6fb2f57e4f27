"""The work road under attack: whatever strangers and a member send, the run goes on with what honest members made."""

import contextlib
import os
import random
import socket
import threading
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import pytest
import zmq

from spmd_rl import wire
from spmd_rl.config.schema import RlvrConfig, RolloutConfig
from spmd_rl.distributed import solo
from spmd_rl.errors import RunFailed
from spmd_rl.rollout.episode import SEGMENTS
from spmd_rl.split import PieceRules, RemoteRollouts, TrainSide, messages
from spmd_rl.split.messages import Stats
from spmd_rl.split.server import TrainerServer
from spmd_rl.split.work_queue import Limits, WorkQueue
from spmd_rl.types import Sample, Turn, Verdict
from spmd_rl.types.encoded import pack
from spmd_rl.weights.messages import FetchTensor, Hold, Release, digest
from spmd_rl.weights.staged import Staged
from tests import sockets
from tests.fakes import FakePrompts, FakeTokenizer
from tests.forked import executor
from tests.patience import patient
from tests.servers import SEAL, connect, serve
from tests.unit.sidecar_storm import GREETING, READY

KINDS = [Hold, FetchTensor, Release]
KINDS += [messages.Hello, messages.Join, messages.Beat, messages.ClaimRequest, messages.Deposit, messages.Report]
KINDS += [messages.GiveBack, messages.TakeBegun, messages.Leave]
GROWTH_BYTES = 64 << 20
SECRET_WEIGHTS = b"weights!" * 512
PROMPTS = FakePrompts(9)


def samples(ticket: int) -> tuple[Sample, ...]:
    """What an honest rank makes of a ticket."""
    prompt_ids = FakeTokenizer().render(PROMPTS.ticket(ticket, 0)[1].messages)
    turn = Turn(prompt_ids, array("i", [3, 0]), array("f", [-0.5, -0.25]), array("i", [0, 0]), "stop", "text")
    return tuple(Sample(ticket, answer, (turn,), Verdict("ok", float(answer))) for answer in range(2))


class Run:
    """A training rank of three steps, with a member that does them."""

    def __init__(self, folder: Path, stack) -> None:
        world = stack.enter_context(solo())
        rollout = RolloutConfig(prompts_per_step=2, answers_per_prompt=2, max_prompt_tokens=9, max_new_tokens=4)
        self.cfg = RlvrConfig(steps=3, rollout=rollout)
        self.cfg.placement.max_staleness, self.cfg.eval.every = 2, 0
        (self.server,) = serve(folder, lease_seconds=600.0)
        stack.enter_context(closing(self.server))
        self.queue = WorkQueue(self.cfg.rollout, 2, self.server.clock, Limits(600.0, 1.0))
        self.server.open(self.queue, messages.Welcome({}, [self.server.address], 600.0))
        side = TrainSide(world, self.server)
        self.remote = RemoteRollouts(self.cfg, PROMPTS, FakeTokenizer(), side, PieceRules(self.cfg.rollout, False, 256))
        payload = memoryview(SECRET_WEIGHTS)
        piece = Staged("weight", "uint8", [len(payload)], payload, digest(payload))
        self.server.weights.stage(0, {0: piece}, None, nullcontext())
        self.honest, self.insider = (self.server.with_queue(lambda queue: queue.join(name, True)) for name in "hi")
        for member in (self.honest, self.insider):
            self.server.with_queue(lambda queue, member=member: queue.beat(member, 0, True))
        self.remote.begin(0)

    def train(self, pause: float) -> int:
        """Collect three steps, of nothing but what the honest member made; the number of members then."""
        work = threading.Thread(target=self._work, args=(pause,), daemon=True)
        work.start()
        for step in range(1, 4):
            collected = self.remote.collect(step)
            assert [group.ticket for group in collected.groups] == [2 * step - 2, 2 * step - 1]
            assert all(group.samples == samples(group.ticket) for group in collected.groups), "a group is forged"
        work.join(patient(10))
        members = self.server.with_queue(lambda queue: set(queue.members))
        assert self.honest in members, "an honest member is evicted"
        return len(members)

    def _work(self, pause: float) -> None:
        """Do all steps, as an honest member."""
        with closing(connect([self.server.address], self.honest)) as client:
            for step in range(1, 4):
                ended = False
                while not ended:
                    ended, tasks = client.claim("step", step, 0, 1)
                    for task in tasks:
                        client.hand_in(task, samples(task.place[0]), Stats(0.0, 1.0))
                    time.sleep(pause)


def plain(kind: msgspec.inspect.Type, draw: random.Random) -> object:
    """A value that a schema allows."""
    match kind:
        case msgspec.inspect.IntType():
            return draw.choice([0, 1, 2, draw.randrange(1 << 62)])
        case msgspec.inspect.FloatType():
            return draw.random()
        case msgspec.inspect.BoolType():
            return draw.random() < 0.5
        case msgspec.inspect.BytesType():
            return draw.randbytes(16)
        case msgspec.inspect.StrType():
            return draw.choice(["", "name", "\x1b[2J\n" * 9])
        case msgspec.inspect.LiteralType():
            return draw.choice(kind.values)
        case msgspec.inspect.ListType():
            return [plain(kind.item_type, draw) for _ in range(draw.randrange(3))]
        case msgspec.inspect.TupleType():
            return [plain(item, draw) for item in kind.item_types]
        case msgspec.inspect.UnionType():
            return plain(draw.choice(kind.types), draw)
        case msgspec.inspect.StructType():
            return [plain(field.type, draw) for field in kind.fields]
        case msgspec.inspect.NoneType():
            return None
    raise AssertionError(f"no value of {kind}")


JUNK = [None, -1, 1 << 63, "", "x" * 300, b"", bytes(17), [], [[[]]], {"a": 1}, float("nan"), True]


def frames(draw: random.Random, member: int, secret: bytes) -> list[bytes]:
    """A message of a member, some of its fields as no schema allows, and perhaps bytes behind it."""
    kind = draw.choice(KINDS)
    fields = [plain(field.type, draw) for field in msgspec.inspect.type_info(kind).fields]
    if issubclass(kind, messages.FromMember):
        fields[:2] = [member, secret]
    for _ in range(draw.choice([0, 1, 1, 2])):
        if fields:
            fields[draw.randrange(len(fields))] = draw.choice(JUNK)
    if draw.random() < 0.1:
        fields = fields[:-1] if draw.random() < 0.5 else [*fields, 1]
    header = bytes([wire.VERSION]) + msgspec.msgpack.encode([kind.__struct_config__.tag, *fields])
    if draw.random() < 0.1:
        header = draw.randbytes(draw.randrange(40))
    return [header, *(draw.randbytes(draw.randrange(200)) for _ in range(draw.choice([0, 1, 1, 2])))]


def flood(address: str, until: threading.Event, make: Callable[[], list[bytes]], received: list[bytes]) -> None:
    """Send what `make` gives until told; everything that comes back."""
    with sockets.context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(address)
        while not until.is_set():
            try:
                dealer.send_multipart(make(), zmq.NOBLOCK)
            except zmq.Again:
                time.sleep(0.01)
            while dealer.poll(0):
                received += dealer.recv_multipart()


@pytest.fixture
def run(tmp_path: Path):
    with ExitStack() as stack:
        yield Run(tmp_path, stack)


class Trainer(NamedTuple):
    """A `Run` that has a process to itself: what that grows by is what the server keeps, whatever attackers hold."""

    process: ProcessPoolExecutor
    pid: int
    address: str
    honest: int
    insider: int

    @property
    def memory(self) -> int:
        """Resident bytes of its process."""
        return psutil.Process(self.pid).memory_info().rss


RUNS: list[Run] = []


def begin(folder: Path) -> tuple[int, str, int, int]:
    """Begin a run in this process, which ends with it."""
    RUNS.append(run := Run(folder, ExitStack()))
    return os.getpid(), run.server.address, run.honest, run.insider


def train(pause: float) -> int:
    """See `Run`."""
    return RUNS[0].train(pause)


@pytest.fixture
def trainer(tmp_path: Path):
    with executor() as process:
        yield Trainer(process, *process.submit(begin, tmp_path).result(patient(60)))


def under_attack(trainer: Trainer, attacks: list[Callable[[], list[bytes]]], pause: float = 0.1) -> list[bytes]:
    """Let the run make its three steps meanwhile; what attackers got."""
    until, received = threading.Event(), []
    parts = [(trainer.address, until, make, received) for make in attacks]
    threads = [threading.Thread(target=flood, args=part, daemon=True) for part in parts]
    before = trainer.memory
    for thread in threads:
        thread.start()
    try:
        num_members = trainer.process.submit(train, pause).result(patient(60))
    finally:
        until.set()
        for thread in threads:
            thread.join(patient(10))
    assert trainer.memory - before < GROWTH_BYTES
    assert num_members < 100
    return received


@pytest.mark.parametrize("seed", range(3))
def test_strangers_get_nothing_and_spoil_nothing(trainer: Trainer, seed: int) -> None:
    draw = random.Random(seed)

    def make() -> list[bytes]:
        return frames(draw, draw.choice([trainer.honest, trainer.insider, 0, 5]), draw.randbytes(16))

    received = under_attack(trainer, [make])
    assert not any(b"weights!" in frame for frame in received), "weights for a stranger"


@pytest.mark.parametrize("seed", range(3))
def test_a_member_spoils_its_own_pieces_alone(trainer: Trainer, seed: int) -> None:
    """It claims, and hands in damaged, other and forged ones; what it keeps in hand is done by others."""
    draw, secret = random.Random(seed), SEAL.membership(trainer.insider).secret
    leave = messages.Leave.__struct_config__.tag

    def make() -> list[bytes]:
        while True:
            made = frames(draw, trainer.insider, secret)
            if made[0][2:3] != bytes([leave]):
                return made

    under_attack(trainer, [make])


def test_forged_answers_are_refused(run: Run) -> None:
    """Of a member that claims honestly: other tickets, counts, ids, versions, logprobs, columns and verdicts."""
    with closing(connect([run.server.address], run.insider)) as client:
        _, (task, *_) = client.claim("step", 1, 0, 1)
        honest, other = samples(task.place[0]), samples(task.place[0] + 1)

        def changed(**fields) -> tuple[Sample, ...]:
            turn = msgspec.structs.replace(honest[0].turns[0], **fields)
            return (msgspec.structs.replace(honest[0], turns=(turn,)), honest[1])

        forged = [
            other,
            honest[:1],
            (*honest, msgspec.structs.replace(honest[0], answer=2)),
            honest[::-1],
            (msgspec.structs.replace(honest[0], verdict=Verdict("ok", float("inf"))), honest[1]),
            (msgspec.structs.replace(honest[0], greedy=True), honest[1]),
            (msgspec.structs.replace(honest[0], unit=1 << 40), honest[1]),
            (msgspec.structs.replace(honest[0], unit=1), honest[1]),
            (msgspec.structs.replace(honest[0], last=False), honest[1]),
            (*honest, msgspec.structs.replace(honest[0], answer=SEGMENTS, unit=0)),
            (msgspec.structs.replace(honest[0], verdict=Verdict("ok", 1e308)), honest[1]),
            (msgspec.structs.replace(honest[0], turns=()), honest[1]),
            changed(token_ids=array("i", [256, 0])),
            changed(token_ids=array("i", [3] * 5), logprobs=array("f", [-1] * 5), versions=array("i", [0] * 5)),
            changed(prompt_ids=other[0].turns[0].prompt_ids),
            (msgspec.structs.replace(honest[0], turns=honest[0].turns * 2), honest[1]),
            changed(prompt_ids=array("i", [-1])),
            changed(versions=array("i", [0, 1])),
            changed(logprobs=array("f", [float("nan"), 0])),
            changed(logprobs=array("f", [-1])),
            changed(token_ids=array("d", [1, 2])),
            changed(experts=array("h", [5, 5])),
        ]
        for one in (*forged, ()):
            with pytest.raises(RunFailed, match="refuses a piece"):
                client.hand_in(task, one)
        assert client.hand_in(task, honest).accepted
        assert not client.hand_in(task, honest).accepted, "once"


def test_a_replayed_deposit_changes_nothing(run: Run) -> None:
    """The frames of an honest member, sent again with other bytes by who has read them."""
    run.server.with_queue(lambda queue: queue.leave(run.insider))
    with closing(connect([run.server.address], run.honest)) as client:
        _, tasks = client.claim("step", 1, 0, 2)
        for task in tasks:
            assert client.hand_in(task, samples(task.place[0])).accepted
            turn = msgspec.structs.replace(samples(0)[0].turns[0], text="forged")
            client.hand_in(task, tuple(msgspec.structs.replace(s, turns=(turn,)) for s in samples(task.place[0])))
    collected = run.remote.collect(1)
    assert all(group.samples == samples(group.ticket) for group in collected.groups)


def test_what_is_oversized_half_open_or_slow_costs_little(trainer: Trainer) -> None:
    member = SEAL.membership(trainer.insider)
    big = bytes(9 << 20)
    host = trainer.address.removeprefix("ipc://")
    open_ones = []
    begun = GREETING + READY + b"\3" + (1 << 20).to_bytes(8) + bytes(600_000)
    for index in range(800):  # connections that never say what they are, or stop in the middle of it
        half = socket.socket(socket.AF_UNIX)
        half.settimeout(patient(5))
        half.connect(host)
        with contextlib.suppress(OSError):  # it is cut off
            half.sendall(begun if index % 8 == 0 else GREETING[: index % 10])
        open_ones.append(half)
    joins = wire.encode(messages.Join("half open", True))
    hold, fetch = wire.encode(Hold(*member, 0, None)), wire.encode(FetchTensor(*member, 0, 0, False))
    over = bytes(12 << 20)
    with sockets.context() as context, context.socket(zmq.DEALER) as slow:  # asks, and reads nothing
        slow.setsockopt(zmq.RCVHWM, 1)
        slow.connect(trainer.address)
        slow.send(wire.encode(messages.Beat(*member, 0, True)))
        slow.send(hold)
        for _ in range(2000):
            try:
                slow.send(fetch, zmq.NOBLOCK)
            except zmq.Again:
                break
        under_attack(trainer, [lambda: [joins, big], lambda: [over], lambda: [joins]], pause=0.3)
    for half in open_ones:
        half.close()


def test_a_server_is_told_of_no_more_than_it_keeps(trainer: Trainer) -> None:
    """Deposits that never count: of one piece claimed, sent as often as can be."""
    with closing(connect([trainer.address], trainer.insider)) as client:
        _, (task, *_) = client.claim("step", 1, 0, 1)
        before = trainer.memory
        text = "x" * (1 << 20)
        for index in range(100):
            turn = msgspec.structs.replace(samples(0)[0].turns[0], text=text + str(index))
            made = tuple(msgspec.structs.replace(one, turns=(turn,)) for one in samples(task.place[0]))
            header = messages.Deposit(*member_of(task, trainer.insider), task.claim, task.signature, digest(pack(made)))
            client.send(0, header, pack(made))
            assert client.receive(0, messages.Deposited)[0].state == "kept"
        assert trainer.memory - before < GROWTH_BYTES


def test_what_members_leave_behind_is_bounded(trainer: Trainer) -> None:
    """One after the other joins, claims, deposits as much as it can, and leaves."""
    before = trainer.memory
    with sockets.context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(trainer.address)
        for index in range(40):
            dealer.send(wire.encode(messages.Join("evil", True)))
            member = messages.TO_MEMBERS.decode(dealer.recv()).member
            dealer.send(wire.encode(messages.Beat(*SEAL.membership(member), 0, True)))
            dealer.recv()
            with closing(connect([trainer.address], member)) as client:
                _, (task, *_) = client.claim("step", 1, 0, 1)
                turn = msgspec.structs.replace(samples(task.place[0])[0].turns[0], text=str(index) * (2 << 20))
                made = pack(tuple(msgspec.structs.replace(one, turns=(turn,)) for one in samples(task.place[0])))
                about = *member_of(task, member), task.claim, task.signature, digest(made)
                client.send(0, messages.Deposit(*about), made)
                assert client.receive(0, messages.Deposited)[0].state == "kept"
                client.send(0, messages.Leave(*SEAL.membership(member)))
    assert trainer.memory - before < GROWTH_BYTES
    assert trainer.process.submit(train, 0.1).result(patient(60)) < 10


def member_of(task, member: int) -> tuple:
    """What each message about a piece begins with."""
    return *SEAL.membership(member), task.kind, task.number, list(task.place)


def test_nobody_goes_on_with_what_a_stranger_has_begun(run: Run) -> None:
    with closing(connect([run.server.address], run.insider)) as client:
        _, tasks = client.claim("step", 1, 0, 9)
        for task in tasks:
            client.send(0, messages.GiveBack(*member_of(task, run.insider), True))
            client.receive(0, messages.Reported)
    with closing(connect([run.server.address], run.honest)) as client:
        freed = client.claim("step", 1, 0, 9)[1]
        assert freed and all(task.begun_by is None for task in freed)


def test_who_has_left_fetches_nothing(run: Run) -> None:
    member = SEAL.membership(run.insider)
    with sockets.context() as context, context.socket(zmq.DEALER) as gone:
        gone.connect(run.server.address)
        for message in (messages.Leave(*member), Hold(*member, 0, None), FetchTensor(*member, 0, 0, False)):
            gone.send(wire.encode(message))
        assert not gone.poll(500)


def test_only_members_are_served(run: Run) -> None:
    assert isinstance(run.server, TrainerServer)
    asked = [Hold(run.honest, bytes(16), 0, None), FetchTensor(run.honest, bytes(16), 0, 0, False)]
    with sockets.context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(run.server.address)
        for message in asked:
            stranger.send(wire.encode(message))
        assert not stranger.poll(500)
