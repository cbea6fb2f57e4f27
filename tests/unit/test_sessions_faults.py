"""Sessions whatever is killed, lost, cancelled, forgotten or garbled: each call has an end, and others play on."""

import asyncio
import contextlib
import os
import random
import socket
import threading
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from spmd_rl import sidecar
from spmd_rl.sidecar import sessions as sessions_module
from spmd_rl.sidecar import wire
from spmd_rl.sidecar.clients import OpenSession
from spmd_rl.sidecar.frames import receive_frame
from spmd_rl.sidecar.host import Host
from spmd_rl.sidecar.status import fetch_status
from spmd_rl.types import Node, SessionLost
from tests import sockets
from tests.patience import patient
from tests.unit.sidecar_helpers import host_of, private_node, workers_of
from tests.unit.test_sessions import envs, expected, play, play_all, reasons

SECONDS = 10.0


@pytest.fixture
def node(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(Path(__file__).parent), str(Path(__file__).parents[2]))))
    yield from private_node(monkeypatch)


def running(node: Node) -> int:
    return fetch_status(node.address, None).envs["toy"].running


def reaches(node: Node, count: int, seconds: float = SECONDS) -> bool:
    """Whether so many sessions run within the time."""
    deadline = time.monotonic() + patient(seconds)
    while running(node) != count and time.monotonic() < deadline:
        time.sleep(0.05)
    return running(node) == count


