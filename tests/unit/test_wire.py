"""Frames: what goes in comes out, and no bytes whatever do more than raise a WireError."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.sidecar import wire
from spmd_rl.types import AnswerInfo, ImagePart, Message, Prompt, TextPart, Verdict

PROMPT = Prompt("ab" * 16, (Message("user", "2 + 2?"),), "math", "4", {"task": "sum", "entry": {"metadata": [1, 2.5]}})
CODECS = [value for value in vars(wire).values() if isinstance(value, wire.Codec)]


def scores(answer: str = "4") -> wire.ScoreRequests:
    question = wire.pack(wire.ScoreInput(PROMPT, answer, AnswerInfo(3, "stop")))
    return wire.ScoreRequests([wire.ScoreRequest(7, "math", 1.5, question)])


def test_a_question_arrives_as_it_was_asked():
    item = wire.TO_HOST.decode(wire.encode(scores("vier \u2713"))).items[0]
    assert (item.id, item.domain, item.timeout) == (7, "math", 1.5)
    question = wire.SCORE_INPUT.unpack(item.input)
    assert question == wire.ScoreInput(PROMPT, "vier \u2713", AnswerInfo(3, "stop"))


def test_parts_of_a_message_arrive_as_they_were():
    parts = TextPart("what is this?"), ImagePart("image/png", b"\x89PNG"), ImagePart("image/jpeg", path="/a/b.jpg")
    asked = wire.ScoreInput(Prompt("0" * 32, (Message("user", parts),), "math", ""), "4", AnswerInfo(3, "stop"))
    assert wire.SCORE_INPUT.unpack(wire.pack(asked)) == asked


def test_a_verdict_arrives_as_it_was_given():
    reply = wire.ScoreReplies([wire.ScoreReply(3, Verdict("wrong_format", 0.25, {"a": 1.0}, "why"))])
    assert wire.TO_CLIENT.decode(wire.encode(reply)) == reply


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x01",
        bytes((wire.VERSION + 1,)) + wire.encode(wire.Ping())[1:],  # another version
        wire.encode(wire.Ping()) + b"x",  # a tail
        wire.encode(scores())[:-1],  # cut off
        wire.encode(wire.Pong()),  # not for a host
        wire.encode(wire.ScoreRequests([wire.ScoreRequest(-1, "m", 1.0, wire.pack(0))])),
        wire.encode(wire.ScoreRequests([wire.ScoreRequest(1, "m" * 300, 1.0, wire.pack(0))])),
        wire.encode(wire.ScoreRequests([wire.ScoreRequest(1, "m", float("nan"), wire.pack(0))])),
        wire.encode(wire.ScoreRequests([wire.ScoreRequest(1, "m", -1.0, wire.pack(0))])),
        b"\x01\x92\xaescore_requests\xdd\xff\xff\xff\xff",  # a list of four billion
        b"\x01\x92\xaescore_requests" + b"\x91" * 100_000,  # a deep one
        b"\x01\x92\xadcancel_scores\x91\xa1\xff",
        bytes(wire.MAX_FRAME_BYTES + 1),
    ],
    ids=range(14),
)
def test_bad_frames_are_a_wire_error(frame):
    with pytest.raises(wire.WireError):
        wire.TO_HOST.decode(frame)


@pytest.mark.parametrize("answer", ["\ud800", "x" * wire.MAX_FRAME_BYTES])
def test_what_has_no_frame_is_refused_by_the_sender(answer):
    with pytest.raises(wire.WireError):
        wire.encode(scores(answer))


@pytest.mark.parametrize("extra", [{"x": object()}, {"x": 1 << 80}, {"x": {1, object()}}])
def test_what_has_no_msgpack_form_is_refused(extra):
    with pytest.raises(wire.WireError):
        wire.pack(wire.ScoreInput(Prompt("a", (), "m", "", extra), "", AnswerInfo(0, "stop")))


def test_a_question_of_another_shape_is_refused():
    for value in [0, [], {"prompt": 1}, [[1, 2], "a", [3, "stop", 1]], [None, "", None]]:
        with pytest.raises(wire.WireError):
            wire.SCORE_INPUT.unpack(wire.pack(value))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(CODECS), st.booleans())
def test_no_bytes_raise_anything_else(body, codec, versioned):
    with contextlib.suppress(wire.WireError):
        codec.decode(bytes((wire.VERSION,)) + body if versioned else body)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 400), st.integers(0, 255))
def test_no_flipped_byte_raises_anything_else(position, value):
    frame = bytearray(wire.encode(scores("a longer answer")))
    frame[position % len(frame)] = value
    with contextlib.suppress(wire.WireError):
        for item in getattr(wire.TO_HOST.decode(bytes(frame)), "items", []):
            wire.SCORE_INPUT.unpack(item.input)
