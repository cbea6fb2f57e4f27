"""Prompts and the rewarders of their answers: `data`, `reward`."""

import re
import shlex
from dataclasses import dataclass, field
from functools import reduce
from glob import glob, has_magic
from os.path import expanduser
from typing import Any, ClassVar

from spmd_rl.base.errors import UserError
from spmd_rl.base.hub import hub_dataset
from spmd_rl.config.values import above, at_least, check_fields, numbers_in, one_of, require, within

MOST_CPUS = 10_000
DEVICES = re.compile(r"cpu|[\w.:/-]+(,[\w.:/-]+)*")
GENERATORS = "reasoning_gym:"
SHAPES = "shapes:"
"""Prefixes of generated sources of prompts"""
PROBLEM_KEYS = "question", "prompt", "messages", "problem"
COMMON = "tools", "images"
ROW_KEYS = (*PROBLEM_KEYS, "ground_truth", "answer", "solution", "domain", "id", "priority", *COMMON)
SANDBOXES = ("auto", "bwrap", "forkserver", "none")


NO_DATA = (
    "data.train: no dataset is given; to see a small model learn {what}, set +experiment={demo}; for {rows} of your "
    "own, set {line} (docs/{page})"
)


@dataclass
class SourcesConfig:
    """Rows of any pipeline and their conversion to messages."""

    known_keys: ClassVar[tuple[str, ...]] = ()
    no_data: ClassVar[str] = ""
    """Error message of settings without data"""
    needs_rewarder: ClassVar[bool] = True

    train: str | None = None
    """Training rows: files (JSON lines, a JSON array, either with gzip, or parquet; `*` matches any), a Hugging Face
    dataset (`openai/gsm8k:main:train`), `reasoning_gym:<task>`, or a comma-separated list of these."""
    eval: str | None = None
    """Held-out rows in the form of `train`. Default: the held-out share of `train`."""
    holdout: float = 0.25
    """Share of `train` to hold out, by content hash, without `eval`. 0: train on all, evaluate none; 1: evaluate all.
    """
    size: int = 1000
    """Number of rows to generate, duplicates included (reasoning_gym only)."""
    seed: int = 0
    """Seed of the generator (reasoning_gym only)."""
    args: dict[str, Any] = field(default_factory=dict)
    """Parameters of the task (reasoning_gym only)."""
    keys: dict[str, str | None] = field(default_factory=dict)
    """Columns of the rows by their names here: `data.keys.question=problem data.keys.answer=result`. A dot reaches into
    a column; null: not in the rows (`data.keys.ground_truth=null`, for rewards without)."""
    pictures: str | None = None
    """Folder of the pictures whose files rows name; no row may read outside it. Default: that of the rows' file."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the model's chat template: `data.chat_template_kwargs.enable_thinking=false`."""
    format: str = "{question}"
    """Template of the user message; `{question}` is the row's text. Unused by rows with `messages`."""
    system: str | None = None
    """System message for every prompt without one."""

    def __post_init__(self) -> None:
        self.train = expand_list(self.train) if self.train else None
        self.eval = expand_list(self.eval) if self.eval else None
        within(self, holdout=(0, 1))
        at_least(self, size=1)
        for name in self.keys:
            require(
                name in self.known_keys, f"keys.{name}: rows have no such field; known: {', '.join(self.known_keys)}"
            )
        require("{question}" in self.format, f"format: must contain {{question}}, is {self.format!r}")
        check_fields(self, format=("question",))


