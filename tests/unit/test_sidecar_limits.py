"""A host at its limits and at its end: it holds so much and no more, and what is under way is answered first."""

import asyncio
import contextlib
import os
import socket
import threading
import time
from pathlib import Path

import pytest
import zmq

from spmd_rl import sidecar, wire
from spmd_rl.sidecar import host as host_module
from spmd_rl.sidecar import remote_nodes as nodes_module
from spmd_rl.sidecar.event_loop import EventLoop
from spmd_rl.sidecar.frames import receive_frame
from spmd_rl.sidecar.host import Host
from spmd_rl.sidecar.pool import Pool, ScoreJob
from spmd_rl.sidecar.remote_nodes import RemoteNodes
from spmd_rl.sidecar.status import fetch_status
from spmd_rl.sidecar.verdicts import checked_reply
from spmd_rl.types import AnswerInfo, Verdict
from tests import sockets
from tests.patience import patient
from tests.unit.sidecar_helpers import ask, gone_within, host_of, numbers, private_node, prompt, rewards


@pytest.fixture
def node(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(Path(__file__).parent), str(Path(__file__).parents[2]))))
    yield from private_node(monkeypatch)


@contextlib.contextmanager
def hosted(address: str, target: str = "Moody"):
    """A host on a thread of this process, so that a test can look into it, and a DEALER."""
    ours, theirs = socket.socketpair()
    host = Host(wire.StartHost(0, address, {"toy": wire.PoolSpec(f"sidecar_toys:{target}", {}, 1)}), theirs)
    thread = threading.Thread(target=host.run, daemon=True)
    with ours, theirs, sockets.context() as context, context.socket(zmq.DEALER) as dealer:
        thread.start()
        dealer.setsockopt(zmq.RCVHWM, 10)
        dealer.connect(address)
        try:
            assert receive_frame(ours, wire.FROM_CHILD) == wire.Ready()
            yield host, thread, dealer
        finally:
            ours.close()
            thread.join(10)
            assert not thread.is_alive()


def score(id_: int, answer: str, domain: str = "toy") -> wire.ScoreRequest:
    return wire.ScoreRequest(id_, domain, 60.0, wire.pack(wire.ScoreInput(prompt(), answer, AnswerInfo(1, "stop"))))


# -- limits -----------------------------------------------------------------------------------------------------------


def test_bytes_under_way_are_bounded(node, monkeypatch):
    monkeypatch.setattr(wire, "WINDOW_BYTES", 1 << 20)
    with hosted(node.address) as (host, _, dealer):
        dealer.send(
            wire.encode(wire.ScoreRequests([score(0, "sleep 60"), *(score(i, "x" * 500_000) for i in range(1, 9))]))
        )
        assert "bytes of requests" in wire.TO_CLIENT.decode(dealer.recv()).detail
        status = fetch_status(node.address, None)
        assert status.in_flight == 5 and 2_000_000 < status.held_bytes < 2 << 20
        dealer.send(wire.encode(wire.CancelScores(list(range(9)))))
        dealer.send(wire.encode(wire.ScoreRequests([score(9, "x" * 500_000)])))
        dealer.send(wire.encode(wire.Ping()))
        assert isinstance(wire.TO_CLIENT.decode(dealer.recv()), wire.Pong)
        status = fetch_status(node.address, None)
        assert (status.clients, status.in_flight) == (1, 1) and 500_000 < status.held_bytes < 501_000


def test_bytes_of_all_clients_together_are_bounded(node, monkeypatch):
    monkeypatch.setattr(wire, "HELD_BYTES", 1 << 20)
    with hosted(node.address) as (host, _, dealer):
        dealer.send(
            wire.encode(wire.ScoreRequests([score(0, "sleep 60"), *(score(i, "x" * 500_000) for i in range(1, 9))]))
        )
        assert "in all" in wire.TO_CLIENT.decode(dealer.recv()).detail
        assert fetch_status(node.address, None).in_flight == 3


def test_a_client_that_never_reads_is_not_written_to_for_ever(node, monkeypatch):
    monkeypatch.setattr(host_module, "MAX_UNSENT", 10)
    with hosted(node.address) as (host, _, dealer):
        for i in range(20_000):
            dealer.send(wire.encode(wire.ScoreRequests([score(i, "a", "nowhere" * 28)])))
        time.sleep(0.5)
        waiting = fetch_status(node.address, None).unsent_replies
        assert 0 < waiting <= 2 * wire.WINDOW
        seen = 0
        while dealer.poll(500):
            seen += len(getattr(wire.TO_CLIENT.decode(dealer.recv()), "items", ()))
        assert seen > waiting and fetch_status(node.address, None).unsent_replies == 0


# -- the end ----------------------------------------------------------------------------------------------------------


