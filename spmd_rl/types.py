"""The data vocabulary: what passes between stages, from a dataset row to a judged answer.

Frozen `msgspec` structs, which are made ten times as fast as frozen dataclasses: they come in thousands. Nothing that
they hold can lead back to them, so the search for cycles leaves them out (`gc=False`). Nothing of torch, so that
rewards, environments and sidecars can import them. Ids and floats are `array`s. Tensors live in `batch.py`.

    Prompt -> Request -> Completion -> Turn (AgentStep) -> Sample -> Group
                                        `-> AnswerInfo -> Verdict
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
from msgspec import Struct

FinishReason = Literal["stop", "length", "abort"]
"""`stop`: an end-of-sequence token or a stop string came; `length`: the token limit was reached; `abort`: given up."""

VerdictStatus = Literal["ok", "wrong_format", "timeout", "error", "rejected"]
"""Only `ok` and `wrong_format` carry a score; the others take the sample out of its group's baseline."""

MISSING_PACKAGE = "missing_package"
"""A verdict's part of that name says that the answer failed for want of a package, which `detail` names."""

SUSPECT = "suspect"
"""A verdict's part of that name says that a paid answer looks like a cheat; `detail` says why."""

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


class Message(Struct, frozen=True, gc=False):
    """One chat message, as chat templates know it."""

    role: str
    content: str | tuple[TextPart | ImagePart, ...]

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


class Request(Struct, frozen=True, gc=False):
    """What an engine is asked for: continue `prompt_ids` until a stop token or the limit."""

    id: str
    prompt_ids: array  # 'i'
    max_new_tokens: int
    temperature: float
    """0 is greedy; logprobs are then those of temperature 1."""
    seed: int
    """64-bit. Token t is drawn from (seed, t): never from a stream, so neither batching nor placement changes it."""
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

    @property
    def truncated(self) -> bool:
        """Whether tokens are cut off from the distribution: then logprobs are those of the renormalised rest."""
        return self.top_k > 0 and self.temperature > 0


class Survivors(Struct, frozen=True, gc=False):
    """Among which tokens each sampled token was drawn, where `top_k`, `top_p` or `min_p` cut off all others."""

    counts: array  # 'i', one per sampled token
    ids: array  # 'i', token ids, ascending for each sampled token, end to end

    def __add__(self, other: "Survivors") -> "Survivors":
        return Survivors(self.counts + other.counts, self.ids + other.ids)


class Completion(Struct, frozen=True, gc=False):
    """What an engine gives back, once per request, when it finishes or is aborted."""

    id: str
    token_ids: array  # 'i', without the prompt
    logprobs: array  # 'f', natural log, under the distribution that was drawn from: temperature, then survivors alone
    versions: array  # 'i', policy version that sampled each token
    finish_reason: FinishReason
    survivors: Survivors | None = None
    """None: each token was drawn among all."""


class Turn(Struct, frozen=True, gc=False):
    """One exchange of a rollout: the tokens put in front of the policy since the last turn, and what it answered."""

    prompt_ids: array  # 'i': tokens appended by us (turn 0: the rendered prompt); never trained on
    token_ids: array  # 'i': tokens the policy sampled, trained on
    logprobs: array  # 'f'
    versions: array  # 'i'
    finish_reason: FinishReason
    text: str = ""
    """What the sampled tokens say, special ones left out; a stop string that ended the turn is part of it."""
    survivors: Survivors | None = None
    """See `Completion.survivors`."""
    step: "AgentStep | None" = None
    """What the environment made of the answer; None where there is none."""


class AgentStep(Struct, frozen=True, gc=False):
    """An environment's reply to one answer of an agent, as far as training, metrics and the sample log need it."""

    observation: str
    """The text that the environment returned."""
    reward: float
    """Of this step, penalties included."""
    state: int
    """64-bit hash of the state in which the answer was given, by which GiGPO finds equal states of a group."""
    action: str | None = None
    """What was handed to the environment; None where the answer held no action, or more than one."""
    metrics: Mapping[str, float] = msgspec.field(default_factory=dict)
    """`info["metrics"]` of the environment, such as `action_is_valid`."""


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
    """Why, for `timeout`, `error` and `rejected`: one line. A verdict with a score may have one too."""
    traceback: str = ""
    """Where the rewarder's code raised, for `error`: several lines."""

    @classmethod
    def of(cls, found: Any) -> "Verdict":
        """What a rewarder returned, as a verdict: a `Verdict`, a number, or a dict with `score`, whose other numbers
        become `parts`. TypeError for anything else."""
        if isinstance(found, cls):
            return found
        parts = {}
        if isinstance(found, Mapping) and "score" in found:
            parts = {str(k): float(v) for k, v in found.items() if k != "score" and hasattr(v, "__float__")}
            found = found["score"]
        if not hasattr(found, "__float__"):  # numbers, bools, and those of NumPy and torch have it
            raise TypeError(f"score returned {type(found).__name__}, not a number, a dict with `score` or a Verdict")
        return cls("ok", float(found), parts)

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


@dataclass(frozen=True, slots=True)
class Node:
    """Where a rank lives, as a sidecar client needs to know it."""

    rank: int
    local_rank: int
    address: str
    """ZMQ address of this node's sidecar host, the same on every rank of the node."""


