"""Prompts and who judges their answers: `data`, `reward`."""

import re
from dataclasses import dataclass, field
from os.path import expanduser
from typing import Any

from spmd_rl.config.values import above, at_least, one_of, require, within

CPUS = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")
SANDBOXES = ("auto", "bwrap", "forkserver", "none")


@dataclass
class DataConfig:
    """Prompts. See docs/DATA.md for row schema and rules."""

    train: str = "reasoning_gym:chain_sum"
    """A JSONL file, a comma-separated list of them, or `reasoning_gym:<task>`."""
    eval: str | None = None
    """The same, for held-out prompts. Default: the held-out share of `train`."""
    holdout: float = 0.25
    """Share of the content hashes that is held out when `eval` is not given."""
    size: int = 1000
    """Rows generated before duplicates are dropped (reasoning_gym only)."""
    seed: int = 0
    """Generator seed (reasoning_gym only)."""
    args: dict[str, Any] = field(default_factory=dict)
    """Generator parameters (reasoning_gym only)."""
    domains: dict[str, str] = field(default_factory=dict)
    """Other names for the rows' domains or ROLL's tags: `{deepmath_103k: math, RLVR: general}`."""
    mix: dict[str, float] = field(default_factory=dict)
    """Relative shares of the domains among training prompts: `{math: 0.4, code: 0.3, general: 0.3}`. Exact: of the
    first n tickets each domain has its share to within one. Default: as they come."""
    format: str = "{question}"
    """The user message; `{question}` stands for the problem's text. Rows with `messages` are taken as they are."""
    system: str | None = None
    """A system message in front of every prompt that brings none."""

    def __post_init__(self) -> None:
        self.train = expand_list(self.train)
        self.eval = self.eval and expand_list(self.eval)
        above(self, holdout=0)
        require(self.holdout < 1, f"holdout: must be less than 1, not {self.holdout}")
        at_least(self, size=1)
        for domain, share in self.mix.items():
            require(0 <= share < float("inf"), f"mix.{domain}: must be at least 0, not {share}")
        require(not self.mix or any(self.mix.values()), "mix: one share must be above 0")
        require("{question}" in self.format, f"format: must contain {{question}}, is {self.format!r}")


@dataclass
class RewardConfig:
    """One domain's rewarder: `reward.<domain>`."""

    target: str
    """`module:Class`, importable; your own file on PYTHONPATH is as good as one of ours."""
    args: dict[str, Any] = field(default_factory=dict)
    """Constructor arguments."""
    workers: int = 1
    """Processes per node."""
    cpus: str | None = None
    """Processors of a node that these processes keep to, as `0-3,8`: a slow domain cannot crowd out another, nor the
    ranks. Default: those that the run itself may use."""
    timeout: float = 10.0
    """Seconds until a score becomes a `timeout` verdict."""
    sandbox: str = "auto"
    """Where a rewarder that runs code from answers runs it: `bwrap` (bubblewrap), `forkserver` (needs root), `auto`
    (the first of these that works here; if none does, the run does not start), or `none`: no isolation at all."""

    def __post_init__(self) -> None:
        module, _, name = self.target.partition(":")
        require(bool(module and name), f"target: must be module:Class, not {self.target!r}")
        at_least(self, workers=1)
        above(self, timeout=0)
        one_of(self, sandbox=SANDBOXES)
        require(self.cpus is None or bool(CPUS.fullmatch(self.cpus)), f"cpus: must be like 0-3,8, not {self.cpus!r}")

    @property
    def cpu_numbers(self) -> list[int]:
        """The processors that `cpus` names."""
        ends = [list(map(int, part.split("-"))) for part in self.cpus.split(",")] if self.cpus else []
        return sorted({number for first, *last in ends for number in range(first, (last or [first])[0] + 1)})


@dataclass
class RewardsConfig:
    """Section `reward`: in YAML `error_budget` stands beside the domains; the loader sorts them into this."""

    error_budget: float = 0.1
    """Share of a step's answers whose verdict may be no score before the run stops and says why."""
    domains: dict[str, RewardConfig] = field(default_factory=dict, metadata={"inline": "<domain>"})
    """`reward.<domain>.*`"""

    def __post_init__(self) -> None:
        within(self, error_budget=(0, 1))


def expand_list(paths: str) -> str:
    """`~` expanded in each path of a comma-separated list."""
    return ",".join(expanduser(path.strip()) for path in paths.split(","))