def test_a_host_that_is_asked_to_end_answers_what_is_under_way(node, capfd):
    with sidecar.connect(rewards("Moody", workers=2), node) as scorer:
        host = host_of(scorer)

        async def run():
            task = asyncio.create_task(ask(scorer, ["sleep 1", "sleep 1", "a"]))
            await asyncio.sleep(0.4)
            host.terminate()
            return await task

        assert [verdict.status for verdict in asyncio.run(run())] == ["ok"] * 3
        assert gone_within([host], 5.0)
        assert asyncio.run(ask(scorer, ["b"]))[0].status == "ok"
        report = fetch_status(node.address, None)
        assert report.pid == host_of(scorer).pid != host.pid
        assert report.pools["toy"].verdicts == 1  # of the others, none was asked twice
    assert capfd.readouterr().err.count("the host died with code 0; starting a new one") == 1


def test_what_is_asked_of_a_host_that_ends_is_answered_by_the_next(node):
    config = rewards("Number", workers=2, args={"seconds": 0.01})
    answers = [str(i) for i in range(3000)]  # more than the window: some come while it drains
    with sidecar.connect(config, node) as scorer:

        async def run():
            task = asyncio.create_task(ask(scorer, answers[:400]))
            await asyncio.sleep(0.3)
            host_of(scorer).terminate()
            await asyncio.sleep(0.1)
            return [*await task, *await ask(scorer, answers[400:600])]

        assert asyncio.run(run()) == numbers(answers[:600])


def test_a_drain_has_an_end(node, monkeypatch):
    monkeypatch.setattr(host_module, "DRAIN_SECONDS", 0.5)
    with hosted(node.address) as (host, thread, dealer):
        dealer.send(wire.encode(wire.ScoreRequests([score(0, "sleep 60"), score(1, "a")])))
        while not fetch_status(node.address, None).in_flight:
            time.sleep(0.01)
        host.drain()
        start = time.monotonic()
        thread.join(10)
        assert not thread.is_alive() and 0.3 < time.monotonic() - start < patient(5)


# -- attached nodes, without any --------------------------------------------------------------------------------------


class Peers:
    """Nodes over a pool whose workers never start, and what was sent to each."""

    def __init__(self, **specs: wire.PoolSpec) -> None:
        specs = specs or {"toy": wire.PoolSpec("a:B", {}, 1)}
        self.loop = EventLoop()
        self.pool = Pool("toy", specs["toy"], lambda job, verdict: None, self.loop)
        self.sent: list[tuple[bytes, object]] = []
        self.verdicts: dict[int, Verdict] = {}
        self.full = False
        self.gone: set[bytes] = set()
        self.nodes = RemoteNodes("me", {"toy": self.pool}, specs, self.send, self.resolve, self.loop)

    def send(self, peer, message) -> bool:
        if peer in self.gone:
            self.nodes.lose(peer)
            return True
        if not self.full:
            self.sent.append((peer, message))
        return not self.full

    def resolve(self, job, verdict) -> None:
        self.verdicts[job.id] = verdict

    def heed(self, peer: bytes, message, now: float) -> None:
        self.loop.now = now
        self.nodes.on_message(peer, message)

    def tick(self, now: float) -> None:
        self.loop.now = now
        self.nodes.tick()

    def join(self, peer: bytes, window: int) -> None:
        self.heed(peer, wire.NodeJoin(peer.decode(), ["toy"]), 0.0)
        self.heed(peer, wire.NodeHeartbeat("me", {"toy": window}, []), 0.0)

    def ask(self, number: int) -> None:
        for id_ in range(number):
            self.pool.submit(ScoreJob(b"c", id_, "toy", 60.0, wire.pack(0), number=id_))

    def given(self, peer: bytes) -> list[int]:
        return [i.id for to, m in self.sent if to == peer and isinstance(m, wire.ScoreRequests) for i in m.items]


def replies(verdicts: dict[int, Verdict]) -> wire.NodeReplies:
    return wire.NodeReplies([wire.NodeReply(id_, wire.pack(verdict)) for id_, verdict in verdicts.items()])


def test_a_node_gets_what_its_window_allows_and_what_it_leaves_goes_back_in_order():
    peers = Peers()
    peers.ask(10)
    peers.join(b"x", 4)
    peers.tick(0.0)
    assert len(peers.given(b"x")) == 4
    peers.heed(b"x", replies({1: Verdict("ok", 1.0), 99: Verdict("ok")}), 0.1)
    assert peers.verdicts == {1: Verdict("ok", 1.0)}
    peers.heed(b"x", wire.Goodbye(), 0.2)
    assert [job.id for job in peers.pool.take(99)] == [0, 2, 3, 4, 5, 6, 7, 8, 9] and len(peers.nodes) == 0


def test_what_was_lost_on_the_way_is_taken_back_and_a_late_verdict_means_nothing():
    peers = Peers()
    peers.ask(3)
    peers.join(b"x", 3)
    peers.tick(0.0)
    later = nodes_module.SETTLE_SECONDS + 0.1
    peers.heed(b"x", wire.NodeHeartbeat("me", {"toy": 0}, [0, 2]), later / 2)
    assert not peers.pool.take(9)  # it may be on its way
    peers.heed(b"x", wire.NodeHeartbeat("me", {"toy": 0}, [0, 2]), later)
    assert [job.id for job in peers.pool.take(9)] == [1]
    peers.heed(b"x", replies({1: Verdict("ok")}), later)
    assert peers.verdicts == {}


