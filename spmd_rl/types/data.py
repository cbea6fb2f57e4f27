"""The data vocabulary: what passes between stages, from a dataset row to a judged answer.

Frozen `msgspec` structs, which are made ten times as fast as frozen dataclasses: they come in thousands. Nothing that
they hold can lead back to them, so the search for cycles leaves them out (`gc=False`). Nothing of torch, so that
rewards, environments and sidecars can import them. Ids and floats are `array`s. Tensors live in `batch.py`.

    Prompt -> Request -> Completion -> Turn (AgentStep) -> Sample -> Group
                                        `-> AnswerInfo -> Verdict
"""

import json
import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

FinishReason = Literal["stop", "length", "abort"]
"""`stop`: an end-of-sequence token or a stop string came; `length`: the token limit was reached; `abort`: given up."""

VerdictStatus = Literal["ok", "wrong_format", "timeout", "error", "rejected", "unsupported"]
"""Only `ok` and `wrong_format` carry a score; the others take the sample out of its group's baseline."""

MISSING_PACKAGE = "missing_package"
"""A verdict's part of that name says that the answer failed for want of a package, which `detail` names."""

UNPROVEN = "unproven"
"""A verdict's part of that name says that the answer could have made the verdict itself."""

SUSPECT = "suspect"
"""A verdict's part of that name says that a paid answer looks like a cheat; `detail` says why."""

SPEAKER_FIELDS = ("name", "tool_call_id", "tools")
"""Fields of a message that are no part of what its speaker says."""

SCORED: frozenset[str] = frozenset({"ok", "wrong_format"})


class TextPart(Struct, frozen=True, gc=False, tag="text"):
    """Text as one part of a message."""

    text: str


class ImagePart(Struct, frozen=True, gc=False, tag="image"):
    """An image as one part of a message: its encoded bytes, or the path of a file that every rank can read."""

    media_type: str
    """Such as `image/png`."""
    data: bytes = b""
    path: str = ""


class Message(Struct, frozen=True, gc=False, omit_defaults=True):
    """One chat message, as chat templates know it."""

    role: str
    content: str | tuple[TextPart | ImagePart, ...]
    fields: str = ""
    """Its other fields, which the chat template gets too: the JSON text of an object. The first message of a
    conversation has the conversation's `tools` among them."""
    is_learnt: bool = True
    """False: an answer that is not trained on (`weight: 0`)."""

    @property
    def others(self) -> dict[str, Any]:
        """Fields beside role and content, by name."""
        return json.loads(self.fields) if self.fields else {}

    def with_fields(self, fields: Mapping[str, Any]) -> "Message":
        """Return the message with other fields."""
        text = json.dumps(fields, ensure_ascii=False) if fields else ""
        return replace(self, fields=text)

    def saying(self, content: str) -> "Message":
        """Return a message of the same speaker that says `content` and nothing else."""
        about = {name: value for name, value in self.others.items() if name in SPEAKER_FIELDS}
        return replace(self, content=content).with_fields(about)

    @property
    def text(self) -> str:
        """The text of all parts, joined. ValueError if one of them is an image."""
        if isinstance(self.content, str):
            return self.content
        if any(isinstance(part, ImagePart) for part in self.content):
            raise ValueError("a message with an image is not text alone")
        return "".join([part.text for part in self.content])


class Prompt(Struct, frozen=True):
    """One problem of a dataset. Example: `Prompt("9f..", (Message("user", "2+2?"),), "math", "4")`."""

    id: str
    """32 hex digits: blake2b-128 of the normalised content (`data.prompts.content_id`), or the row's own `id`."""
    messages: tuple[Message, ...]
    domain: str
    """Names the rewarder: `reward.<domain>`."""
    ground_truth: str
    extra: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Whatever else the row or generator gave (plain JSON values), handed to the rewarder untouched."""
    priority: float = 0.0
    """Prompts of a step with a higher one are begun first."""
    where: str = ""
    """File and line, or name and index, of its row, for error messages."""


class Conversation(Struct, frozen=True, gc=False):
    """A whole conversation, or a text with what comes before it, of which the assistant's own messages are learnt."""

    messages: tuple[Message, ...]
    num_given: int = 0
    """The first so many messages are a prompt: nothing is learnt from them, whoever speaks."""
    is_plain: bool = False
    """Texts as they are, one after the other, without any chat template."""
    borders: tuple[int, ...] = ()
    """Where the steps of its last message begin but the first one, in characters."""

    @property
    def prompt(self) -> tuple[Message, ...]:
        """Messages that are given."""
        return self.messages[: self.num_given]

    def in_steps(self, separator: str) -> "Conversation":
        """The conversation whose last message has a step after each separator in it."""
        found = re.finditer(f"(?:{re.escape(separator)})+(?=.)", self.messages[-1].text, re.DOTALL)
        return replace(self, borders=tuple(one.end() for one in found))


