"""The data vocabulary, from a dataset row to a judged answer: frozen `msgspec` structs, torch-free.

Ids and floats are `array`s. Tensors live in `batch.py`.

    Prompt -> Request -> Completion -> Turn (AgentStep) -> Sample -> Group
                                        `-> AnswerInfo -> Verdict
"""

import json
import re
from array import array
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

FinishReason = Literal["stop", "length", "abort"]
"""`stop`: an end-of-sequence token or a stop string; `length`: the token limit; `abort`: given up."""

VerdictStatus = Literal["ok", "wrong_format", "timeout", "error", "rejected", "unsupported"]
"""Only `ok` and `wrong_format` carry a score; the others exclude the sample from its baseline."""

MISSING_PACKAGE = "missing_package"
"""Verdict part of an answer that failed for want of a package, named in `detail`."""

UNPROVEN = "unproven"
"""Verdict part of an answer that could have made the verdict itself."""

SUSPECT = "suspect"
"""Verdict part of a paid answer that is a likely cheat; `detail` says why."""

SPEAKER_FIELDS = ("name", "tool_call_id", "tools")
"""Message fields outside of the speaker's text."""

PICTURE = "<image>"

SCORED: frozenset[str] = frozenset({"ok", "wrong_format"})


# msgspec makes frozen structs ten times as fast as frozen dataclasses, and they come in thousands. None of them can be
# part of a reference cycle, so `gc=False` keeps them out of the collector's scans.
class TextPart(Struct, frozen=True, gc=False, tag="text"):
    """Text as one part of a message."""

    text: str


class ImagePart(Struct, frozen=True, gc=False, tag="image"):
    """An image as one part of a message: encoded bytes, or a file's path on every rank."""

    media_type: str
    data: bytes = b""
    path: str = ""

    @classmethod
    def of(cls, data: bytes) -> "ImagePart":
        """Return the part of an encoded PNG, GIF or JPEG."""
        kinds = {b"\x89PNG": "image/png", b"GIF8": "image/gif"}
        return cls(kinds.get(data[:4], "image/jpeg"), data)

    @property
    def url(self) -> str:
        """`data:` URL of the bytes."""
        return f"data:{self.media_type};base64,{b64encode(self.data).decode()}"


class Message(Struct, frozen=True, gc=False, omit_defaults=True):
    """One chat message, as chat templates take it."""

    role: str
    content: str | tuple[TextPart | ImagePart, ...]
    fields: str = ""
    """JSON object with its other fields for the chat template. The first message has the conversation's `tools`."""
    is_learnt: bool = True
    """False for an answer that is not trained on (`weight: 0`)."""

    @property
    def others(self) -> dict[str, Any]:
        """Fields other than role and content."""
        return json.loads(self.fields) if self.fields else {}

    def with_fields(self, fields: Mapping[str, Any]) -> "Message":
        """Return the message with other fields."""
        text = json.dumps(fields, ensure_ascii=False) if fields else ""
        return replace(self, fields=text)

    def saying(self, content: str) -> "Message":
        """Return a message of the same speaker with this content alone."""
        about = {name: value for name, value in self.others.items() if name in SPEAKER_FIELDS}
        # Tool calls and reasoning belong to the old content.
        return replace(self, content=content).with_fields(about)

    @property
    def text(self) -> str:
        """Joined text of all parts. ValueError for an image."""
        if isinstance(self.content, str):
            return self.content
        if any(isinstance(part, ImagePart) for part in self.content):
            raise ValueError("a message with an image is not text alone")
        return "".join([part.text for part in self.content])

    @property
    def plain_text(self) -> str:
        """Text of all parts, `<image>` for pictures."""
        if isinstance(self.content, str):
            return self.content
        return "".join([part.text if isinstance(part, TextPart) else PICTURE for part in self.content])

    @property
    def pictures(self) -> tuple[ImagePart, ...]:
        """Pictures among the parts, in order."""
        parts = () if isinstance(self.content, str) else self.content
        return tuple(part for part in parts if isinstance(part, ImagePart))

    @property
    def openai_content(self) -> str | list[dict[str, Any]]:
        """Content in OpenAI's form: a text, or parts with pictures as `data:` URLs."""
        if isinstance(self.content, str):
            return self.content
        return [
            {"type": "text", "text": part.text}
            if isinstance(part, TextPart)
            else {"type": "image_url", "image_url": {"url": part.url}}
            for part in self.content
        ]


