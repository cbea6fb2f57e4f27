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
    """The format of an action within an answer."""

    pattern: str
    """Regular expression that finds the action, which is its group."""
    template: str
    """Answer for `str.format` with an action, as demonstrations give it."""
    reminder: str = ""
    """Instruction that the policy reads about it."""


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
"""Named values of `env.<tag>.pattern`. A user's own pattern needs its own instruction."""
FIELDS = ("instruction", "suffix", "reminder", "history", "turn", "turns_left", "max_tokens", "observation")
"""Fields that a template may use"""


@dataclass
class EnvConfig:
    """Settings of one environment: `env.<tag>`."""

    target: str
    """Class of the environment as `module:Class`: one of `envs/`, or your own on PYTHONPATH (docs/ENVIRONMENTS.md)."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor."""
    eval_args: dict[str, Any] = field(default_factory=dict)
    """Arguments that replace these in held-out episodes, such as a separate split."""
    share: float = 1.0
    """Relative share of this environment among the groups of a step."""
    pattern: str | None = None
    """Format of the action in an answer: `action` (`<answer>...</answer>`), `think` (`<think>...</think>` before it),
    `tool` (`<tool_call>...</tool_call>`), `all` (the answer itself), or a regular expression with one group. An answer
    with no match, or several, holds none, and the environment gets an empty action. Default: `all` if the environment
    offers tools, whose calls it finds by itself, else `action`.
    """
    format_penalty: float = 0.0
    """Number added to the reward of a step whose action is missing or not valid: negative, or 0."""
    ineffective_penalty: float = 0.0
    """Number added to the reward of a step whose action is valid and changes nothing, such as a step into a wall:
    negative, or 0. Environments report it as `action_is_effective` in `info["metrics"]`.
    """
    system: str = "You are a helpful assistant and good at games. Your goal is to get the highest reward."
    """System message; if empty, none is sent."""
    template: str = "{instruction}\n{history}\n{observation}\n{suffix}\n{reminder}"
    """User message of the first turn. `{instruction}` and `{suffix}` come from the environment's reset, `{reminder}`
    explains the answer's format by `pattern`, `{history}` has the earlier turns of a prompt under `history`; `{turn}`,
    `{turns_left}` and `{max_tokens}` (of an answer) are numbers. Empty lines are left out.
    """
    next_template: str = "{observation}\n{reminder}"
    """User message of the later turns."""
    history: int | None = None
    """Number of earlier turns that a prompt shows. Each turn then has a newly built prompt, and is trained as a
    separate sample. By default an episode is one conversation, in which every turn continues the tokens of those before
    it.
    """
    workers: int = 1
    """Number of worker processes per node."""
    mode: str = "thread"
    """`thread`: a worker holds `envs_per_worker` environments, each in a thread. `process`: each environment has a
    separate process, for code that is not thread-safe, hangs or crashes.
    """
    envs_per_worker: int = 64
    """Environments that a worker holds at once; more wait until one ends."""
    reset_timeout: float = 60.0
    """Seconds that a reset may take."""
    step_timeout: float = 30.0
    """Seconds that a step may take."""
    episode_timeout: float = 1800.0
    """Seconds that an episode may take in all, the policy's time included."""
    start_seconds: float = 300.0
    """Seconds within which a worker must have imported the environment."""
    memory_mb: int | None = None
    """Memory, in MiB, that a worker may use; one that uses more ends, and its episodes are played again."""
    recycle_after: int | None = None
    """Episodes after which a worker is replaced by a fresh one, for environments that leak."""
    retries: int = 2
    """Number of times that an episode is restarted after its environment failed, hung or was lost."""
    on_error: str = "mask"
    """Treatment of an episode after its last retry. `mask`: it does not train and is in no baseline; `zero`: it ends
    there, with the reward so far; `raise`: the run ends.
    """
    sandbox: str = "auto"
    """Sandbox in which an environment runs untrusted code, see `reward.<domain>.sandbox`."""
    packages: list[str] = field(default_factory=list)
    """Installed packages that this code may import, see `reward.<domain>.packages`."""
    cpus: str | None = None
    """CPUs to which the workers are pinned, as `0-3,8`. Default: those that the run itself may use."""

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
        """Return `pattern`, or its default. `tools`: True if the environment offers some."""
        return self.pattern or ("all" if tools else "action")

    def penalties(self, action: str | None, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return by name the penalties that are added to the reward of an action. `metrics`: the environment's, for
        this step.
        """
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
    """All environments: `env`. In YAML the tags are siblings of the common keys."""

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the model's chat template: `env.chat_template_kwargs.enable_thinking=false`."""
    tags: dict[str, EnvConfig] = field(default_factory=dict, metadata={"inline": True})
    """Environments by tag: `env.<tag>.*`"""

    def __post_init__(self) -> None:
        shares = [env.share for env in self.tags.values()]
        require(not shares or any(shares), "share: at least one environment needs a share above 0")


@dataclass
class WarmupConfig:
    """Supervised steps before the first step of reinforcement, on demonstrations of the environments: `warmup`."""

    steps: int = 0
    """Optimizer steps on demonstrations, whose actions come from the environment's `solution()`. They count among
    `steps`.
    """
    episodes: int = 32
    """Demonstrations in each of these steps, all of different seeds."""

    lr: float | None = None
    """Learning rate of these steps. Default: `policy.lr`."""

    def __post_init__(self) -> None:
        at_least(self, steps=0, episodes=1)
        above(self, lr=0)
