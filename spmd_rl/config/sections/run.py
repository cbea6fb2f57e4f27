"""The run itself: `run`, `publish`, `checkpoint`, `track`, `journal` and `sidecar`."""

from dataclasses import dataclass, field
from os.path import expanduser
from pathlib import Path

from spmd_rl.base.curve_keys import check_bind, check_connect, on_loopback
from spmd_rl.config.values import above, at_least, one_of, require


@dataclass
class RunConfig:
    """The name and the directory of a run: `run`."""

    name: str | None = None
    """Name of the run. Default: model, algorithm and a hash of all settings that change samples or gradients, so that
    the same command resumes its run.
    """
    dir: str | None = None
    """Run directory; all nodes must share it. Default: `runs/<pipeline>/<run.name>`."""
    until: int | None = None
    """Step after which this start ends and saves, while schedules go to `steps`. Default: `steps`."""

    def __post_init__(self) -> None:
        fits = self.name is None or is_name(self.name)
        require(fits, f"name: must be a name and not a path, not {self.name!r}; run.dir says where")
        at_least(self, until=1)


def is_name(name: str) -> bool:
    """Return True if a name can be that of a folder within another."""
    return Path(name).name == name and name.isprintable()


@dataclass
class PublishConfig:
    """Transfer of the trained weights to the engine, after every step."""

    probe_every: int | None = None
    """Steps between probes, in which the engine answers a few prompts and the trainer checks its logprobs. 0: only the
    first publish after a start, which is always probed. Bytes are compared in every publish. Default: 1; with
    `placement.mode=split`, whose training waits for the answers, `eval.every`, when it waits anyway.
    """

    def __post_init__(self) -> None:
        if self.probe_every is not None:
            at_least(self, probe_every=0)


@dataclass
class CheckpointConfig:
    """Writing and resuming of checkpoints: `checkpoint`."""

    every: int = 50
    """Steps between checkpoints; 0 saves only after the last step, which is always saved."""
    keep: int = 2
    """Number of newest checkpoints to keep."""
    overlap: bool = False
    """Write checkpoints while the next step runs, from copies of each saved tensor in host memory. A checkpoint is
    complete, and counts, when that step ends; the last one is written at once. `hf/` is never delayed.
    """
    export_hf: bool = False
    """Write each checkpoint also in Hugging Face format, as `hf/`; the last checkpoint always has it."""
    resume: str = "auto"
    """`auto`: continue if `run.dir` holds a checkpoint. `never`: refuse a directory that holds a run. Or the path of a
    checkpoint: one of another run to begin from it, one of this run to go back to it.
    """

    def __post_init__(self) -> None:
        self.resume = expanduser(self.resume)
        at_least(self, every=0, keep=1)

    @property
    def is_given(self) -> bool:
        """True if `resume` is the path of a checkpoint."""
        return self.resume not in ("auto", "never")


@dataclass
class DeviceSpecConfig:
    """The peak rate of one device: `track.device`."""

    flops: float | None = None
    """Floating-point operations per second of a device at its peak in `policy.dtype`, for `system/efficiency`. Default:
    those of the data sheet, if the device is known and the dtype is bfloat16.
    """

    def __post_init__(self) -> None:
        above(self, flops=0)


@dataclass
class TrackConfig:
    """Experiment trackers in addition to the files of the run directory: `track`."""

    wandb: str = "off"
    """Log to Weights & Biases: `off`, `offline` (which needs no account) or `online`."""
    tensorboard: bool = False
    """Write TensorBoard event files into `run.dir/tensorboard`."""
    swanlab: str = "off"
    """Log to SwanLab: `off`, `offline` (no account needed) or `cloud`."""
    trackio: bool = False
    """Log to trackio: on this machine, or where `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL` says."""
    device: DeviceSpecConfig = field(default_factory=DeviceSpecConfig)

    def __post_init__(self) -> None:
        one_of(self, wandb=("off", "offline", "online"), swanlab=("off", "offline", "cloud"))

    @property
    def chosen(self) -> list[str]:
        """Names of the chosen trackers, which are those of their packages."""
        names = ("wandb", "tensorboard", "swanlab", "trackio")
        return [name for name in names if getattr(self, name) not in ("off", False)]


MOST_RANKS = 100_000
"""Largest number of ranks that can be planned: a placement enumerates them."""


@dataclass
class PlanConfig:
    """Assumptions of `--plan`, without effect on a run: `plan`."""

    ranks: int | None = None
    """Number of ranks to plan for, also of `--dry-run`. Default: those that torchrun starts."""
    rank: int | None = None
    """Rank whose memory is counted. Default: the first one, and with pipeline stages the first one of the last."""
    device: str = "cuda"
    """Type of the ranks' devices, on which kernels and the sizes of buffers depend: `cuda` or `cpu`."""
    device_gb: float = 80.0
    """Memory of a device, in units of 10^9 bytes."""
    reserve_gb: float = 6.0
    """Part of this reserved for uncounted memory: the driver's context, buffers of collectives, kernels' workspaces,
    and fragmentation.
    """
    shape: str | None = None
    """Directory with the `config.json` of `policy.model`, to plan without downloading it; one of `configs/shapes` by
    its name.
    """

    def __post_init__(self) -> None:
        one_of(self, device=("cuda", "cpu"))
        above(self, device_gb=0)
        at_least(self, reserve_gb=0)
        at_least(self, ranks=1, rank=0)
        require((self.ranks or 0) <= MOST_RANKS, f"ranks: must be at most {MOST_RANKS}, not {self.ranks}")


@dataclass
class JournalConfig:
    """Detection of stalls of the ranks, and hashes of what they compute: `journal`."""

    stall_seconds: float = 300.0
    """Seconds without progress of any rank after which all ranks dump their stacks and the job ends."""

    start_seconds: float = 3600.0
    """Seconds that models, engines and sidecars may take to start, or a forward to compile, without any progress."""

    hashes: bool = False
    """Write hashes of each step's samples, gradients and weights into `run.dir/journal`, by which
    `python -m spmd_rl bisect` finds where two runs part. About 10 bytes a token and 200 a tensor.
    """

    def __post_init__(self) -> None:
        above(self, stall_seconds=0, start_seconds=0)


@dataclass
class SidecarConfig:
    """Addresses and clients of sidecar hosts: `sidecar`."""

    bind: str = "ipc"
    """Address of the sidecar hosts. `ipc`: a socket in a private directory. `tcp://127.0.0.1:PORT`: a loopback port.
    `tcp://ADDRESS:PORT` (`*` for all addresses of each node): for a status from elsewhere; only with `keys`.
    """
    keys: str | None = None
    """Directory of CURVE keys (`python -m spmd_rl sidecar_keys DIR`): traffic is encrypted, and only clients listed in
    `DIR/allowed` are served. Default: no keys, and only this machine is served."""
    hosts: list[str] = field(default_factory=list)
    """Hosts on machines without ranks (`python -m spmd_rl sidecar --bind ...`), as `tcp://HOST:PORT`: verdicts and
    environments are spread over these and the ranks' own. Beyond loopback only with `keys`.
    """

    def __post_init__(self) -> None:
        self.keys = self.keys and expanduser(self.keys)
        check_bind(self.bind, keyed=self.keys is not None)
        for address in self.hosts:
            check_connect("hosts", address)
            require(self.keys or on_loopback(address), f"hosts: {address}: beyond this machine it needs sidecar.keys")