class Client:
    """A DEALER that says what a test wants."""

    def __init__(self, context: zmq.Context, address: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.connect(address)

    def send(self, *items) -> None:
        self.socket.send(wire.encode(wire.SessionRequests(list(items))))

    def answers(self, count: int = 1) -> list:
        """The next answers, in the order of their sessions."""
        items = []
        while len(items) < count:
            message = wire.TO_CLIENT.decode(self.socket.recv())
            items += getattr(message, "items", ())
        return sorted(items, key=lambda item: (item.session, item.number))

    def ping(self) -> None:
        self.socket.send(wire.encode(wire.Ping()))


@contextlib.contextmanager
def hosted(address: str, target: str = "Counts", **settings):
    """A host on a thread of this process, and a context for clients."""
    ours, theirs = socket.socketpair()
    spec = wire.EnvPoolSpec(f"session_toys:{target}", {}, **{"workers": 1, "slots": 4} | settings)
    host = Host(wire.StartHost(0, address, {}, envs={"toy": spec}), theirs)
    thread = threading.Thread(target=host.run, daemon=True)
    with ours, theirs, sockets.context() as context:
        thread.start()
        try:
            assert receive_frame(ours, wire.FROM_CHILD) == wire.Ready()
            yield context
        finally:
            context.destroy(linger=0)
            ours.close()
            thread.join(10)
            assert not thread.is_alive()


def observation(answer) -> str:
    return wire.ENV_REPLY.unpack(answer.reply).observation


# -- kills ------------------------------------------------------------------------------------------------------------


def test_a_host_that_is_killed_loses_its_sessions_and_is_replaced(node):
    with sidecar.connect_environments(envs("Counts", workers=2, args={"seconds": 0.1}), node) as environments:

        async def run():
            idle = await environments.reset("toy", 1)
            episodes = asyncio.create_task(play_all(environments, range(12), ["a"] * 6))  # some still wait for a slot
            await asyncio.sleep(0.3)
            host = host_of(environments)
            host.kill()
            ends = await episodes
            with pytest.raises(SessionLost, match="host is gone"):
                await idle.step("a")
            assert host_of(environments).pid != host.pid
            return ends

        ends = asyncio.run(run())
        assert len(ends) == 12 and set(reasons(ends)) == {"ok", "lost"}
        assert asyncio.run(play_all(environments, range(12))) == expected(range(12))


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_workers_that_are_killed_again_and_again(node, mode):
    settings = envs("Counts", mode=mode, workers=2, args={"seconds": 0.02})
    with sidecar.connect_environments(settings, node) as environments:

        async def kill() -> None:
            for _ in range(5):
                await asyncio.sleep(0.2)
                with contextlib.suppress(psutil.NoSuchProcess, IndexError):  # it may be gone already
                    random.choice(workers_of(environments)).kill()

        async def retried(seed: int) -> list[str]:
            while True:
                episode = await play(environments, seed, ["a", "bb", "ccc"])
                if not isinstance(episode[-1], SessionLost):
                    return episode
                assert episode[-1].reason == "lost"

        async def run():
            return (await asyncio.gather(kill(), *(retried(seed) for seed in range(100))))[1:]

        assert asyncio.run(run()) == expected(range(100))
        assert reaches(node, 0)


def test_a_forkserver_that_is_killed_is_replaced(node):
    with sidecar.connect_environments(envs("Counts"), node) as environments:
        for process in host_of(environments).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # whose parent was killed before
                process.kill()
        time.sleep(0.2)
        assert asyncio.run(play_all(environments, range(4))) == expected(range(4))


def test_many_that_are_lost_while_many_wait(node):
    with sidecar.connect_environments(envs("Moody"), node) as environments:
        start = time.monotonic()
        assert reasons(asyncio.run(play_all(environments, range(600), ["raise"]))) == ["error"] * 600
        assert time.monotonic() - start < patient(20)
        assert reaches(node, 0)


# -- clients ----------------------------------------------------------------------------------------------------------


def test_a_cancelled_call_closes_its_session(node):
    with sidecar.connect_environments(envs("Moody", workers=1, envs_per_worker=1), node) as environments:

        async def run():
            task = asyncio.create_task(play(environments, 1, ["sleep 0.5"]))
            waits = asyncio.create_task(play(environments, 2))
            await asyncio.sleep(0.3)
            task.cancel()
            waits.cancel()
            await asyncio.gather(task, waits, return_exceptions=True)
            assert environments.outstanding == 0
            return await play(environments, 3, ["a"])

        assert asyncio.run(run())[1:] == ["fine"]
        assert reaches(node, 0)


def test_the_sessions_of_a_client_that_is_gone_are_closed(node, monkeypatch):
    monkeypatch.setattr(sessions_module, "QUIET_SECONDS", 0.2)
    with hosted(node.address) as context:
        client, other = Client(context, node.address), Client(context, node.address)
        other.send(wire.ResetRequest(0, "toy", 1))
        other.answers()
        client.send(*(wire.ResetRequest(i, "toy", i) for i in range(6)))  # more than there are slots
        assert len(client.answers(3)) == 3
        client.socket.close()
        assert reaches(node, 1)
        assert fetch_status(node.address, None).envs["toy"].queued == 0


def test_an_episode_counts_the_time_in_which_its_client_listens(node):
    with sidecar.connect_environments(envs("Counts", episode_timeout=1.5), node) as environments:

        async def run():
            session = await environments.reset("toy", 1)
            time.sleep(2.0)  # a rank that trains
            await session.step("a")
            await asyncio.sleep(2.0)
            with pytest.raises(SessionLost, match=r"episode took longer than 1.5 s"):
                await session.step("a")
            await session.close()

        asyncio.run(run())
        assert reaches(node, 0)


def test_calls_out_of_turn_are_refused_and_the_session_goes_on(node):
    with hosted(node.address) as context:
        client = Client(context, node.address)
        reset = wire.ResetRequest(7, "toy", 5)
        client.send(reset)
        client.answers()
        client.send(reset)
        assert "session 7 is open" in wire.TO_CLIENT.decode(client.socket.recv()).detail
        client.send(wire.StepRequest(7, 1, "aa"), wire.StepRequest(7, 2, "a"))
        assert "under way" in wire.TO_CLIENT.decode(client.socket.recv()).detail
        assert observation(client.answers()[0]) == "at 7"
        client.send(wire.CloseRequest(7), wire.StepRequest(7, 3, "a"))
        assert client.answers()[0].reason == "lost"


def test_a_cancelled_step_or_reset_leaves_no_session(node):
    with sidecar.connect_environments(envs("Moody"), node) as environments:

        async def run():
            session = await environments.reset("toy", 1)
            for call in (session.step("sleep 0.3"), environments.reset("toy", 2)):
                task = asyncio.create_task(call)
                await asyncio.sleep(0.001)
                task.cancel()
                (outcome,) = await asyncio.gather(task, return_exceptions=True)
                if isinstance(outcome, OpenSession):  # it was faster
                    await outcome.close()
            await environments.reset("toy", 3)

        asyncio.run(run())
        assert reaches(node, 1)


def test_a_host_that_is_asked_to_end_lets_sessions_end(node):
    with sidecar.connect_environments(envs("Counts", args={"seconds": 0.2}), node) as environments:
        host = host_of(environments)

        async def run():
            episodes = asyncio.create_task(play_all(environments, range(4)))
            await asyncio.sleep(0.3)
            host.terminate()
            await asyncio.sleep(0.1)
            return await episodes, await play_all(environments, [9])

        assert asyncio.run(run()) == (expected(range(4)), expected([9]))
        assert host_of(environments).pid != host.pid


# -- garbled frames ---------------------------------------------------------------------------------------------------


def garbled(rng: random.Random):
    """Session requests that are right, out of turn, or no longer frames."""
    valid = [
        wire.ResetRequest(rng.randrange(50), rng.choice(["toy", "nowhere", ""]), rng.randrange(1 << 64)),
        wire.StepRequest(rng.randrange(50), rng.randrange(1, 4), "a" * rng.randrange(9)),
        wire.CloseRequest(rng.randrange(50)),
    ]
    frame = bytearray(wire.encode(wire.SessionRequests(rng.choices(valid, k=rng.randrange(4)))))
    for _ in range(rng.randrange(4)):
        frame[rng.randrange(len(frame))] = rng.randrange(256)
    return bytes(frame[: rng.choice([len(frame), rng.randrange(len(frame))])])


@pytest.mark.parametrize("count", [3_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_storm_of_garbled_frames(node, count):
    rng = random.Random(3)
    with sidecar.connect_environments(envs("Counts", envs_per_worker=64), node) as environments:
        host = host_of(environments)

        async def run():
            return await play_all(environments, range(40))

        with sockets.context() as context:
            stranger = Client(context, node.address)
            for _ in range(count):
                stranger.socket.send(garbled(rng))
                while stranger.socket.poll(0):
                    wire.TO_CLIENT.decode(stranger.socket.recv())
            assert asyncio.run(run()) == expected(range(40))
            stranger.send(*(wire.CloseRequest(i) for i in range(50)))
            assert host.is_running() and host.memory_info().rss < 300 << 20
            context.destroy(linger=0)
        assert asyncio.run(run()) == expected(range(40))


def test_frames_of_sessions_are_checked():
    frame = wire.encode(wire.SessionRequests([wire.ResetRequest(1, "a", 2**64 - 1), wire.StepRequest(1, 1, "x")]))
    assert [type(item).__name__ for item in wire.TO_HOST.decode(frame).items] == ["ResetRequest", "StepRequest"]
    for wrong in (
        wire.StepRequest(1, 0, "x"),
        wire.ResetRequest(-1, "a", 1),
        wire.ResetRequest(1, "a", -1),
        wire.ResetRequest(1, "a" * 201, 1),
        wire.SessionReply(1, 1, msgspec.Raw(b"\xc0")),
    ):
        with pytest.raises(wire.WireError):
            wire.TO_HOST.decode(wire.encode(wire.SessionRequests([wrong])))
