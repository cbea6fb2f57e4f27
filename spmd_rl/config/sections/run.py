"""The run itself: `run`, `publish`, `checkpoint`, `track`, `journal`, `sidecar`."""

from dataclasses import dataclass, field
from os.path import expanduser

from spmd_rl.config.values import above, at_least, one_of
from spmd_rl.curve_keys import check_bind


@dataclass
class RunConfig:
    """Where a run lives."""

    name: str | None = None
    """Default: a hash of every setting that changes samples or gradients, so that the same line resumes its run."""
    dir: str | None = None
    """Default: `runs/<pipeline>/<run.name>`. Must be shared by all nodes."""


@dataclass
class PublishConfig:
    """Handing the trained weights to the engine, after every step."""

    probe_every: int = 1
    """Steps between probes, in which the engine answers a few prompts and the trainer checks its logprobs. 0: only the
    first publish after a start, which is always probed. Bytes are compared in every publish."""

    def __post_init__(self) -> None:
        at_least(self, probe_every=0)


@dataclass
class CheckpointConfig:
    """Saving and resuming."""

    every: int = 50
    """Steps between checkpoints. There is one at the end in any case; 0: only that one."""
    keep: int = 2
    """How many checkpoints are kept, the newest ones."""
    export_hf: bool = False
    """Write `hf/` (safetensors, config, tokenizer) into each checkpoint; the last one always has it."""
    resume: str = "auto"
    """`auto`: continue if `run.dir` holds a checkpoint. `never`: refuse a used directory. Or the path of a checkpoint: one
    of another run, to begin from, or one of this run, to go back to."""

    def __post_init__(self) -> None:
        self.resume = expanduser(self.resume)
        at_least(self, every=0, keep=1)


@dataclass
class DeviceSpecConfig:
    """The best rates that one device reaches: `track.device`."""

    flops: float | None = None
    """Floating-point operations per second that a device reaches at best in `policy.dtype`; like the next three, the
    measure of `system/efficiency`. Default: those of the device itself, if it is known and the dtype is bfloat16."""
    memory_bandwidth: float | None = None
    """Bytes per second between a device and its own memory."""
    link_bandwidth: float | None = None
    """Bytes per second from another device of the node."""
    host_bandwidth: float | None = None
    """Bytes per second from or to the memory of the host."""

    def __post_init__(self) -> None:
        above(self, flops=0, memory_bandwidth=0, link_bandwidth=0, host_bandwidth=0)


@dataclass
class TrackConfig:
    """Trackers beside the run directory's own files. None needs an account."""

    wandb: str = "off"
    """`off`, `offline` or `online`."""
    tensorboard: bool = False
    """Write event files into `run.dir/tensorboard`."""
    swanlab: str = "off"
    """`off`, `offline` or `cloud`."""
    device: DeviceSpecConfig = field(default_factory=DeviceSpecConfig)

    def __post_init__(self) -> None:
        one_of(self, wandb=("off", "offline", "online"), swanlab=("off", "offline", "cloud"))


@dataclass
class JournalConfig:
    """Stall detection."""

    stall_seconds: float = 300.0
    """If no rank's progress counter moves for so long, all ranks dump their stacks and the job ends."""

    def __post_init__(self) -> None:
        above(self, stall_seconds=0)


@dataclass
class SidecarConfig:
    """Where sidecar hosts listen, and to whom."""

    bind: str = "ipc"
    """`ipc`: a socket in a private directory. `tcp://127.0.0.1:PORT`: a loopback port. `tcp://ADDRESS:PORT`, or `*` for
    all addresses of each node: from other machines, as CPU nodes that attach; only with `keys`."""
    keys: str | None = None
    """Directory of CURVE keys (`python -m launch.sidecar_keys DIR`): traffic is encrypted, and only those listed in
    `DIR/allowed` are served. Default: none, and only this machine is served."""

    def __post_init__(self) -> None:
        self.keys = self.keys and expanduser(self.keys)
        check_bind(self.bind, keyed=self.keys is not None)