@dataclass
class DataConfig(SourcesConfig):
    """The prompts of a run: `data`. docs/DATA.md has the row schema and the rules."""

    known_keys = ROW_KEYS
    no_data = NO_DATA.format(
        what="sums",
        demo="demo",
        rows="math problems",
        line="data=jsonl_math data.train=rows.jsonl",
        page="DATA.md",
    )

    overlong: str = "drop"
    """Treatment of prompts beyond `rollout.max_prompt_tokens`: `drop` (with their number printed) or `error`."""
    domains: dict[str, str] = field(default_factory=dict)
    """Map from rows' domains (or ROLL's tags) to other domains: `{deepmath_103k: math, RLVR: general}`."""
    mix: dict[str, float] = field(default_factory=dict)
    """Relative shares of the domains among training prompts: `{math: 0.4, code: 0.3, general: 0.3}`, exact to within
    one prompt at any time. A domain with 0 is only evaluated. Default: prompts in given order."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, overlong=("drop", "error"))
        for domain, share in self.mix.items():
            require(0 <= share < float("inf"), f"mix.{domain}: must be at least 0, not {share}")
        require(not self.mix or any(self.mix.values()), "mix: one share must be above 0")


@dataclass
class RewardConfig:
    """The rewarder of one domain: `reward.<domain>`."""

    target: str
    """Rewarder class as `module:Class`, or function as `module:function`: from `rewards/`, or yours on PYTHONPATH
    (docs/REWARDS.md)."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the constructor, or of each call of the function."""
    workers: int = 1
    """Number of worker processes per node."""
    cpus: str | None = None
    """CPUs of the workers, as `0-3,8`, so that a slow domain takes no time from others or ranks. Default: those of the
    run."""
    timeout: float = 50.0
    """Seconds after which an answer without a score gets the verdict `timeout`. For hanging code: keep it far above the
    rewarder's own limits, so that a busy machine decides nothing."""
    start_seconds: float = 300.0
    """Seconds for a worker to build the rewarder, and for the domain's server to answer."""
    devices: str | None = None
    """Devices on which each node starts a server for this domain, such as a local judge: `"2,3"`, as in
    CUDA_VISIBLE_DEVICES and free of ranks, or `cpu`. The rewarder's `url` is then its address with `/v1`. Default: no
    server."""
    server: str = "vllm serve {model} --host 127.0.0.1 --port {port} --tensor-parallel-size {num_devices}"
    """Command of the server, run without a shell; it answers at `/health` once up. `{model}` is `args.model`, `{port}`
    a free port, `{num_devices}` the number of `devices`."""
    sandbox: str = "auto"
    """Sandbox for the code of answers: `forkserver` (needs root), `bwrap` (bubblewrap), `auto` (the first that works;
    the run does not start without one), or `none` (no isolation)."""
    packages: list[str] = field(default_factory=list)
    """Packages that answers' code may import, with their dependencies, read-only: `[numpy, sympy]`. Default: the
    standard library."""

    def __post_init__(self) -> None:
        module, _, name = self.target.partition(":")
        require(bool(module and name), f"target: must be module:Class, not {self.target!r}")
        at_least(self, workers=1)
        above(self, timeout=0, start_seconds=0)
        one_of(self, sandbox=SANDBOXES)
        cpu_numbers(self.cpus)
        if self.devices is not None:
            require(bool(DEVICES.fullmatch(self.devices)), f"devices: must be like 2,3 or cpu, not {self.devices!r}")
            require(
                "url" not in self.args,
                "devices: starts a server for this domain, but args.url names another; set only one of them",
            )
            has_model = "{model}" not in self.server or "model" in self.args
            require(has_model, "server: {model} is replaced by args.model, which is not given")
            require("{port}" in self.server, "server: must contain {port}")
            check_fields(self, server=("model", "port", "num_devices"))
            split_command(self.server)

    @property
    def server_command(self) -> list[str]:
        """Words of `server`, with `{port}` unfilled; empty without `devices`."""
        if self.devices is None:
            return []
        known = {"{model}": str(self.args.get("model")), "{num_devices}": str(self.devices.count(",") + 1)}
        return [
            reduce(lambda word, name: word.replace(name, known[name]), known, word)
            for word in split_command(self.server)
        ]

    @property
    def cpu_numbers(self) -> list[int]:
        """CPU numbers of `cpus`; empty without it."""
        return cpu_numbers(self.cpus)


@dataclass
class RewardsConfig:
    """The rewarders: `reward`. In YAML the domains are siblings of `error_budget`."""

    error_budget: float = 0.1
    """Share of a step's answers that may lack a score before the run stops with the reasons."""
    domains: dict[str, RewardConfig] = field(default_factory=dict, metadata={"inline": True})
    """Rewarders by domain: `reward.<domain>.*`"""

    def __post_init__(self) -> None:
        within(self, error_budget=(0, 1))


def cpu_numbers(cpus: str | None) -> list[int]:
    """Return the ascending CPU numbers of a text such as `0-3,8` (None: none); UserError for another text."""
    return [] if cpus is None else numbers_in("cpus", cpus, MOST_CPUS, "CPU", "like 0-3,8")


def split_command(server: str) -> list[str]:
    """Split a command as a shell does; UserError for an unbalanced quote."""
    try:
        return shlex.split(server)
    except ValueError as error:
        raise UserError(f"server: {error}: {server!r}") from None


def sources(source: str | None) -> list[str]:
    """Return the distinct parts of `data.train` or `data.eval`, with patterns expanded."""
    parts = [part.strip() for part in source.split(",")] if source else []
    found = [name for part in parts for name in (sorted(glob(part)) if has_magic(part) else []) or [part]]
    return list(dict.fromkeys(found))


def files(source: str | None) -> list[str]:
    """Return the files of `data.train` or `data.eval`."""
    return [name for name in sources(source) if not name.startswith((GENERATORS, SHAPES)) and not hub_dataset(name)]


def expand_list(paths: str) -> str:
    """Expand `~` in each path of a comma-separated list."""
    return ",".join(expanduser(path.strip()) for path in paths.split(","))
