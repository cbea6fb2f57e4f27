"""A Slurm cluster of real daemons on this machine: a controller, and nodes that have a host name and a port each.

with Cluster.start(path) as cluster:
    job = cluster.submit("spmd_rl.rlvr", "steps=3")
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.patience import patient

ROOT = Path(__file__).resolve().parents[2]
SBATCH = ROOT / "launch" / "slurm" / "run.sbatch"
CONF = """
ClusterName=toy
SlurmctldHost=n0(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
StateSaveLocation={path}/state
SlurmdSpoolDir={path}/spool-%n
SlurmctldPidFile={path}/slurmctld.pid
SlurmdPidFile={path}/slurmd-%n.pid
SlurmctldLogFile={path}/slurmctld.log
SlurmdLogFile={path}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmdTimeout=15
NodeName=n[1-{nodes}] NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 OverSubscribe=NO
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF OverSubscribe=NO
"""
DAEMONS = """
mount --bind {path}/hosts /etc/hosts
export SLURM_CONF={path}/slurm.conf
unshare --uts sh -c 'hostname n0; exec slurmctld -Dic' &
for node in {names}; do
    while sleep 0.5; do
        [ -e {path}/lost-$node ] || unshare --uts sh -c "hostname $node; exec slurmd -D -N $node"
    done &
done
wait
"""


class Cluster:
    """Running daemons; their folder is `path`."""

    def __init__(self, path: Path, nodes: int, proctrack: str) -> None:
        self.path, self.names = path, [f"n{i}" for i in range(1, nodes + 1)]
        (path / "state").mkdir(parents=True)
        hosts = "".join(f"127.0.0.1 {name}\n" for name in ["localhost", "n0", *self.names])
        (path / "hosts").write_text(hosts)
        port = 10000 + os.getpid() % 1000 * 10  # two clusters on this machine do not meet
        ports = {"port": port, "first": port + 1, "last": port + nodes}
        (path / "slurm.conf").write_text(CONF.format(path=path, nodes=nodes, proctrack=proctrack, **ports))
        (path / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n")

    @classmethod
    @contextlib.contextmanager
    def start(cls, path: Path, nodes: int = 2, proctrack: str = "cgroup") -> Iterator["Cluster"]:
        """Start the daemons, and end them and all their jobs; skip the test where Slurm is not installed."""
        if os.getuid() or not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch", "unshare"))):
            pytest.skip("needs root, and Debian's slurmctld and slurmd")
        cluster = cls(path, nodes, proctrack)
        script = DAEMONS.format(path=path, names=" ".join(cluster.names))
        # In a process namespace of their own: with its first process all others end.
        command = [
            "setpriv",
            "--pdeathsig=KILL",
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "bash",
            "-c",
            script,
        ]
        with open(path / "daemons.log", "wb") as log:
            daemons = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            idle = ["sinfo", "-hNo", "%t", "--partition=low", "--states=idle"]
            cluster.wait(lambda: cluster.command(*idle).count("idle") == nodes, 60, "idle nodes")
            yield cluster
        finally:
            daemons.kill()
            daemons.wait()

    def command(self, *words: str, **env: str) -> str:
        """Run a command of Slurm, and return what it prints."""
        environment = os.environ | {"SLURM_CONF": str(self.path / "slurm.conf")} | env
        done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else done.stdout + done.stderr

    def submit(self, *words: str, partition: str = "low", **env: str) -> str:
        """Submit `run.sbatch` on machines without GPUs, one rank each, and return the job's number. words: options of
        sbatch, which begin with a dash, then the module and its settings."""
        options = [word for word in words if word.startswith("-")]
        arguments = [word for word in words if not word.startswith("-")]
        own = ["--parsable", f"--partition={partition}", "--gpus-per-node=0", f"--output={self.path}/%j.log"]
        env = {"VENV": sys.prefix, "RANKS": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DOCTOR": "", **env}
        number = self.command("sbatch", *own, *options, str(SBATCH), *arguments, **env).strip()
        assert number.isdigit(), number
        return number

    def occupy(self, nodes: int) -> str:
        """Submit a short job of a higher priority, which takes the nodes of others; return its number."""
        return self.command(
            "sbatch", "--parsable", "--partition=high", f"--nodes={nodes}", "--output=/dev/null", "--wrap=sleep 1"
        ).strip()

    def job(self, number: str) -> dict[str, str]:
        """Return what the controller says of a job."""
        text = self.command("scontrol", "show", "job", number)
        return dict(word.partition("=")[::2] for word in text.split())

    def text(self, number: str) -> str:
        """Return what the job has printed, over all its starts."""
        path = self.path / f"{number}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def end_of(self, number: str, seconds: float = 300) -> dict[str, str]:
        """Wait until a job has ended and is not queued again; return what the controller says of it."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        deadline = time.time() + patient(seconds)
        while (job := self.job(number)).get("JobState") not in over:
            assert time.time() < deadline, f"{job}\n{self.text(number)[-3000:]}"
            time.sleep(0.3)
        return job

    def lose(self, node: str) -> None:
        """Kill all that runs on a node, slurmd first; it does not come back before `bring_back`."""
        (self.path / f"lost-{node}").touch()
        daemon, conf = ["slurmd", "-D", "-N", node], str(self.path / "slurm.conf")
        same = [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == daemon]
        (pid,) = [process.pid for process in same if process.environ().get("SLURM_CONF") == conf]
        host = os.readlink(f"/proc/{pid}/ns/uts")
        for process in [psutil.Process(pid), *psutil.process_iter()]:
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if os.readlink(f"/proc/{process.pid}/ns/uts") == host:
                    process.kill()

    def bring_back(self, node: str) -> None:
        """Start a lost node again."""
        (self.path / f"lost-{node}").unlink()

    def wait(self, holds, seconds: float, what: str) -> None:
        """Wait until `holds()`."""
        deadline = time.time() + patient(seconds)
        while not holds():
            assert time.time() < deadline, f"{what} after {seconds} s"
            time.sleep(0.2)
