"""Interfaces of plug-ins and of their sidecar services: rewarders, environments, the sandbox, HTTP."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from msgspec import Struct

from spmd_rl.types.data import AnswerInfo, Prompt, Verdict


@dataclass(frozen=True, slots=True)
class Node:
    """A rank's position on its node."""

    rank: int
    local_rank: int
    address: str


class Rewarder(Protocol):
    """A user's plain class. `score` may be `async`, and a plain function may replace the class (`reward_function.py`).

    `score` may also return a number, or a dict with `score`. See `rewards/` for examples. Optional methods:

    * `cheats(prompt)` yields (name, answer) pairs that solve nothing and `gold(prompt)` returns the right answer; an
      audit scores both. `suspect(prompt, answer)` returns why a paid answer looks like a cheat, or an empty text.
    * `unsupported(prompt)` returns why no answer to a row can be judged, or an empty text. A run skips such rows.
    * `score_batch(prompts, answers, infos)` scores up to `max_batch` answers at once.
    * `start()` loads what is heavy. It runs only in the process that scores, unlike the constructor.
    """

    def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Judge one answer. An exception becomes an `error` verdict, not a zero."""
        ...

    @classmethod
    def examples(cls) -> Iterable[tuple[Prompt, str, float]]:
        """Gold and wrong answers with their expected scores, for a test."""
        ...


LostReason = Literal["timeout", "error", "lost"]
"""Reasons of a lost session: a deadline passed; the environment raised or returned no valid reply; its worker, host or
lease is gone.
"""


class EnvReply(Struct, frozen=True, gc=False):
    """Return value of an environment's `reset` (without reward) or `step`."""

    observation: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = {}
    pictures: tuple[bytes, ...] = ()

    @property
    def done(self) -> bool:
        """True if the episode is over."""
        return self.terminated or self.truncated