class Prompt(Struct, frozen=True):
    """One problem of a dataset. Example: `Prompt("9f..", (Message("user", "2+2?"),), "math", "4")`."""

    id: str
    """32 hex digits: blake2b-128 of the normalised content (`data.prompts.content_id`), or the row's `id`."""
    messages: tuple[Message, ...]
    domain: str
    """Name of the rewarder: `reward.<domain>`."""
    ground_truth: str
    extra: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Other values of the row (plain JSON), passed to the rewarder."""
    priority: float = 0.0
    """Higher values are generated first."""
    where: str = ""
    """Source of its row, for error messages."""

    @property
    def pictures(self) -> tuple[ImagePart, ...]:
        """Pictures of all messages, in order."""
        return tuple(part for message in self.messages for part in message.pictures)


class Conversation(Struct, frozen=True, gc=False):
    """A conversation, or a text and its context. Only the assistant's messages are trained on."""

    messages: tuple[Message, ...]
    num_given: int = 0
    """Number of leading messages that form the prompt and are never trained on."""
    is_plain: bool = False
    """True for texts without a chat template."""
    borders: tuple[int, ...] = ()
    """Character offsets of the second and later steps in the last message."""

    @property
    def prompt(self) -> tuple[Message, ...]:
        """Leading messages that form the prompt."""
        return self.messages[: self.num_given]

    def in_steps(self, separator: str) -> "Conversation":
        """Set a step boundary after each separator in the last message."""
        found = re.finditer(f"(?:{re.escape(separator)})+(?=.)", self.messages[-1].text, re.DOTALL)
        return replace(self, borders=tuple(one.end() for one in found))


class Example(Struct, frozen=True, gc=False):
    """One row of a supervised dataset."""

    conversations: tuple[Conversation, ...]
    values: tuple[float, ...] = (0.0,)
    """Margin of a pair; for a single answer, 1 or 0 for each right or wrong step."""
    first: int = 0
    """Answer number of the first conversation: in pairs, 0 is chosen and 1 rejected."""


class Request(Struct, frozen=True, gc=False):
    """A generation request: continue `prompt_ids` until a stop token or the limit."""

    id: str
    prompt_ids: array  # 'i'
    max_new_tokens: int
    temperature: float
    """0 is greedy, with the logprobs of temperature 1."""
    seed: int
    """64-bit seed. Token t of the answer, counted from its first partial token, is drawn from (seed, t), so that
    neither batching, placement nor interruptions change it. (vLLM draws from a stream for each request.)
    """
    order: tuple[int, ...] = ()
    """(ticket, answer, turn), the order of admission."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the answer; the sampled one is kept."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; the completing token is kept."""
    num_begun: int = 0
    """Number of trailing `prompt_ids` that belong to the interrupted answer; a stop string may begin in them."""
    top_k: int = 0
    """Most likely tokens to draw from; 0: all. Ignored if greedy."""
    top_p: float = 1.0
    """After `min_p` and `top_k`, draw from the fewest tokens that reach this probability. Below 1 only with `top_k`."""
    min_p: float = 0.0
    """Least probability relative to the most likely token. Above 0 only with `top_k`."""
    priority: float = 0.0
    """Compared before `order`; higher is earlier."""
    cache: str = ""
    """Only requests with the same name share a prefix cache."""
    pictures: tuple[bytes, ...] = ()
    """Encoded pictures of `prompt_ids`, in order (`types.pictures`)."""

    @property
    def queue_key(self) -> tuple[float, tuple[int, ...]]:
        """Sort key of admission, ascending."""
        return -self.priority, self.order

    @property
    def begun(self) -> array:
        """Tokens ('i') of the interrupted answer."""
        return self.prompt_ids[len(self.prompt_ids) - self.num_begun :]

    @property
    def truncated(self) -> bool:
        """True if candidates are cut off; logprobs are then renormalised."""
        return self.top_k > 0 and self.temperature > 0


class CandidateIds(Struct, frozen=True, gc=False):
    """The candidates of each sampled token after `top_k`, `top_p` or `min_p`."""

    counts: array  # 'i', one per sampled token
    ids: array  # 'i', token ids, ascending for each sampled token, end to end

    def __add__(self, other: "CandidateIds") -> "CandidateIds":
        return CandidateIds(self.counts + other.counts, self.ids + other.ids)


class Completion(Struct, frozen=True, gc=False):
    """An engine's reply to a request that finished or was aborted."""

    id: str
    token_ids: array  # 'i', without the prompt
    logprobs: array  # 'f', natural log, under the distribution that was drawn from: temperature, then candidates alone
    versions: array  # 'i', policy version that sampled each token
    finish_reason: FinishReason
    candidate_ids: CandidateIds | None = None
    """None: the whole vocabulary."""
    experts: array | None = None  # 'h', equally many for each of `token_ids`
    """Experts of a mixture, layer by layer, to which each sampled token was routed; -1 for the last token, which was
    never fed. None: not recorded.
    """