@pytest.mark.parametrize("end", ["silent", "gone"])
def test_a_question_with_which_two_nodes_were_lost_runs_here_alone(end):
    peers = Peers()
    peers.ask(1)
    for peer in (b"x", b"y"):
        peers.join(peer, 2)
        peers.tick(0.0)
        assert peers.given(peer) == [0]
        if end == "gone":
            peers.gone.add(peer)
        peers.tick(nodes_module.QUIET_SECONDS + 0.1)
        assert (len(peers.nodes) == 0) == (end == "gone")
        peers.tick(nodes_module.LEASE_SECONDS + 0.1)
        assert len(peers.nodes) == 0
    peers.join(b"z", 2)
    peers.tick(0.0)
    assert peers.given(b"z") == [] and peers.pool.take(9) == [] and peers.pool.status().queued == 1


def test_a_node_that_cannot_be_written_to_now_keeps_nothing():
    peers = Peers()
    peers.ask(3)
    peers.join(b"x", 9)
    peers.full = True
    peers.tick(0.0)
    assert [job.id for job in peers.pool.take(9)] == [0, 1, 2]
    assert peers.nodes.status()[0].running == 0


def test_a_node_whose_verdict_is_none_is_dismissed_by_name_and_others_are_asked(capsys):
    peers = Peers()
    peers.ask(3)
    peers.heed(b"x", wire.NodeJoin("x\x1b[2J\nerror: forged", ["toy"]), 0.0)
    peers.heed(b"x", wire.NodeHeartbeat("me", {"toy": 3}, []), 0.0)
    peers.tick(0.0)
    peers.heed(b"x", replies({0: Verdict("ok", 1.0), 1: Verdict("ok", float("nan")), 2: Verdict("ok", 1.0)}), 0.1)
    assert peers.verdicts == {0: Verdict("ok", 1.0)}
    name = "x\\x1b[2J error: forged"
    assert capsys.readouterr().err.startswith(
        f"sidecar: worker node {name} is dismissed: its verdict is none: score is"
    )
    with pytest.raises(wire.WireError, match="was dismissed"):
        peers.heed(b"x2", wire.NodeJoin("x\x1b[2J\nerror: forged", ["toy"]), 0.2)
    peers.join(b"y", 9)
    peers.tick(0.2)
    assert peers.given(b"y") == [1, 2]


@pytest.mark.parametrize(
    "bad",
    [
        Verdict("ok", 1.0, {"a": float("inf")}),
        Verdict("ok", 1.0, {"x" * 300: 1.0}),
        Verdict("ok", 1.0, {"\x1b": 1.0}),
        Verdict("ok", 1.0, {str(i): 1.0 for i in range(200)}),
        Verdict("ok", 1.0, detail="x" * wire.MAX_VERDICT_BYTES),
        ["splendid", 1.0],
        "ok",
    ],
    ids=range(7),
)
def test_verdicts_that_are_none(bad):
    with pytest.raises(ValueError):
        checked_reply(wire.pack(bad))


def test_a_node_that_beats_but_does_not_answer_loses_its_questions_before_they_are_late(capsys):
    peers = Peers()
    peers.ask(40)
    peers.join(b"x", 15)
    peers.tick(0.0)
    assert len(peers.given(b"x")) == 15
    for now in range(1, 45):
        peers.heed(b"x", wire.NodeHeartbeat("me", {"toy": 15}, peers.given(b"x")), float(now))
        peers.tick(float(now))
    assert capsys.readouterr().err.count("worker node x is late with 15 requests") == 1
    assert [job.id for job in peers.pool.take(99)] == list(range(40))
    peers.heed(b"x", replies({3: Verdict("ok", 0.5)}), 50.0)  # it may still be the first
    assert peers.verdicts == {3: Verdict("ok", 0.5)}


def test_strangers_and_servers_of_our_own():
    spec = wire.PoolSpec("a:B", {}, 1)
    peers = Peers(toy=spec, judge=wire.PoolSpec("a:Judge", {}, 1, url="http://127.0.0.1:1/v1"))
    peers.heed(b"x", wire.NodeHeartbeat("me", {"toy": 5}, []), 0.0)
    assert peers.sent == [(b"x", wire.Pong("", {}))] and len(peers.nodes) == 0
    peers.heed(b"x", wire.NodeJoin("x", ["toy", "judge", "other"]), 0.0)
    assert peers.sent[-1] == (b"x", wire.NodeWelcome("me", {"toy": spec}))
    peers.heed(b"x", wire.NodeHeartbeat("me", {"toy": 5, "judge": 5}, []), 0.0)
    assert peers.nodes.status()[0].windows == {"toy": 5}


def test_so_many_nodes_and_no_more(monkeypatch):
    monkeypatch.setattr(nodes_module, "MAX_NODES", 2)
    peers = Peers()
    peers.join(b"x", 1)
    peers.join(b"y", 1)
    with pytest.raises(wire.WireError, match="2 worker nodes"):
        peers.heed(b"z", wire.NodeJoin("z", ["toy"]), 0.0)
