"""Prompts and who judges their answers: `data`, `reward`."""

import re
import shlex
from dataclasses import dataclass, field
from functools import reduce
from os.path import expanduser
from typing import Any

from spmd_rl.config.values import above, at_least, one_of, require, within
from spmd_rl.errors import UserError

CPUS = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")
DEVICES = re.compile(r"cpu|[\w.:/-]+(,[\w.:/-]+)*")
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
    start_seconds: float = 300.0
    """Seconds until a process must have built the rewarder, and until the domain's own server must answer."""
    devices: str | None = None
    """Devices on which each node's sidecar host starts a server of this domain's own, as a local judge needs one:
    named as in CUDA_VISIBLE_DEVICES (`"2,3"`; leave them free of ranks), or `cpu`. The rewarder's `url` is then the
    server's address with `/v1`. Default: no server."""
    server: str = "vllm serve {model} --host 127.0.0.1 --port {port} --tensor-parallel-size {num_devices}"
    """That server's command, without a shell: anything that answers at `/health` once it is up. `{model}` stands for
    `args.model`, `{port}` for a free port, `{num_devices}` for the number of `devices`."""
    sandbox: str = "auto"
    """Where a rewarder that runs code from answers runs it: `bwrap` (bubblewrap), `forkserver` (needs root), `auto`
    (the first of these that works here; if none does, the run does not start), or `none`: no isolation at all."""

    def __post_init__(self) -> None:
        module, _, name = self.target.partition(":")
        require(bool(module and name), f"target: must be module:Class, not {self.target!r}")
        at_least(self, workers=1)
        above(self, timeout=0, start_seconds=0)
        one_of(self, sandbox=SANDBOXES)
        require(self.cpus is None or bool(CPUS.fullmatch(self.cpus)), f"cpus: must be like 0-3,8, not {self.cpus!r}")

        if self.devices is not None:
            require(bool(DEVICES.fullmatch(self.devices)), f"devices: must be like 2,3 or cpu, not {self.devices!r}")
            require("url" not in self.args, "devices: start a server of the domain's own, but args.url names another")
            has_model = "{model}" not in self.server or "model" in self.args
            require(has_model, "server: {model} stands for args.model, which is not given")
            require("{port}" in self.server, "server: must contain {port}")
            words(self.server)

    @property
    def server_command(self) -> list[str]:
        """The words of `server`, with the port still open; none without `devices`."""
        if self.devices is None:
            return []
        known = {"{model}": str(self.args.get("model")), "{num_devices}": str(self.devices.count(",") + 1)}
        return [reduce(lambda word, name: word.replace(name, known[name]), known, word) for word in words(self.server)]

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


def words(server: str) -> list[str]:
    """Of a command, as a shell would split it. UserError for a quotation mark without its other."""
    try:
        return shlex.split(server)
    except ValueError as error:
        raise UserError(f"server: {error}: {server!r}") from None


def expand_list(paths: str) -> str:
    """`~` expanded in each path of a comma-separated list."""
    return ",".join(expanduser(path.strip()) for path in paths.split(","))
