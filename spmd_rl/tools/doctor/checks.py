"""The list of all checks, in the order in which they run.

A check is a plain function. It returns one line about its findings, and raises `Failed` with a cure, or `Skipped`. Any
other exception is a failure too, with the cure of the list.
"""

from dataclasses import dataclass

from spmd_rl.config.backends import backend
from spmd_rl.config.engines import facts_of
from spmd_rl.config.packages import installed, unsupported
from spmd_rl.config.sections.engine import ENGINES
from spmd_rl.config.sections.models import BACKENDS

REPORT = "read the log; if the cause is not yours, report it with that log"
INSTALL = "pip install --editable . (or pip install -U spmd-rl) in the environment that runs the ranks"


ALONE = ("node", "device")
"""Processes whose checks meet no other rank"""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table."""

    name: str
    target: str
    """Function of the check, `module:function`; a module without a dot is one of `spmd_rl/tools/doctor/`."""
    process: str
    """Process of the check. `node`: a torch-free child on the first rank of each node. `device`: a child on each rank.
    Their functions get the run's settings and meet no other rank. Else all ranks run it together, in a child of this
    name, and the function gets a `Bench`.
    """
    limit: float = 30.0
    """Seconds after which the check has failed."""
    needs: str = ""
    """Name of the check that must succeed before this one."""
    cure: str = REPORT
    """Cure for failures that carry none."""
    subject: str = ""
    """Name of the engine or backend that it checks, the first argument of its function; empty without one"""


BACKEND = "pip install 'spmd-rl[{}]'; or run with train=fsdp2"
"""Cure for a training backend, given its name"""
ENGINE = "{}; or run with engine=native"
"""Cure for an engine, given the command that installs its package"""


def backend_check(name: str) -> Check:
    """Return the check of a training backend that needs a package."""
    step, cure = f"{name}: training step", BACKEND.format(name)
    return Check(step, "roles:other_step", name, limit=150, needs="training step", cure=cure, subject=name)


def engine_checks(name: str) -> list[Check]:
    """Return the checks of an engine; one with a package runs in a separate process, and takes longer to start."""
    package = facts_of(name).package
    process, start, work = (name, 150, 60) if package else ("ranks", 30, 30)
    cure = ENGINE.format(facts_of(name).installation) if package else REPORT
    publish = f"{name}: publish"
    return [
        Check(f"{name}: start", "engines:start", process, start, "training step", cure, name),
        Check(publish, "engines:publish", process, work, f"{name}: start", subject=name),
        Check(f"{name}: generate", "engines:generate", process, work, publish, subject=name),
        Check(f"{name}: sleep, wake", "engines:sleep", process, needs=publish, subject=name),
    ]


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
    Check("devices", "devices:devices", "device", limit=90, cure=INSTALL),
    Check("dtype", "devices:dtype", "device"),
    Check("process group", "devices:process_group", "ranks", limit=90),
    Check("shared directory", "devices:shared_directory", "ranks", needs="process group"),
    Check("collectives: host", "devices:host_collectives", "ranks", limit=60, needs="process group"),
    Check("collectives: libraries", "devices:library_collectives", "ranks", limit=60, needs="process group"),
    Check("training step", "roles:training_step", "ranks", limit=60, needs="process group"),
    *(backend_check(name) for name in BACKENDS if backend(name).package),
    Check("offload", "roles:offload", "ranks", needs="training step"),
    Check("checkpoint", "roles:checkpoint", "ranks", needs="shared directory"),
    *(check for name in ENGINES for check in engine_checks(name)),
)


class Failed(Exception):
    """A failed check with its cure."""

    def __init__(self, detail: str, cure: str) -> None:
        super().__init__(detail)
        self.detail, self.cure = detail, cure


class Skipped(Exception):
    """The absence of something to check; the message is the reason."""


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """Result of one check on one rank."""

    name: str
    verdict: str
    """Outcome of the check: `ok`, `failed` or `skipped`."""
    detail: str
    cure: str = ""
    seconds: float = 0.0
    weight: int = 0
    """Closeness of a failure to the cause: 3 a crash, 2 an exception, 1 a time limit, 0 a consequence of another rank's
    end. The closest failure of all ranks is shown, the first among equals.
    """
    at: float = 0.0
    """Time at its end, in seconds since the epoch."""


def check_package(package: str, title: str, cure: str, other: str) -> None:
    """Raise `Skipped` if a package is missing, and `Failed` for an unsupported version. other: setting without it."""
    if installed(package) is None:
        raise Skipped(f"{title} is not installed ({cure})")
    if found := unsupported(package):
        raise Failed(f"{title} {found[0]} is not supported", f"pip install '{found[1]}'; or {other}")


def gib(num_bytes: float) -> str:
    """Format a number of bytes. Example: `12.5 GiB`."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
