"""The run: `run`, `publish`, `checkpoint`, `track`, `journal` and `sidecar`."""

from dataclasses import dataclass, field
from os.path import expanduser
from pathlib import Path

from spmd_rl.base.curve_keys import check_bind, check_connect, on_loopback
from spmd_rl.config.values import above, at_least, one_of, require


@dataclass
class RunConfig:
    """Name and directory of a run: `run`."""

    name: str | None = None
    """Name of the run. Default: model, algorithm and a hash of all settings that change samples or gradients, so that
    the same command resumes."""
    dir: str | None = None
    """Run directory, shared by all nodes. Default: `runs/<pipeline>/<run.name>`."""
    until: int | None = None
    """Step after which this start saves and ends; schedules still go to `steps`. Default: `steps`."""

    def __post_init__(self) -> None:
        fits = self.name is None or is_name(self.name)
        require(fits, f"name: must be a name and not a path, not {self.name!r}; run.dir says where")
        at_least(self, until=1)


def is_name(name: str) -> bool:
    """Return True if `name` can name a folder within another."""
    return Path(name).name == name and name.isprintable()


@dataclass
class PublishConfig:
    """Transfer of trained weights to the engine, after every step."""

    probe_every: int | None = None
    """Steps between probes, in which the trainer checks the engine's logprobs of a few answers; bytes are compared at
    every publish. 0: only the first publish after a start, always probed. Default: 1; with `placement.mode=split`,
    where a probe delays training, `eval.every`."""

    def __post_init__(self) -> None:
        if self.probe_every is not None:
            at_least(self, probe_every=0)


@dataclass
class CheckpointConfig:
    """Writing and resuming checkpoints: `checkpoint`."""

    every: int = 50
    """Steps between checkpoints; the last step is always saved. 0: only that."""
    keep: int = 2
    """Number of newest checkpoints kept."""
    overlap: bool = False
    """Write checkpoints during the next step, from copies in host memory. They count when that step ends; the last one,
    and `hf/`, are written at once."""
    export_hf: bool = False
    """Add Hugging Face format to each checkpoint, as `hf/`; the last one always has it."""
    resume: str = "auto"
    """`auto`: continue from a checkpoint in `run.dir`. `never`: refuse a directory with a run. Or a checkpoint's path:
    another run's to begin from, or this run's to go back to."""

    def __post_init__(self) -> None:
        self.resume = expanduser(self.resume)
        at_least(self, every=0, keep=1)

    @property
    def is_given(self) -> bool:
        """True if `resume` is the path of a checkpoint."""
        return self.resume not in ("auto", "never")


@dataclass
class DeviceSpecConfig:
    """Peak rate of one device: `track.device`."""

    flops: float | None = None
    """Peak floating-point operations per second of a device in `policy.dtype`, for `system/efficiency`. Default: the
    data sheet's, for known devices in bfloat16."""

    def __post_init__(self) -> None:
        above(self, flops=0)


@dataclass
class TrackConfig:
    """Experiment trackers besides the run directory's files: `track`."""

    wandb: str = "off"
    """Weights & Biases: `off`, `offline` (no account needed) or `online`."""
    tensorboard: bool = False
    """Write TensorBoard events into `run.dir/tensorboard`."""
    swanlab: str = "off"
    """SwanLab: `off`, `offline` (no account needed) or `cloud`."""
    trackio: bool = False
    """Log to trackio: here, or as `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL` says."""
    device: DeviceSpecConfig = field(default_factory=DeviceSpecConfig)

    def __post_init__(self) -> None:
        one_of(self, wandb=("off", "offline", "online"), swanlab=("off", "offline", "cloud"))

    @property
    def chosen(self) -> list[str]:
        """Names of chosen trackers, equal to their packages'."""
        names = ("wandb", "tensorboard", "swanlab", "trackio")
        return [name for name in names if getattr(self, name) not in ("off", False)]


MOST_RANKS = 100_000
"""Largest number of ranks to plan, since a placement enumerates them"""


@dataclass
class PlanConfig:
    """Assumptions of `--plan`, without effect on runs: `plan`."""

    ranks: int | None = None
    """Ranks to plan for, also in `--dry-run`. Default: those that torchrun starts."""
    rank: int | None = None
    """Rank whose memory is counted. Default: the first, or the last pipeline stage's first."""
    device: str = "cuda"
    """Device type, on which kernels and buffers depend: `cuda` or `cpu`."""
    device_gb: float = 80.0
    """Memory of a device in 10^9 bytes."""
    reserve_gb: float = 6.0
    """Memory reserved for what is not counted: driver context, buffers of collectives, workspaces, fragmentation."""
    shape: str | None = None
    """Directory with the `config.json` of `policy.model`, or a name in `configs/shapes`, to plan without a download."""

    def __post_init__(self) -> None:
        one_of(self, device=("cuda", "cpu"))
        above(self, device_gb=0)
        at_least(self, reserve_gb=0)
        at_least(self, ranks=1, rank=0)
        require((self.ranks or 0) <= MOST_RANKS, f"ranks: must be at most {MOST_RANKS}, not {self.ranks}")


@dataclass
class JournalConfig:
    """Stall detection, and hashes of what ranks compute: `journal`."""

    stall_seconds: float = 300.0
    """Seconds without progress of any rank until all dump their stacks and the job ends."""

    start_seconds: float = 3600.0
    """Seconds without progress for the start of models, engines and sidecars, or a compilation."""

    hashes: bool = False
    """Write hashes of each step's samples, gradients and weights into `run.dir/journal`, for `python -m spmd_rl
    bisect`. About 10 bytes a token and 200 a tensor."""

    def __post_init__(self) -> None:
        above(self, stall_seconds=0, start_seconds=0)


@dataclass
class SidecarConfig:
    """Addresses and clients of sidecar hosts: `sidecar`."""

    bind: str = "ipc"
    """Address of the hosts. `ipc`: a socket in a private directory. `tcp://127.0.0.1:PORT`: loopback.
    `tcp://ADDRESS:PORT` (`*`: all addresses): for a status from elsewhere; needs `keys`."""
    keys: str | None = None
    """Directory of CURVE keys (`python -m spmd_rl sidecar_keys DIR`), for encrypted traffic with the clients in
    `DIR/allowed`. Default: none; only this machine is served."""
    hosts: list[str] = field(default_factory=list)
    """Hosts without ranks (`python -m spmd_rl sidecar --bind ...`), as `tcp://HOST:PORT`, that share verdicts and
    environments. Beyond loopback only with `keys`."""

    def __post_init__(self) -> None:
        self.keys = self.keys and expanduser(self.keys)
        check_bind(self.bind, keyed=self.keys is not None)
        for address in self.hosts:
            check_connect("hosts", address)
            require(self.keys or on_loopback(address), f"hosts: {address}: beyond this machine it needs sidecar.keys")
