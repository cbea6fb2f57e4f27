"""The sidecar under attack: hosts and workers that are killed or stuck, garbage on the wire, ranks that die."""

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spmd_rl import sidecar
from spmd_rl.sidecar import host_client as client_module
from spmd_rl.sidecar import wire
from spmd_rl.sidecar.launcher import pool_spec
from spmd_rl.sidecar.process_pool import spec_digest
from spmd_rl.types import AnswerInfo, Node, Verdict
from tests import sockets
from tests.patience import patient
from tests.unit.sidecar_helpers import ask, gone_within, host_of, numbers, private_node, prompt, rewards, workers_of

HERE = Path(__file__).parent


@pytest.fixture
def node(monkeypatch):
    yield from private_node(monkeypatch)


# -- processes that are killed or stuck -------------------------------------------------------------------------------


async def ask_while(scorer, answers, disturb) -> list[Verdict]:
    task = asyncio.create_task(ask(scorer, answers))
    await asyncio.sleep(0.15)
    await disturb()
    return await task


def test_a_killed_host_changes_no_verdict(node):
    """Neither for the rank that owns the host nor for its neighbour."""
    answers = [str(i) for i in range(300)]
    config = rewards("Number", workers=2, args={"seconds": 0.003})
    with sidecar.connect(config, node) as first, sidecar.connect(config, Node(1, 1, node.address)) as second:

        async def kill():
            host = host_of(first)
            old = [host, *host.children(recursive=True)]
            host.kill()
            assert gone_within(old[1:], 2.0)

        async def both():
            return await asyncio.gather(ask_while(first, answers, kill), ask(second, answers))

        start = time.perf_counter()
        assert asyncio.run(both()) == [numbers(answers)] * 2
        assert time.perf_counter() - start < patient(15)


def test_a_second_host_that_dies_costs_what_it_had(node):
    with sidecar.connect(rewards("Moody", workers=2, timeout=60.0), node) as scorer:

        async def kill():
            first = scorer.host.pid
            host_of(scorer).kill()
            while scorer.host.pid == first or not scorer.links[0].calls:
                await asyncio.sleep(0.05)
            host_of(scorer).kill()

        lost, late = asyncio.run(ask_while(scorer, ["sleep 60"], kill)), asyncio.run(ask(scorer, ["a"]))
    assert [verdict.status for verdict in (*lost, *late)] == ["error", "ok"] and "host" in lost[0].detail


def test_a_host_killed_while_its_owner_asks_nothing_serves_the_neighbour(node):
    """The owner may be through with its share, and stand in a collective without a loop."""
    answers = [str(i) for i in range(50)]
    config = rewards("Number", args={"seconds": 0.01})
    with sidecar.connect(config, node) as first, sidecar.connect(config, Node(1, 1, node.address)) as second:

        async def kill():
            host_of(first).kill()

        assert asyncio.run(ask_while(second, answers, kill)) == numbers(answers)
        assert first.outstanding == 0


def test_a_host_killed_while_the_loop_was_blocked_or_nobody_asked(node, monkeypatch):
    with sidecar.connect(rewards("Number", args={"seconds": 0.01}), node) as scorer:

        async def block():
            host_of(scorer).kill()
            time.sleep(0.7)  # a rank that computes

        assert asyncio.run(ask_while(scorer, ["a"] * 50, block)) == numbers(["a"] * 50)
        host_of(scorer).kill()
        assert asyncio.run(ask(scorer, ["b"])) == numbers(["b"])


def test_a_host_that_aborts_is_replaced_and_its_questions_are_asked_again(node, capfd):
    answers = [str(i) for i in range(200)]
    with sidecar.connect(rewards("Number", args={"seconds": 0.005}), node) as scorer:

        async def abort():
            host_of(scorer).send_signal(signal.SIGABRT)

        assert asyncio.run(ask_while(scorer, answers, abort)) == numbers(answers)
    assert capfd.readouterr().err.count("sidecar: the host died by SIGABRT; starting a new one") == 1