class Rewarder(Protocol):
    """A plain class of a user's own; `async def score` is as good, and so is a plain function in place of the class
    (`reward_function.py`). `score` may also return a number, or a dict with `score`. See `rewards/` for examples.

    It may offer `cheats(prompt)`, which yields (name, answer) pairs that solve nothing, and `gold(prompt)`, the right
    answer: an audit scores both. `suspect(prompt, answer)` returns what makes a paid answer look like a cheat, or an
    empty text; a run counts these.

    It may offer `score_batch(prompts, answers, infos)` for up to `max_batch` answers at once, and `start()`, where it
    loads what is heavy: called once where it will work, whereas the settings' checks construct it too.
    """

    def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Judge one answer. An exception becomes an `error` verdict, never a zero."""
        ...

    @classmethod
    def examples(cls) -> Iterable[tuple[Prompt, str, float]]:
        """Gold and wrong answers with the score each must get; a test runs them."""
        ...


class Environment(Protocol):
    """A plain class of a user's own, with Gymnasium's five-tuple over strings. See `envs/` for examples.

    `reset(seed)` makes the same world for the same seed in every process; nothing touches a global generator. What
    `info` may hold, plain JSON values all:

    * at reset: `instruction`, the rules, which stand before the first observation; `tools`, a list of functions in
      OpenAI's schema, whose calls are then the actions; `suffix`, shown with the observation once and not kept;
    * at each step: `metrics` by name (`success`, `action_is_valid`, `action_is_effective`), and `metrics_agg_mode`, how
      each becomes one number of the episode (`mean`, `last`, `sum`, `max`; default `mean`);
    * at both: `state_key`, equal for equal states (default: the observation), and `board`, a text for people alone.
    """

    def reset(self, seed: int) -> tuple[str | None, dict[str, Any]]:
        """Begin an episode: (observation, info). An observation of None: a finite set of tasks has come to its end."""
        ...

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Act: (observation, reward, terminated, truncated, info). An empty action stands for an answer without one,
        which is never valid. An exception costs this trajectory alone."""
        ...

    def close(self) -> None:
        """Give up what the environment holds; may be called twice. Optional."""
        ...


RunEnd = Literal["exit", "signal", "cpu", "wall", "output"]
"""How untrusted code ended: by itself, by a signal, or over its limit of processor time, wall time or output."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """What one run in a `Sandbox` may use. Hard: the kernel keeps them, whatever the code does."""

    cpu_seconds: int = 4
    """Processor time of each process."""
    wall_seconds: float = 9.0
    memory_bytes: int = 512 << 20
    """Address space of each process beyond the interpreter's own."""
    disk_bytes: int = 16 << 20
    """All files together, in memory and gone after the run; 0: no file can be written."""
    processes: int = 1
    """1: no other can be started (up to 64 threads can). More: so many, threads included, each with its own memory."""
    output_bytes: int = 16 << 20
    """Of stdout and of stderr."""
    message_bytes: int = 64 << 20
    """What a call of the code may give to its tests, as JSON. More is a failed test."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """How one run of untrusted code went."""

    end: RunEnd
    code: int
    """Exit status if it ended by `exit`, signal number if by `signal`, else 0."""
    stdout: str
    stderr: str
    seconds: float
    """Wall time."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """How tests went that were run against untrusted code."""

    end: RunEnd
    """Of the untrusted code; `exit` too if it was still there when the tests were through, `wall` without a verdict."""
    passed: tuple[bool, ...]
    """One for each test, one for each source of code that did not load; empty if the tests did not end in time."""
    detail: str = ""
    """Why the first failing test failed: one line."""


class Sandbox(Protocol):
    """Where untrusted Python runs: a system of its own without host files, network, environment or other processes.

    RuntimeError from a method means that the sandbox or the tests failed, which says nothing about the code: whatever
    the code does is a failed test or run. Both methods block. See `sandbox/` for what is kept out and how.
    """

    def run(self, code: str, stdin: str = "", limits: RunLimits = ...) -> RunResult:
        """Run a program. What it printed is its own word; compare it with what it could not see."""
        ...

    def check(
        self,
        code: str,
        tests: Sequence[str],
        prelude: str = "",
        entry: str = "",
        limits: RunLimits = ...,
        partial: bool = True,
    ) -> CheckResult:
        """Run tests, which the code cannot see, against the names that it defines.

        `tests`: sources, each a script or a file of pytest or unittest; a script is one test. A name that they do not
        define, or import `from solution`, is the code's. They run in a process of their own, which gets plain values
        alone from the code. A source that needs more runs beside the code several times, in some of them falsified,
        which the code must fail. `prelude`: trusted source that both run first. `entry`: a name that is the code's
        although the prelude or a builtin has it too. A source that asks the code nothing is a RuntimeError. Without
        `partial`, tests beside one that failed may count as failed, which takes less time.
        """
        ...


class Http(Protocol):
    """JSON over HTTP, for a rewarder's `async def score`: the constructor parameter `http`."""

    async def post(self, url: str, body: Any, headers: Mapping[str, str] = ...) -> Any:
        """The reply's JSON. Repeated, with growing pauses, where the server is not there or too busy (429, 5xx).

        TimeoutError: no reply in time. ConnectionError: none after all attempts. ValueError: the server refused the
        request (another status), or its reply is too long or no JSON.
        """
        ...


class Scorer(Protocol):
    """What the rollout needs of the sidecar: judge one answer, without blocking."""

    async def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Never raises for a sample's or a sidecar's failure: those come back as verdicts."""
        ...


def concat(arrays: Sequence[array], typecode: str) -> array:
    """One array of all elements in order."""
    out = array(typecode)
    for part in arrays:
        out.extend(part)
    return out
