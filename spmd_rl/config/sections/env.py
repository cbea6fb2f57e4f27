"""The environments of an agent: `env`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spmd_rl.base.errors import UserError
from spmd_rl.config.sections.data import SANDBOXES, cpu_numbers
from spmd_rl.config.values import above, at_least, check_fields, one_of, require

MODES = ("process", "thread")
ON_ERROR = ("mask", "zero", "raise")


class ActionFormat(NamedTuple):
    """Format of an action within an answer."""

    pattern: str
    """Regular expression whose group is the action"""
    template: str
    """Template of an answer, for demonstrations"""
    reminder: str = ""
    """Instruction to the policy about the format"""


ACTION_FORMATS = {
    "action": ActionFormat(
        r"<answer>(.*?)</answer>",
        "<answer>{}</answer>",
        "Answer with one action: <answer>ACTION</answer>, and nothing else.",
    ),
    "think": ActionFormat(
        r"\A\s*<think>.*?</think>\s*<answer>(.*?)</answer>\s*\Z",
        "<think>\n</think>\n<answer>{}</answer>",
        "Think first, then give one action: <think>THOUGHTS</think><answer>ACTION</answer>",
    ),
    "tool": ActionFormat(
        r"<tool_call>(.*?)</tool_call>",
        "<tool_call>{}</tool_call>",
        'Call a tool: <tool_call>{"name": NAME, "arguments": {...}}</tool_call>',
    ),
    "all": ActionFormat(r"\A(.*)\Z", "{}"),
}
"""Named values of `env.<tag>.pattern`."""
FIELDS = ("instruction", "suffix", "reminder", "history", "turn", "turns_left", "max_tokens", "observation")


@dataclass
class EnvConfig:
    """Settings of one environment: `env.<tag>`."""

    target: str
    """Environment class as `module:Class`, from `envs/` or yours on PYTHONPATH (docs/ENVIRONMENTS.md)."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor."""
    eval_args: dict[str, Any] = field(default_factory=dict)
    """Arguments that replace these in held-out episodes, as another split."""
    share: float = 1.0
    """Relative share of a step's groups."""
    pattern: str | None = None
    """Format of an action: `action` (`<answer>...</answer>`), `think` (`<think>...</think>` before it), `tool`
    (`<tool_call>...</tool_call>`), `all` (the answer itself), or a regular expression with one group. Without exactly
    one match the action is empty. Default: `all` if the environment offers tools, else `action`."""
    format_penalty: float = 0.0
    """Number, at most 0, added to a step's reward if its action is missing or not valid."""
    ineffective_penalty: float = 0.0
    """Number, at most 0, added to a step's reward if its action is valid but changes nothing (`action_is_effective` in
    the environment's `info["metrics"]`), as a step into a wall."""
    system: str = "You are a helpful assistant and good at games. Your goal is to get the highest reward."
    """System message; none if empty."""
    template: str = "{instruction}\n{history}\n{observation}\n{suffix}\n{reminder}"
    """First user message. `{instruction}` and `{suffix}` come from the environment's reset, `{reminder}` explains
    `pattern`, `{history}` has earlier turns; `{turn}`, `{turns_left}` and `{max_tokens}` (of an answer) are numbers.
    Empty lines are left out."""
    next_template: str = "{observation}\n{reminder}"
    """User message of the later turns."""
    history: int | None = None
    """Number of earlier turns in a prompt: every turn is then a sample with its own prompt. Default: an episode is one
    conversation whose turns continue each other's tokens."""
    workers: int = 1
    """Number of worker processes per node."""
    mode: str = "thread"
    """`thread`: a worker has `envs_per_worker` environments in threads. `process`: one process each, for code that is
    not thread-safe, hangs or crashes."""
    envs_per_worker: int = 64
    """Environments in a worker at once; more wait."""
    reset_timeout: float = 60.0
    """Seconds that a reset may take."""
    step_timeout: float = 30.0
    """Seconds that a step may take."""
    episode_timeout: float = 1800.0
    """Seconds that an episode may take, the policy's time included."""
    start_seconds: float = 300.0
    """Seconds for a worker to import the environment."""
    memory_mb: int | None = None
    """Memory limit of a worker in MiB; beyond it the worker ends, and its episodes are played again."""
    recycle_after: int | None = None
    """Episodes after which a worker is replaced, for environments that leak."""
    retries: int = 2
    """Restarts of an episode after its environment failed, hung or was lost."""
    on_error: str = "mask"
    """Treatment of an episode after its last retry: `mask` (it is in no loss or baseline), `zero` (it ends with the
    reward so far) or `raise` (the run ends)."""
    sandbox: str = "auto"
    """Sandbox for untrusted code, see `reward.<domain>.sandbox`."""
    packages: list[str] = field(default_factory=list)
    """Packages that untrusted code may import, see `reward.<domain>.packages`."""
    cpus: str | None = None
    """CPUs of the workers, as `0-3,8`. Default: those of the run."""

    def __post_init__(self) -> None:
        module, _, name = self.target.partition(":")
        require(bool(module and name), f"target: must be module:Class, not {self.target!r}")
        at_least(self, share=0, workers=1, envs_per_worker=1, memory_mb=16, recycle_after=1, retries=0, history=0)
        above(self, reset_timeout=0, step_timeout=0, episode_timeout=0, start_seconds=0)
        one_of(self, mode=MODES, on_error=ON_ERROR, sandbox=SANDBOXES)
        cpu_numbers(self.cpus)
        for name in ("format_penalty", "ineffective_penalty"):
            value = getattr(self, name)
            require(value <= 0, f"{name}: is added to the reward; must not be above 0, not {value}")
        for name in ("template", "next_template"):
            require("{observation}" in getattr(self, name), f"{name}: must contain {{observation}}")
        check_fields(self, template=FIELDS, next_template=FIELDS)
        if self.pattern is not None and self.pattern not in ACTION_FORMATS:
            try:
                groups = re.compile(self.pattern).groups
            except re.error as error:
                raise UserError(f"pattern: {self.pattern!r} is not a regular expression: {error}") from None
            known = ", ".join(ACTION_FORMATS)
            require(
                groups == 1,
                f"pattern: must be one of {known}, or a regular expression with one group, not {self.pattern!r}",
            )

    def pattern_for(self, tools: bool) -> str:
        """Return `pattern` or its default. tools: the environment offers some."""
        return self.pattern or ("all" if tools else "action")

    def penalties(self, action: str | None, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the penalties of an action by name. metrics: the environment's, for this step."""
        valid, effective = bool(action and metrics.get("action_is_valid", 1)), metrics.get("action_is_effective", 1)
        return {
            "format_penalty": 0.0 if valid else self.format_penalty,
            "ineffective_penalty": self.ineffective_penalty if valid and not effective else 0.0,
        }

    @property
    def cpu_numbers(self) -> list[int]:
        """CPU numbers of `cpus`; empty without it."""
        return cpu_numbers(self.cpus)


@dataclass
class EnvsConfig:
    """All environments: `env`. In YAML tags are siblings of common keys."""

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the model's chat template: `env.chat_template_kwargs.enable_thinking=false`."""
    tags: dict[str, EnvConfig] = field(default_factory=dict, metadata={"inline": True})
    """Environments by tag: `env.<tag>.*`"""

    def __post_init__(self) -> None:
        shares = [env.share for env in self.tags.values()]
        require(not shares or any(shares), "share: at least one environment needs a share above 0")


@dataclass
class WarmupConfig:
    """Supervised steps on demonstrations before reinforcement: `warmup`."""

    steps: int = 0
    """Updates on demonstrations by the environment's `solution()`; counted in `steps`."""
    episodes: int = 32
    """Demonstrations per such step, all of different seeds."""

    lr: float | None = None
    """Learning rate of the warm-up. Default: `policy.lr`."""

    def __post_init__(self) -> None:
        at_least(self, steps=0, episodes=1)
        above(self, lr=0)
