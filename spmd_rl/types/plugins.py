"""What plug-ins are and what they are given: rewarders, environments, the sandbox and other services of a sidecar."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from msgspec import Struct

from spmd_rl.types.data import AnswerInfo, Prompt, Verdict


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

    It may offer `unsupported(prompt)`, why a row cannot be judged, whatever the answer, or an empty text: such rows are
    left out of a run.

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


LostReason = Literal["timeout", "error", "lost"]
"""Why a session is over before its episode is: a deadline has passed; the environment raised an exception or returned
what is no reply; or its worker, its host or its lease is gone."""


class EnvReply(Struct, frozen=True, gc=False):
    """What an environment returned, from `reset` (without reward) or `step`."""

    observation: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = {}
    """Plain JSON values, see `Environment`."""

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return self.terminated or self.truncated


class SessionLost(Exception):
    """Raised by a session whose environment failed before its episode was over; the trajectory can be played again."""

    def __init__(self, reason: LostReason, detail: str, traceback: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        """One line."""
        self.traceback = traceback
        """The traceback of the environment's own code, if it raised."""


class Session(Protocol):
    """One episode of an environment, wherever it runs."""

    reply: EnvReply
    """What `reset` or the last step returned. `info["exhausted"]`: a finite set of tasks has come to its end."""

    async def step(self, action: str) -> EnvReply:
        """Act. SessionLost if the environment fails, hangs or is gone; from then on each step raises it."""
        ...

    async def close(self) -> None:
        """End the episode, which makes room for another. May be called twice; never raises."""
        ...


class Environment(Protocol):
    """A plain class of a user's own, with Gymnasium's five-tuple over strings. See `envs/` for examples.

    `reset(seed)` makes the same world for the same seed in every process; nothing touches a global generator. What
    `info` may hold, plain JSON values all:

    * at reset: `instruction`, the rules, which stand before the first observation; `tools`, a list of functions in
      OpenAI's schema, whose calls are then the actions; `suffix`, shown with the observation once and not kept;
    * at each step: `metrics` by name (`success`, `action_is_valid`, `action_is_effective`), and `metrics_agg_mode`, how
      each becomes one number of the episode (`mean`, `last`, `sum`, `max`; default `mean`);
    * at each step too: `role`, of the message that shows the observation (default: `tool` where there are tools, else
      `user`);
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

    def solution(self) -> list[str] | None:
        """Return actions that lead to the goal from here; None where there are none. Optional: for demonstrations."""
        ...


RunEnd = Literal["exit", "signal", "cpu", "wall", "output"]
"""How untrusted code ended: by itself, by a signal, or over its limit of processor time, wall time or output. `wall`
ends what sleeps; what works is ended by `cpu`."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """What one run in a `Sandbox` may use. Hard: the kernel keeps them, whatever the code does."""

    cpu_seconds: int = 4
    """Processor time of each process."""
    wall_seconds: float = 9.0
    """For which it may sleep. What uses the processor may take five times that, on a machine that has other work."""
    memory_bytes: int = 512 << 20
    """Address space of each process beyond the interpreter's own."""
    disk_bytes: int = 16 << 20
    """All files together, in memory and gone after the run; 0: no file can be written."""
    processes: int = 1
    """1: no other can be started (up to 64 threads can). More: so many, threads included, each with its own memory."""
    output_bytes: int = 16 << 20
    """The limit for stdout, and for stderr."""
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
    cpu_seconds: float = 0.0
    """Processor time, of all its processes that have ended before it."""
    is_text: bool = True
    """A mark that stdout is UTF-8. Other bytes are U+FFFD in it."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """How tests went that were run against untrusted code."""

    end: RunEnd
    """Of the untrusted code; `exit` too if it was still there when the tests were through, `wall` without a verdict."""
    passed: tuple[bool, ...]
    """One for each test, one for each source of code that did not load; empty if the tests did not end in time, or are
    not supported."""
    detail: str = ""
    """Why the first failing test failed: one line."""
    unsupported: str = ""
    """What the tests need, by their text, that no plain value can do; the same for every code."""


class Sandbox(Protocol):
    """Where untrusted Python runs: a system of its own without host files, network, environment or other processes.

    RuntimeError from a method means that the sandbox or the tests failed, which says nothing about the code: whatever
    the code does is a failed test or run. All methods block. See `sandbox/` for what is kept out and how.
    """

    def use(self, python: str) -> None:
        """Run code with another interpreter from now on, given by path or name. RuntimeError if it cannot be used."""
        ...

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
        unproven: bool = False,
    ) -> CheckResult:
        """Run tests, which the code cannot see, against the names that it defines.

        `tests`: sources, each a script or a file of pytest or unittest; a script is one test. A name that they do not
        define, or import `from solution`, is the code's. They run in a process of their own, which gets plain values
        alone from the code; a test that wants more of it has failed. `prelude`: trusted source that both run first.
        `entry`: a name that is the code's although the prelude or a builtin has it too. A source that asks the code
        nothing is a RuntimeError. `unproven`: the tests run beside the code, which can make of them what it likes.
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


class Environments(Protocol):
    """What the rollout needs of the sidecar where answers are actions: sessions, without blocking."""

    outstanding: int
    """The number of resets and steps whose reply is not there yet."""

    async def reset(self, tag: str, seed: int, held_out: bool = False, solve: bool = False) -> Session:
        """Begin an episode of `env.<tag>`, which may wait until another ends. SessionLost if that fails.

        held_out: with its `eval_args`. solve: each reply has what the environment's `solution()` returns, actions that
        lead to the goal from there or None, as `info["solution"]`.
        """
        ...


class Scorer(Protocol):
    """What the rollout needs of the sidecar: judge one answer, without blocking."""

    async def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Never raises for a sample's or a sidecar's failure: those come back as verdicts."""
        ...