class Example(Struct, frozen=True, gc=False):
    """One row of a supervised dataset: the conversations that belong together."""

    conversations: tuple[Conversation, ...]
    values: tuple[float, ...] = (0.0,)
    """The margin by which the first one of a pair shall be better; of an answer that stands alone, 1 for each step that
    is right and 0 for others."""
    first: int = 0
    """Number of the first conversation, as an answer. Of pairs 0 is the chosen and 1 the rejected one."""


class Request(Struct, frozen=True, gc=False):
    """What an engine is asked for: continue `prompt_ids` until a stop token or the limit."""

    id: str
    prompt_ids: array  # 'i'
    max_new_tokens: int
    temperature: float
    """0 is greedy; logprobs are then those of temperature 1."""
    seed: int
    """64-bit. Token t of the answer, those begun included, is drawn from (seed, t): never from a stream, so neither
    batching nor placement changes it, nor where the answer was cut short. (vLLM draws from a stream for each request.)
    """
    order: tuple[int, ...] = ()
    """(ticket, answer, turn): requests that wait are admitted in this order."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the answer; the sampled stop token is kept as its last token."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; the token that completes one is kept as its last token."""
    num_begun: int = 0
    """The last so many of `prompt_ids` begin the answer, which was cut short: a stop string may begin in them."""
    top_k: int = 0
    """Draw among the so many most likely tokens alone; 0: among all. Greedy requests have no use for it."""
    top_p: float = 1.0
    """Of the tokens that `min_p` and `top_k` leave, draw among the fewest that have this share of their probability.
    Below 1 only with a `top_k`."""
    min_p: float = 0.0
    """Draw among the tokens that have this share of the most likely one's probability. Above 0 only with a `top_k`."""
    priority: float = 0.0
    """Requests with a higher one are admitted before, whatever their order."""

    @property
    def queue_key(self) -> tuple[float, tuple[int, ...]]:
        """Of requests that wait, the one with the least is next."""
        return -self.priority, self.order

    @property
    def begun(self) -> array:
        """The tokens ('i') that begin the answer."""
        return self.prompt_ids[len(self.prompt_ids) - self.num_begun :]

    @property
    def truncated(self) -> bool:
        """Whether tokens are cut off from the distribution: then logprobs are those of the renormalised rest."""
        return self.top_k > 0 and self.temperature > 0


class CandidateIds(Struct, frozen=True, gc=False):
    """The candidates that each sampled token was drawn from, where `top_k`, `top_p` or `min_p` cut off all others."""

    counts: array  # 'i', one per sampled token
    ids: array  # 'i', token ids, ascending for each sampled token, end to end

    def __add__(self, other: "CandidateIds") -> "CandidateIds":
        return CandidateIds(self.counts + other.counts, self.ids + other.ids)


class Completion(Struct, frozen=True, gc=False):
    """What an engine gives back, once per request, when it finishes or is aborted."""

    id: str
    token_ids: array  # 'i', without the prompt
    logprobs: array  # 'f', natural log, under the distribution that was drawn from: temperature, then candidates alone
    versions: array  # 'i', policy version that sampled each token
    finish_reason: FinishReason
    candidate_ids: CandidateIds | None = None
    """None: each token was drawn among all."""
    experts: array | None = None  # 'h', equally many for each of `token_ids`
    """Of a mixture: the experts that each sampled token went to when it was fed, layer by layer; -1 for the last token,
    which was not. None: not recorded."""