class SessionLost(Exception):
    """Failure of an environment within an episode, which can be played again."""

    def __init__(self, reason: LostReason, detail: str, traceback: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.traceback = traceback


class Session(Protocol):
    """One episode of an environment."""

    reply: EnvReply
    """Latest reply. `info["exhausted"]`: a finite set of tasks is used up."""

    async def step(self, action: str) -> EnvReply:
        """Act. SessionLost, from then on in each step, if the environment fails, hangs or is gone."""
        ...

    async def close(self) -> None:
        """End the episode and free its place; idempotent, never raises."""
        ...


class Environment(Protocol):
    """A user's plain class with Gymnasium's five-tuple over strings. See `envs/` for examples.

    `reset(seed)` makes the same world for the same seed in every process and leaves global generators alone. `info` may
    hold these plain JSON values:

    * at reset: `instruction`, the rules, shown before the first observation; `tools`, functions in OpenAI's schema,
      whose calls are then the actions; `suffix`, shown once with the observation and not kept;
    * at each step: `metrics` by name (`success`, `action_is_valid`, `action_is_effective`), and `metrics_agg_mode`, the
      aggregation of each over the episode (`mean`, `last`, `sum`, `max`; default `mean`); `role` of the message with
      the observation (default: `tool` if there are tools, else `user`);
    * at both: `state_key`, equal for equal states (default: the observation), `board`, a text for people, and
      `pictures` of the observation: the bytes of files, or arrays of 8-bit RGB, [height, width, 3], shown at `<image>`
      in the observation, else before it.
    """

    def reset(self, seed: int) -> tuple[str | None, dict[str, Any]]:
        """Begin an episode: (observation, info). An observation of None: a finite set of tasks is used up."""
        ...

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Act: (observation, reward, terminated, truncated, info).

        An empty action: the answer held no valid one. An exception ends this trajectory alone.
        """
        ...

    def close(self) -> None:
        """Free resources; may be called twice. Optional."""
        ...

    def solution(self) -> list[str] | None:
        """Return actions that lead to the goal, or None. Optional: for demonstrations."""
        ...


RunEnd = Literal["exit", "signal", "cpu", "wall", "output"]
"""Ends of untrusted code: by itself, by a signal, or over its limit of processor time, wall time or output. `wall` ends
code that sleeps; `cpu` code that computes.
"""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Limits of one run in a `Sandbox`, enforced by the kernel."""

    cpu_seconds: int = 4
    """Processor time of each process."""
    wall_seconds: float = 9.0
    """Time that the code may sleep. Code that computes may take five times as long, for a machine under load."""
    memory_bytes: int = 512 << 20
    """Address space beyond the interpreter's."""
    disk_bytes: int = 16 << 20
    """Size of all files, which are in memory; 0: none can be written."""
    processes: int = 1
    """Processes, threads included, each with its own memory. 1: no second process, but up to 64 threads."""
    output_bytes: int = 16 << 20
    """Limit of stdout, and of stderr, each."""
    message_bytes: int = 64 << 20
    """JSON size of a return value to the tests. A larger one fails the test."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of one run of untrusted code."""

    end: RunEnd
    code: int
    """Exit status after `exit`, signal number after `signal`, else 0."""
    stdout: str
    stderr: str
    seconds: float
    cpu_seconds: float = 0.0
    is_text: bool = True
    """True if stdout is UTF-8; other bytes are U+FFFD."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of tests of untrusted code."""

    end: RunEnd
    """`exit` too if the code outlived the tests; `wall` if there is no verdict."""
    passed: tuple[bool, ...]
    """Outcome of each test, or of each source that did not load. Empty if the tests timed out or are unsupported."""
    detail: str = ""
    unsupported: str = ""
    """Feature of the tests that no plain value can provide; the same for every code."""


class Sandbox(Protocol):
    """An isolated system for untrusted Python, without host files, network, environment or other processes.

    RuntimeError from a method: the sandbox or the tests failed, not the code, whose failures are failed tests or runs.
    All methods block. See `sandbox/` for the isolation.
    """

    def use(self, python: str) -> None:
        """Run code with another interpreter from now on, by path or name. RuntimeError if unusable."""
        ...

    def run(self, code: str, stdin: str = "", limits: RunLimits = ...) -> RunResult:
        """Run a program. Its output is unproven; compare it with values that the program could not see."""
        ...

    def check(
        self,
        code: str,
        tests: Sequence[str],
        prelude: str = "",
        entry: str = "",
        limits: RunLimits = ...,
        unproven: bool = False,
    ) -> CheckResult:
        """Run tests, hidden from the code, against the names that it defines.

        `tests`: sources, each a script (one test) or a file of pytest or unittest. Names that they neither define nor
        import from elsewhere than `solution` are the code's. They run in a separate process, which gets only plain
        values from the code; a test that needs more fails. `prelude`: trusted source that both run first. `entry`: a
        name that is the code's even if the prelude or a builtin has it too. RuntimeError for a source that uses nothing
        of the code. `unproven`: run the tests in the code's process, where it can forge their outcome.
        """
        ...


class Http(Protocol):
    """JSON over HTTP, for a rewarder's `async def score`: the constructor parameter `http`."""

    async def post(self, url: str, body: Any, headers: Mapping[str, str] = ...) -> Any:
        """Return the reply's JSON. Retries, with growing pauses, while the server is unreachable or busy (429, 5xx).

        TimeoutError: no reply in time. ConnectionError: none after all attempts. ValueError: the server refused the
        request, or its reply is too long or not JSON.
        """
        ...


class Environments(Protocol):
    """Non-blocking sessions with the sidecar's environments."""

    outstanding: int

    async def reset(self, tag: str, seed: int, held_out: bool = False, solve: bool = False) -> Session:
        """Begin an episode of `env.<tag>`; may wait for a free place. SessionLost if that fails.

        held_out: use `eval_args`. solve: add `solution()` to each reply as `info["solution"]`.
        """
        ...


class Scorer(Protocol):
    """Non-blocking judgement of answers by the sidecar."""

    async def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Judge one answer. Failures of the sample or the sidecar are verdicts."""
        ...
