"""The score protocol: one answer in, one verdict out. Requests are stateless."""

from typing import Annotated

import msgspec

from spmd_rl.types import AnswerInfo, Prompt, Verdict
from spmd_rl.wire.base import Id, Many, Name, Seconds, WireMessage


class ScoreInput(WireMessage):
    """The arguments of a rewarder's `score`: one answer to judge. Only the worker uses them."""

    prompt: Prompt
    answer: str
    info: AnswerInfo


class ScoreInputShape(WireMessage):
    """A `ScoreInput` as the host checks it: without its prompt, which could be made of millions of tiny objects."""

    prompt: msgspec.Raw
    answer: str
    info: AnswerInfo


class ScoreRequest(WireMessage):
    """A request for one verdict."""

    id: Id
    domain: Name
    timeout: Seconds
    """The running time that the rewarder may take; waiting for a worker does not count."""
    input: msgspec.Raw
    """An encoded `ScoreInput`."""


class ScoreRequests(WireMessage, tag="score_requests"):
    """Client to host, host to worker."""

    items: Annotated[list[ScoreRequest], Many]


class ScoreReply(WireMessage):
    """The verdict for one `ScoreRequest`."""

    id: Id
    verdict: Verdict


class ScoreReplies(WireMessage, tag="score_replies"):
    """The answer to `ScoreRequests`, in any order. A worker sends one verdict before it begins the next request."""

    items: list[ScoreReply]


class CancelScores(WireMessage, tag="cancel_scores"):
    """Client to host: nobody waits for these verdicts any more."""

    ids: Annotated[list[Id], Many]
