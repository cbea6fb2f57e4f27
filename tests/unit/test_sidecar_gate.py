"""The gate before a host's socket: messages are limited, not frames; descriptors run out and nothing breaks."""

import asyncio
import contextlib
import resource
import signal
import socket
import time

import psutil
import pytest
import zmq

from spmd_rl import sidecar
from spmd_rl.sidecar.frame_counter import PEER_FRAMES, BadFrame, FrameCounter
from spmd_rl.sidecar.status import fetch_status
from tests import sockets
from tests.unit.sidecar_helpers import ask, host_of, numbers, private_node, rewards, workers_of
from tests.unit.sidecar_storm import GREETING, READY


@pytest.fixture
def node(monkeypatch):
    yield from private_node(monkeypatch)


def frame(body: bytes, flags: int = 0) -> bytes:
    return bytes((flags, len(body))) + body if len(body) < 256 else bytes((flags | 2,)) + len(body).to_bytes(8) + body


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_frames_are_counted_until_they_are_read(step):
    counter = FrameCounter()
    data = memoryview(GREETING + READY + frame(b"a" * 10) + frame(b"b" * 300, flags=1) + frame(b""))
    for start in range(0, len(data), step):
        assert counter.feed(data[start : start + step]) == len(data[start : start + step])
    ours = 4 * 64 + len(READY) - 2 + 310
    assert counter.unread == ours
    counter.read(10)
    assert counter.unread == 2 * 64 + 300
    counter.read(99)  # none of these
    assert counter.unread == 2 * 64 + 300
    counter.read(0)
    assert counter.unread == 0


def test_a_connection_is_followed_up_to_its_limit():
    tiny = memoryview(GREETING + frame(b"x", flags=1) * 10_000)
    counter = FrameCounter()
    assert counter.feed(tiny) == 64 + 3 * PEER_FRAMES - 1 and counter.full and counter.feed(tiny) == 0
    large = FrameCounter()
    fed = large.feed(memoryview(GREETING + frame(bytes(8 << 20), flags=1) * 3))
    assert large.max_bytes - (8 << 20) < fed < 2 * (8 << 20) and large.full


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.0", "greeting"),
        (GREETING[:10] + b"\x01", "ZMTP 1"),
        (GREETING + b"\x80", "flags 0x80"),
        (GREETING + b"\x02" + (1 << 40).to_bytes(8), "frame of 1099511627776 bytes"),
    ],
)
def test_what_is_no_zmtp_is_refused(data, why):
    with pytest.raises(BadFrame, match=why):
        FrameCounter().feed(memoryview(data))


def test_a_message_of_large_parts_is_cut_off(node):
    with sidecar.connect(rewards("Number"), node) as scorer, sockets.context() as context:
        host = host_of(scorer)
        before = most = host.memory_info().rss
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(node.address)
            dealer.send_multipart([bytes(8 << 20)] * 150, copy=False)  # 1.2 GB
            deadline = time.monotonic() + 20
            while not fetch_status(node.address, None).cut_connections and time.monotonic() < deadline:
                most = max(most, host.memory_info().rss)
                time.sleep(0.01)
        assert fetch_status(node.address, None).cut_connections
        assert most - before < 64 << 20
        assert asyncio.run(ask(scorer, ["a"])) == numbers(["a"]) and host_of(scorer) == host


def test_a_host_without_descriptors_lives(node):
    """It takes no more connections, and still replaces a worker that died."""
    path = node.address.removeprefix("ipc://")
    with sidecar.connect(rewards("Number"), node) as scorer, contextlib.ExitStack() as stack:
        assert asyncio.run(ask(scorer, ["a"])) == numbers(["a"])
        host, (worker,) = host_of(scorer), workers_of(scorer)
        soft, hard = host.rlimit(psutil.RLIMIT_NOFILE)
        assert soft == min(hard, 1 << 20) or hard == resource.RLIM_INFINITY
        few = max(file.fd for file in host.net_connections("unix")) + 40
        host.rlimit(psutil.RLIMIT_NOFILE, (few, hard))
        for _ in range(100):
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(path)
        assert host_of(scorer) == host
        worker.kill()
        assert asyncio.run(ask(scorer, ["b"])) == numbers(["b"])
        assert host_of(scorer) == host


def test_a_host_that_aborts_is_replaced_and_its_questions_are_asked_again(node, capfd):
    answers = [str(i) for i in range(200)]
    with sidecar.connect(rewards("Number", args={"seconds": 0.005}), node) as scorer:

        async def run():
            task = asyncio.create_task(ask(scorer, answers))
            await asyncio.sleep(0.3)
            host_of(scorer).send_signal(signal.SIGABRT)
            began = time.monotonic()
            verdicts = await task
            print(f"all answered {time.monotonic() - began:.2f} s after the abort")
            return verdicts

        assert asyncio.run(run()) == numbers(answers)
    assert capfd.readouterr().err.count("sidecar: the host died by SIGABRT; starting a new one") == 1
