"""A hundred thousand frames that nobody would send: an error or nothing comes back, and nothing grows."""

import asyncio
import random
import resource
import time

import pytest
import zmq

from launch import sidecar_keys
from spmd_rl import sidecar
from spmd_rl.base.curve_keys import ClientKeys
from spmd_rl.sidecar import wire
from spmd_rl.types import AnswerInfo, EnvReply, Verdict
from tests import sockets
from tests.unit.sidecar_helpers import ask, host_of, numbers, private_node, prompt, rewards

CODECS = [value for value in vars(wire).values() if isinstance(value, wire.Codec)]
REPLIES = wire.Codec(wire.ScoreReplies, wire.SessionReplies, wire.Pong, wire.Error, wire.HostStatus)
FRAMES = 100_000
GROWTH = 16 << 20


@pytest.fixture
def node(monkeypatch):
    yield from private_node(monkeypatch)


def valid_frames() -> list[bytes]:
    question = wire.pack(wire.ScoreInput(prompt(), "answer", AnswerInfo(3, "stop")))
    verdict = Verdict("ok", 0.5, {"a": 1.0}, "d")
    reply = wire.pack(EnvReply("o", 1.0, False, True, {"metrics": {"success": 1.0}}))
    pool = wire.PoolSpec("a:B", {"x": [1, {"y": None}]}, 2)
    messages = [
        *(
            wire.Ping(),
            wire.Pong({"a": wire.PoolPulse(1, 2, "s")}),
            wire.CancelScores([1, 2]),
            wire.Error("e"),
            wire.Started(1),
            wire.Ready("each"),
        ),
        *(wire.StartFailed("f"), wire.StartHost(1, "ipc://x", {"a": pool}), wire.StartForkServer("reward.a", pool)),
        wire.ScoreRequests([wire.ScoreRequest(1, "toy", 1.0, question)] * 3),
        wire.ScoreReplies([wire.ScoreReply(1, verdict)]),
        wire.SessionRequests([wire.ResetRequest(1, "toy", 7), wire.StepRequest(1, 1, "left"), wire.CloseRequest(1)]),
        wire.SessionReplies([wire.SessionReply(1, 0, reply), wire.SessionFailure(1, 1, "lost", "d")]),
        *(wire.Goodbye(), wire.GetStatus(), wire.HostStatus(1, 1.0, 0, 0, 0, 0, False, {})),
    ]
    return [wire.encode(message) for message in messages]


def fuzzed(seed: int, count: int):
    """Random bytes, and valid frames with bytes changed, cut out, doubled, or lengths that lie."""
    rng, valid = random.Random(seed), valid_frames()
    for _ in range(count):
        kind = rng.randrange(5)
        frame = bytearray(rng.choice(valid))
        if kind == 0:
            frame = bytearray(bytes([wire.VERSION]) * rng.randrange(2) + rng.randbytes(rng.randrange(200)))
        elif kind == 1:
            for _ in range(rng.randrange(1, 5)):
                frame[rng.randrange(len(frame))] = rng.randrange(256)
        elif kind == 2:
            at = rng.randrange(len(frame))
            del frame[at : at + rng.randrange(1, 9)]
        elif kind == 3:
            at = rng.randrange(1, len(frame) + 1)
            frame[at:at] = rng.choice(valid)[1:]
        else:
            at = rng.randrange(1, len(frame))
            frame[at : at + 1] = rng.choice([b"\xdd\xff\xff\xff\xff", b"\xdb\x7f\xff\xff\xff", b"\xdf\xff\xff\xff\xff"])
        yield bytes(frame)


def test_codecs():
    refused = 0
    for i, frame in enumerate(fuzzed(1, FRAMES)):
        if i == FRAMES // 10:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            CODECS[i % len(CODECS)].decode(frame)
        except wire.WireError:
            refused += 1
    assert refused > FRAMES // 2
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < GROWTH


@pytest.mark.parametrize("keyed", [False, True], ids=["open", "keyed"])
@pytest.mark.parametrize("count", [5_000, pytest.param(FRAMES, marks=pytest.mark.slow)])
def test_a_host_lives_on(node, count, keyed, tmp_path):
    keys = str(sidecar_keys.make(tmp_path / "keys")) if keyed else None
    with sidecar.connect(rewards("Number", workers=1), node, keys=keys) as scorer:
        host = host_of(scorer)
        with sockets.context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.RCVTIMEO, 10_000)
            if keyed:  # a client gone mad
                ClientKeys.load(keys).secure(stranger)
            stranger.connect(node.address)
            errors, before = 0, 0
            for i, frame in enumerate(fuzzed(2, count)):
                if i == count // 10:
                    before = host.memory_info().rss
                stranger.send(frame)
                while stranger.poll(0):
                    errors += isinstance(REPLIES.decode(stranger.recv()), wire.Error)
            while stranger.poll(1000):
                errors += isinstance(REPLIES.decode(stranger.recv()), wire.Error)
            stranger.send(wire.encode(wire.Ping()))
            assert isinstance(REPLIES.decode(stranger.recv()), wire.Pong) and errors > count // 2
            time.sleep(0.1)
            assert host.is_running() and host.memory_info().rss - before < GROWTH
        answers = [f"answer {i}" for i in range(50)]
        assert asyncio.run(ask(scorer, answers)) == numbers(answers)
        assert host_of(scorer).pid == host.pid