class Turn(Struct, frozen=True, gc=False):
    """One exchange of a rollout: the tokens put in front of the policy since the last turn, and what it answered."""

    prompt_ids: array  # 'i': tokens appended by us (turn 0: the rendered prompt); never trained on
    token_ids: array  # 'i': tokens the policy sampled, trained on
    logprobs: array  # 'f'
    versions: array  # 'i'
    finish_reason: FinishReason
    text: str = ""
    """The text of the sampled tokens, special ones left out; a stop string that ended the turn is part of it."""
    candidate_ids: CandidateIds | None = None
    """See `Completion.candidate_ids`."""
    step: "AgentStep | None" = None
    """What the environment made of the answer; None where there is none."""
    experts: array | None = None  # 'h'
    """See `Completion.experts`."""


class AgentStep(Struct, frozen=True, gc=False):
    """An environment's reply to one answer of an agent, as far as training, metrics and the sample log need it."""

    observation: str
    """The text that the environment returned."""
    reward: float
    """The reward of this step, penalties included."""
    state: int
    """64-bit hash of the state in which the answer was given, by which GiGPO finds equal states of a group."""
    action: str | None = None
    """What was handed to the environment; None where the answer held no action, or more than one."""
    metrics: Mapping[str, float] = msgspec.field(default_factory=dict)
    """`info["metrics"]` of the environment, such as `action_is_valid`."""
    board: str = ""
    """What people see of the world after the step, where that is not the observation."""


class AnswerInfo(Struct, frozen=True, gc=False):
    """What a rewarder may know of an answer beside its text."""

    num_tokens: int
    finish_reason: FinishReason
    turns: int = 1


class Verdict(Struct, frozen=True, gc=False):
    """A rewarder's word on one answer. A verdict that is not `ok` or `wrong_format` is *not* a zero reward."""

    status: VerdictStatus
    score: float = 0.0
    parts: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Named terms of the score, logged per domain."""
    detail: str = ""
    """Why, for `timeout`, `error`, `rejected` and `unsupported`: one line. A verdict with a score may have one too."""
    traceback: str = ""
    """Where the rewarder's code raised, for `error`: several lines."""
    answer: str = ""
    """The result that was judged, in one spelling for all that are the same: what answers vote for in `maj@k`. Empty
    where there is none, or none that could be the same twice."""

    @classmethod
    def of(cls, found: Any) -> "Verdict":
        """What a rewarder returned, as a verdict: a `Verdict`, a number, or a dict with `score`, whose other numbers
        become `parts`, and whose `answer` is the verdict's. TypeError for anything else."""
        if isinstance(found, cls):
            return found
        parts, answer = {}, ""
        if isinstance(found, Mapping) and "score" in found:
            answer = str(found.get("answer", ""))
            parts = {str(k): float(v) for k, v in found.items() if k != "score" and hasattr(v, "__float__")}
            found = found["score"]
        if not hasattr(found, "__float__"):  # numbers, bools, and those of NumPy and torch have it
            raise TypeError(f"score returned {type(found).__name__}, not a number, a dict with `score` or a Verdict")
        return cls("ok", float(found), parts, answer=answer)

    @property
    def scored(self) -> bool:
        """Whether `score` means anything."""
        return self.status in SCORED


class Sample(Struct, frozen=True, gc=False):
    """One finished rollout: all its turns and its verdict."""

    ticket: int
    answer: int
    turns: tuple[Turn, ...]
    verdict: Verdict
    greedy: bool = False
    """Drawn at temperature 0: a baseline for the others, never trained on."""
    unit: int | None = None
    """Samples of a ticket with the same number are trained on one data shard, in one micro-batch: a preferred answer
    and the one it is compared with, or the segments of one trajectory. None: `answer`, a unit of its own."""
    last: bool = True
    """False for all but the last segment of a trajectory whose turns do not continue each other; the last one stands
    for the trajectory in every count of answers and scores."""

    @property
    def key(self) -> tuple[int, int]:
        """The order of everything: (ticket, answer), never rank or arrival."""
        return (self.ticket, self.answer)

    @property
    def unit_number(self) -> int:
        """`unit`, or what stands for it."""
        return self.answer if self.unit is None else self.unit


class Group(Struct, frozen=True):
    """The samples of one prompt that are compared with each other, in answer order."""

    prompt: Prompt
    ticket: int
    samples: tuple[Sample, ...]


def concat(arrays: Sequence[array], typecode: str) -> array:
    """One array of all elements in order."""
    out = array(typecode)
    for part in arrays:
        out.extend(part)
    return out