class Turn(Struct, frozen=True, gc=False):
    """One exchange of a rollout: tokens added to the context, and the policy's answer."""

    prompt_ids: array  # 'i': tokens appended by us (turn 0: the rendered prompt); never trained on
    token_ids: array  # 'i': tokens the policy sampled, trained on
    logprobs: array  # 'f'
    versions: array  # 'i'
    finish_reason: FinishReason
    text: str = ""
    """Sampled text without special tokens; includes a stop string."""
    candidate_ids: CandidateIds | None = None
    step: "AgentStep | None" = None
    experts: array | None = None  # 'h'
    pictures: tuple[bytes, ...] = ()


class AgentStep(Struct, frozen=True, gc=False):
    """An environment's reply to one answer, for training, metrics and the sample log."""

    observation: str
    reward: float
    state: int
    """64-bit hash of the state before the answer, for GiGPO."""
    action: str | None = None
    """None without exactly one in the answer."""
    metrics: Mapping[str, float] = msgspec.field(default_factory=dict)
    board: str = ""
    """View of the world for people, if it differs from the observation."""


class AnswerInfo(Struct, frozen=True, gc=False):
    """Facts about an answer for its rewarder."""

    num_tokens: int
    finish_reason: FinishReason
    turns: int = 1


class Verdict(Struct, frozen=True, gc=False):
    """A rewarder's judgement of one answer. A status other than `ok` and `wrong_format` is *not* a zero reward."""

    status: VerdictStatus
    score: float = 0.0
    parts: Mapping[str, float] = msgspec.field(default_factory=dict)
    detail: str = ""
    """One-line reason of a status without a score; else optional."""
    traceback: str = ""
    answer: str = ""
    """Normalised result, on which answers vote in `maj@k`; empty without one, or if it cannot occur twice."""

    @classmethod
    def of(cls, found: Any) -> "Verdict":
        """Convert a rewarder's return value: a `Verdict`, a number, or a dict with `score`.

        A dict's other numbers become `parts`, its `answer` the verdict's. TypeError for anything else.
        """
        if isinstance(found, cls):
            return found
        parts, answer = {}, ""
        if isinstance(found, Mapping) and "score" in found:
            answer = str(found.get("answer", ""))
            parts = {str(k): float(v) for k, v in found.items() if k != "score" and hasattr(v, "__float__")}
            found = found["score"]
        # Numbers, bools and the scalars of NumPy and torch all have it.
        if not hasattr(found, "__float__"):
            raise TypeError(f"score returned {type(found).__name__}, not a number, a dict with `score` or a Verdict")
        return cls("ok", float(found), parts, answer=answer)

    @property
    def scored(self) -> bool:
        """True if `score` is meaningful."""
        return self.status in SCORED


class Sample(Struct, frozen=True, gc=False):
    """One finished rollout: its turns and verdict."""

    ticket: int
    answer: int
    turns: tuple[Turn, ...]
    verdict: Verdict
    greedy: bool = False
    """True for a baseline drawn at temperature 0, never trained on."""
    unit: int | None = None
    """Number shared by samples of a ticket that train in one micro-batch of one data shard: a preference pair, or the
    segments of one trajectory. None: the sample's `answer`.
    """
    last: bool = True
    """False for a trajectory's segments before the last, which counts as its answer and score."""
    targets: tuple[float, ...] = ()
    """Numbers of a written row for its loss: the reference's logprob in nats, a margin, or a label for each turn."""

    @property
    def key(self) -> tuple[int, int]:
        """Sort key (ticket, answer), independent of rank."""
        return (self.ticket, self.answer)

    @property
    def unit_number(self) -> int:
        """`unit`, by default the sample's `answer`."""
        return self.answer if self.unit is None else self.unit


class Group(Struct, frozen=True):
    """The samples of one prompt, in answer order."""

    prompt: Prompt
    ticket: int
    samples: tuple[Sample, ...]


def concat(arrays: Sequence[array], typecode: str) -> array:
    """Return one array of all elements."""
    out = array(typecode)
    for part in arrays:
        out.extend(part)
    return out


_FIELD = re.compile(
    r"\\(?!n\b)[a-zA-Z]+(?:\[[^][]*\])?(?:\{[^{}]*\})+"  # \frac{a}{b}, but not a line break (\n) before a field
    r"|\b\w_\{[^{}]*\}|\^\{[^{}]*\}"  # x_{i}, 2^{n}
    r"|(\{\s*[^\W\d]\w*(?:[.\[!:][^{}\s]*)?\s*\})"
)


def unknown_fields(template: str, known: Sequence[str]) -> list[str]:
    """Return each field `{name}` of a template that is not among the `known` names, with braces, once.

    Other braces, LaTeX's included, are plain text.
    """
    found = dict.fromkeys(match[1] for match in _FIELD.finditer(template) if match[1])
    return [field for field in found if field[1:-1] not in known]