def test_a_blocked_loop_does_not_take_its_host_for_dead(node, monkeypatch):
    monkeypatch.setattr(client_module, "LEASE_SECONDS", 0.5)
    with sidecar.connect(rewards("Number", args={"seconds": 0.01}), node) as scorer:
        host = host_of(scorer)

        async def block():
            for _ in range(3):
                time.sleep(0.8)
                await asyncio.sleep(0.01)

        assert asyncio.run(ask_while(scorer, ["a"] * 30, block)) == numbers(["a"] * 30)
        assert host_of(scorer) == host


def test_a_stuck_host_is_replaced(node, monkeypatch):
    monkeypatch.setattr(client_module, "LEASE_SECONDS", 0.5)
    with sidecar.connect(rewards("Number", args={"seconds": 0.01}), node) as scorer:
        host = host_of(scorer)

        async def stop():
            host.suspend()

        assert asyncio.run(ask_while(scorer, ["a"] * 30, stop)) == numbers(["a"] * 30)
        assert host_of(scorer) != host


def test_killed_workers_change_no_verdict(node):
    answers = [str(i) for i in range(400)]
    with sidecar.connect(rewards("Number", workers=4, args={"seconds": 0.005}), node) as scorer:

        async def kill():
            for worker in workers_of(scorer)[:2]:
                worker.kill()
            await asyncio.sleep(0.3)
            host_of(scorer).children()[0].children()[0].kill()  # the fork server, and with it all the others
            await asyncio.sleep(0.3)

        assert asyncio.run(ask_while(scorer, answers, kill)) == numbers(answers)


def test_killed_workers_that_are_idle_are_replaced(node):
    with sidecar.connect(rewards("Number", workers=2), node) as scorer:
        for worker in workers_of(scorer):
            worker.kill()
        assert asyncio.run(ask(scorer, ["a"])) == numbers(["a"])


def test_a_domain_in_which_nothing_moves_is_given_up(node, monkeypatch):
    monkeypatch.setattr(client_module, "GRACE_SECONDS", 0.3)
    config = rewards("Number", timeout=0.2)
    spec = spec_digest(pool_spec(config.domains["toy"]))
    with sockets.context() as context, context.socket(zmq.ROUTER) as router:
        Path(node.address.removeprefix("ipc://")).parent.mkdir()
        router.bind(node.address)

        async def answer_pings():
            while True:
                if router.poll(0):
                    peer, _ = router.recv_multipart()
                    router.send_multipart([peer, wire.encode(wire.Pong({"toy": wire.PoolPulse(1, 1, spec)}))])
                await asyncio.sleep(0.01)

        async def run(scorer):
            task = asyncio.create_task(answer_pings())
            verdicts = await ask(scorer, ["a"])
            task.cancel()
            return verdicts

        with sidecar.connect(config, Node(1, 1, node.address)) as scorer:
            (verdict,) = asyncio.run(run(scorer))
    assert verdict.status == "timeout" and "no progress" in verdict.detail


def test_a_verdict_that_cannot_be_sent_costs_no_worker(node):
    with sidecar.connect(rewards("Moody"), node) as scorer:
        before = workers_of(scorer)
        good, bad = asyncio.run(ask(scorer, ["a", "surrogate"]))
        assert workers_of(scorer) == before
    assert good.status == "ok" and bad.status == "error" and "its verdict cannot be sent" in bad.detail


def test_an_idle_host_sleeps(node):
    with sidecar.connect(rewards("Number"), node) as scorer:
        assert asyncio.run(ask(scorer, ["a"])) == numbers(["a"])
        before = host_of(scorer).num_ctx_switches().voluntary
        time.sleep(3.0)
        assert host_of(scorer).num_ctx_switches().voluntary - before < 60


def test_a_host_that_cannot_live_ends_in_errors(node, monkeypatch):
    with sidecar.connect(rewards("Number"), node) as scorer:
        monkeypatch.setattr(sys, "executable", "/bin/false")
        monkeypatch.setattr(client_module, "START_SECONDS", 1.0)
        host_of(scorer).kill()
        (verdict,) = asyncio.run(ask(scorer, ["a"]))
    assert verdict.status == "error" and "no sidecar host has" in verdict.detail


