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

from spmd_rl import sidecar
from spmd_rl.sidecar import host as host_module
from spmd_rl.sidecar import wire
from spmd_rl.sidecar.frames import receive_frame
from spmd_rl.sidecar.host import Host
from spmd_rl.sidecar.status import fetch_status
from spmd_rl.sidecar.worker import checked
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


def test_a_client_that_never_reads_is_not_written_to_for_ever(node, monkeypatch):
    monkeypatch.setattr(host_module, "MAX_UNSENT", 10)
    with hosted(node.address) as (host, _, dealer):
        for i in range(20_000):
            dealer.send(wire.encode(wire.ScoreRequests([score(i, "a", "nowhere" * 28)])))
        time.sleep(0.5)
        waiting = fetch_status(node.address, None).unsent_replies
        assert waiting > 0
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


# -- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        Verdict("ok", 1.0, {"a": float("inf")}),
        Verdict("ok", 1.0, {"x" * 300: 1.0}),
        Verdict("ok", 1.0, {str(i): 1.0 for i in range(200)}),
        Verdict("splendid", 1.0),
        "ok",
    ],
    ids=range(5),
)
def test_verdicts_that_are_none(bad):
    with pytest.raises((ValueError, TypeError)):
        checked(bad)
