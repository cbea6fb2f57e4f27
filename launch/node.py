"""Starts one node's ranks by torchrun, in the way of all clusters; a signal lets the run save its step. Torch-free.

    python -m spmd_rl node spmd_rl.rlvr key=value ...                                        this machine alone
    python -m spmd_rl node --nodes 4 --rendezvous node0:29500 spmd_rl.rlvr key=value ...     the same on each of four

`launch/slurm/run.sbatch` and `launch/kubernetes/job.yaml` call it on each node. SIGTERM, SIGINT and SIGUSR1 let the run
finish its step, save and end; the exit code is then 128 and the number of the signal, at which a scheduler shall start
the same command again. Any other failure has torchrun's code.
"""

import contextlib
import fcntl
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from types import FrameType

from spmd_rl.base.command_line import Parser, at_least, program
from spmd_rl.base.errors import tell
from spmd_rl.base.process import LAUNCHER, raise_open_files

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_GET_ADDRESS = 0x8915
"""Linux's SIOCGIFADDR: the IPv4 address of a network interface."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = Parser(program("node"), description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=at_least(1), default=1, metavar="N", help="nodes of the run (%(default)s)")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="where the nodes meet: a port of the first")
    parser.add_argument("--id", default="spmd_rl", metavar="ID", help="name of this start, the same on all nodes")
    parser.add_argument("--ranks", default="gpu", metavar="N", help="ranks of a node; gpu: one for each (%(default)s)")
    parser.add_argument("--restarts", type=at_least(0), default=3, metavar="N", help="after a failure (%(default)s)")
    parser.add_argument("--numa", metavar="node", help="torchrun's --numa-binding: processors next to a rank's GPU")
    parser.add_argument("module", help="such as spmd_rl.rlvr")
    # What follows the module is not for this program.
    parser.add_argument("arguments", nargs="...", help="its settings")
    asked = parser.parse_args(argv)
    if not re.fullmatch(r"[A-Za-z_][\w.]*", asked.module):
        parser.error(f"{asked.module!r} is no module; say spmd_rl.rlvr key=value ...")
    if asked.nodes > 1 and not asked.rendezvous:
        parser.error("--nodes: two or more meet at --rendezvous HOST:PORT")
    _raise_limits()
    prepare(os.environ, asked.id, asked.rendezvous)
    meet = ["--standalone"]
    if asked.rendezvous:
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", asked.rendezvous, "--rdzv-id", asked.id]
    binding = ["--numa-binding", asked.numa] if asked.numa else []
    many = ["--nnodes", str(asked.nodes), "--nproc-per-node", asked.ranks, "--max-restarts", str(asked.restarts)]
    command = [sys.executable, "-m", "torch.distributed.run", *many, *meet, *binding, "-m", asked.module]
    return supervise([*command, *asked.arguments])


def prepare(env: dict[str, str] | os._Environ, name: str, rendezvous: str | None) -> None:
    """Set the variables of a node's ranks, except those that are set already.

    name: of this start, part of the name of a folder for the compilers' caches.
    """
    # On a home directory that nodes share, the caches of two nodes would meet.
    local = os.path.join(env.get("SLURM_TMPDIR") or tempfile.gettempdir(), f"spmd_rl-{os.getuid()}-{name}")
    for key, folder in {
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TRITON_CACHE_DIR": "triton",
        "VLLM_CACHE_ROOT": "vllm",
        "FLASHINFER_WORKSPACE_BASE": "",
    }.items():
        env.setdefault(key, os.path.join(local, folder))
    # torchrun would kill its ranks 30 s after the signal. Whoever sent it decides how long it waits. From torch 2.12.
    env.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(24 * 3600))
    if rendezvous and (name := interface_to(rendezvous)):
        for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            env.setdefault(key, name)


def interface_to(rendezvous: str) -> str | None:
    """Return the network interface from which this node reaches HOST:PORT; None for the machine's own and for IPv6."""
    host, _, port = rendezvous.rpartition(":")
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Sends nothing: the kernel only chooses the address that packets would come from.
        probe.connect((host, int(port)))
        own = probe.getsockname()[0]
        for _, name in [] if own.startswith("127.") else socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode())
                if socket.inet_ntoa(fcntl.ioctl(probe, _GET_ADDRESS, request)[20:24]) == own:
                    return name
    return None


def supervise(command: list[str]) -> int:
    """Run torchrun, hand the first signal on to it, and return the exit code."""
    received: list[int] = []
    agent: subprocess.Popen | None = None

    def receive(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        # The first alone: a scheduler may signal torchrun and its ranks itself, and a later signal would end them.
        if agent and len(received) == 1:
            agent.terminate()

    for signum in SIGNALS:
        signal.signal(signum, receive)
    # A rank that stopped at a signal of its own hands it on (`config.main.Exit.leave`).
    env = os.environ | {LAUNCHER: str(os.getpid())}
    # torchrun would die of a scheduler's SIGUSR1; ranks set handlers of their own.
    agent = subprocess.Popen(command, env=env, preexec_fn=lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN))
    if received:
        agent.terminate()
    code = agent.wait()
    if code and received:
        return 128 + received[0]
    return code if code >= 0 else 128 - code


def _raise_limits() -> None:
    """Raise this node's limits as far as allowed: ranks open sockets and files, and pin memory."""
    raise_open_files()
    infinite = resource.RLIM_INFINITY
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (infinite, infinite))
    except (OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
        cure = "slurmd.service: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1"
        tell(f"locked memory is limited to {hard // 1024} KiB: InfiniBand may fail ({cure})")


if __name__ == "__main__":
    sys.exit(main())