def test_a_host_whose_owner_is_gone_ends_in_errors(node, monkeypatch):
    monkeypatch.setattr(client_module, "START_SECONDS", 0.2)
    with sidecar.connect(rewards("Number"), Node(1, 1, node.address)) as neighbour:  # nobody starts a host
        verdicts = asyncio.run(ask(neighbour, ["a", "b"]))
    assert {verdict.status for verdict in verdicts} == {"error"} and "no sidecar host has" in verdicts[0].detail


@contextlib.contextmanager
def stranger(address: str):
    """A DEALER that is no client of ours."""
    with sockets.context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(address)
        yield dealer


def test_garbage_does_not_hurt_a_host(node):
    question = wire.pack(wire.ScoreInput(prompt(), "a", AnswerInfo(1, "stop")))
    with sidecar.connect(rewards("Number"), node) as scorer, stranger(node.address) as dealer:
        host = host_of(scorer)
        for frame in [b"garbage", b"", b"\x02\x91", bytes(1 << 20), b"\x01" + b"\x91" * 100_000]:
            dealer.send(frame)
            assert isinstance(wire.TO_CLIENT.decode(dealer.recv()), wire.Error)
        dealer.send_multipart([b"a", b"b", b""])
        assert isinstance(wire.TO_CLIENT.decode(dealer.recv()), wire.Error)
        dealer.send(
            wire.encode(wire.ScoreRequests([wire.ScoreRequest(0, "toy", 1.0, wire.pack(["not", "a question"]))]))
        )
        assert "not understood" in wire.TO_CLIENT.decode(dealer.recv()).items[0].verdict.detail
        items = [wire.ScoreRequest(i, "nowhere", 1.0, question) for i in range(2)]
        dealer.send(wire.encode(wire.ScoreRequests(items)))
        assert [item.verdict.status for item in wire.TO_CLIENT.decode(dealer.recv()).items] == ["error"] * 2
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as raw:  # not even ZMQ
            raw.connect(node.address.removeprefix("ipc://"))
            raw.sendall(random.Random(0).randbytes(5000))

        @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.binary(max_size=100))
        def throw(body):
            dealer.send(bytes((wire.VERSION,)) + body)

        throw()
        assert asyncio.run(ask(scorer, ["a", "b"])) == numbers(["a", "b"])
        assert host_of(scorer) == host and host.is_running()


def test_a_huge_message_does_not_hurt_a_host(node):
    with sidecar.connect(rewards("Number"), node) as scorer, stranger(node.address) as dealer:
        host = host_of(scorer)
        dealer.send(bytes(wire.MAX_FRAME_BYTES + 1000))
        time.sleep(0.2)
        assert asyncio.run(ask(scorer, ["a"])) == numbers(["a"])
        assert host_of(scorer) == host and host.memory_info().rss < 200e6


# -- the end of it ----------------------------------------------------------------------------------------------------

RANK = """
    import asyncio, signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
    from spmd_rl import sidecar
    from spmd_rl.config.schema import RewardConfig, RewardsConfig
    from spmd_rl.types import AnswerInfo, Node, Prompt

    rewards = RewardsConfig(domains={"toy": RewardConfig("sidecar_toys:Moody", workers=2, timeout=60.0)})
    async def main(scorer):
        tasks = [asyncio.create_task(scorer.score(Prompt("0", (), "toy", ""), "sleep 50", AnswerInfo(1, "stop")))
                 for _ in range(2)]
        await asyncio.sleep(0.5)
        print("busy", flush=True)
        await asyncio.gather(*tasks)

    with sidecar.connect(rewards, Node(0, 0, sys.argv[1])) as scorer:
        asyncio.run(main(scorer))
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_its_rank(node, end):
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    command = [sys.executable, "-c", textwrap.dedent(RANK), node.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as rank:
        assert rank.stdout.readline() == b"busy\n"
        family = psutil.Process(rank.pid).children(recursive=True)
        assert len(family) == 5  # host, keeper, fork server, two workers
        rank.send_signal(end)
        rank.wait(5.0)
        assert gone_within(family, 2.0)
    if end == signal.SIGKILL:  # the socket that is left behind is no hindrance
        with sidecar.connect(rewards("Number"), node) as scorer:
            assert asyncio.run(ask(scorer, ["a"])) == numbers(["a"])
