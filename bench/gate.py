"""The gate: processes that are to be compared stop between their steps, and a driver lets one go at a time.

    gate = Gate.connect("ours", rank)             # in each rank of a contestant; the address is in the environment
    while (order := gate.arrive(step, values)).do == "export": ...

    with Contestant.start("ours", command, env, ranks=2) as ours:   # in the driver
        ours.wait(); seconds, cpu_seconds, values = ours.step()

Wall time and CPU-seconds run from the moment the driver says go until the last rank has come back to the gate; a
contestant that waits computes nothing. CPU-seconds are those of `os.times`, of the started process and all its
descendants. Standard library alone, so that every contestant's environment can import it; the driver needs psutil.
A contestant that has imported torch is at the gate when its device, if it has one, has done all that was queued.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ADDRESS = "SPMD_RL_BENCH_GATE"
"""Environment variable: the driver's socket."""


@dataclass(frozen=True)
class Order:
    """What the driver says at the gate: `go`, `export` (write the weights to `path`, then arrive again) or `end`."""

    do: str
    path: str = ""


class Gate:
    """A rank's end."""

    def __init__(self, connection: socket.socket) -> None:
        self._lines = connection.makefile("rw")

    @classmethod
    def connect(cls, rank: int) -> "Gate":
        """Join the driver whose address is in the environment."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(os.environ[ADDRESS])
        gate = cls(connection)
        gate._say({"rank": rank})
        return gate

    def arrive(self, step: int, values: Mapping[str, float]) -> Order:
        """Stand before `step`, with what the step before it measured; block until the driver has decided.

        `end` does not return: the process is left at once, without a checkpoint or a farewell.
        """
        torch = sys.modules.get("torch")
        if torch is not None and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._say({"step": step, "values": dict(values), "process_seconds": time.process_time()})
        line = self._lines.readline()
        order = Order(**json.loads(line)) if line else Order("end")  # the driver is gone
        if order.do == "end":
            os._exit(0)
        return order

    def _say(self, record: dict[str, Any]) -> None:
        self._lines.write(json.dumps(record) + "\n")
        self._lines.flush()


@dataclass(frozen=True)
class Timed:
    """One step of one contestant."""

    seconds: float
    cpu_seconds: float
    """of all the job's processes"""
    rank_cpu_seconds: float
    """of its ranks' own processes alone"""
    values: dict[str, float]
    """of rank 0, as it told them at the gate"""


class Contestant:
    """A job of some ranks that the driver has started. Leaving it ends the job."""

    def __init__(self, name: str, process: subprocess.Popen, log: Path, listener: socket.socket, ranks: int) -> None:
        self.name, self._process, self._log, self._listener = name, process, log, listener
        self._lines: dict[int, Any] = {}
        self._ranks = ranks
        self._rank_cpu_seconds = 0.0

    @classmethod
    def start(
        cls, name: str, command: Sequence[str], env: Mapping[str, str], ranks: int, directory: Path
    ) -> "Contestant":
        """Start `command`, whose ranks will come to the gate. Its output goes to `directory`/`name`.log."""
        directory.mkdir(parents=True, exist_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        address = os.path.join(tempfile.mkdtemp(prefix="gate-"), "s")  # a socket's path must be short
        listener.bind(address)
        listener.listen()
        log = directory / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, env={**os.environ, **env, ADDRESS: address}, stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )
        return cls(name, process, log, listener, ranks)

    @property
    def pid(self) -> int:
        """Of the process that was started."""
        return self._process.pid

    def wait(self, timeout: float = 3600) -> dict[str, float]:
        """Until all ranks stand at the gate; the values of rank 0. RuntimeError, with its log, if it ends or hangs."""
        deadline = time.monotonic() + timeout
        self._listener.settimeout(0.5)
        while len(self._lines) < self._ranks:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise self._failure() from None
                continue
            lines = connection.makefile("rw")
            self._lines[json.loads(lines.readline())["rank"]] = lines
        lines = {rank: end.readline() for rank, end in self._lines.items()}
        if not all(lines.values()):
            raise self._failure()
        arrived = {rank: json.loads(line) for rank, line in lines.items()}
        self._rank_cpu_seconds = sum(record["process_seconds"] for record in arrived.values())
        return arrived[0]["values"]

    def step(self, path: Path | str = "") -> Timed:
        """Let the job compute one step; `path` is told with the order, for who wants to know."""
        cpu, own, began = self.cpu_seconds(), self._rank_cpu_seconds, time.perf_counter()
        self._order("go", str(path))
        values = self.wait()
        seconds = time.perf_counter() - began
        return Timed(seconds, self.cpu_seconds() - cpu, self._rank_cpu_seconds - own, values)

    def suspend(self) -> None:
        """Stop all of the job's processes: even one that waits has threads that look around."""
        for process in self._family():
            process.suspend()

    def resume(self) -> None:
        """Let them run again."""
        for process in self._family():
            process.resume()

    def export(self, path: Path) -> None:
        """Have the weights written to `path` (safetensors, bfloat16, Hugging Face names); no step's time."""
        self._order("export", str(path))
        self.wait()

    def cpu_seconds(self) -> float:
        """User and system time of the job's processes so far, those that have ended and been waited for included."""
        return sum(sum(process.cpu_times()[:4]) for process in self._family())

    def peak_bytes(self) -> int:
        """Sum over the job's living processes of the most memory each has had resident; shared pages count in each."""
        total = 0
        for process in self._family():
            status = Path(f"/proc/{process.pid}/status").read_text()
            total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024
        return total

    def __enter__(self) -> "Contestant":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._order("end")
            self._process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            pass
        finally:
            self._kill()
            self._listener.close()

    def _order(self, do: str, path: str = "") -> None:
        for lines in self._lines.values():
            lines.write(json.dumps({"do": do, "path": path}) + "\n")
            lines.flush()

    def _family(self) -> list[Any]:
        import psutil  # the driver's alone

        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def _kill(self) -> None:
        if self._process.poll() is None:
            for process in reversed(self._family()):
                process.kill()
            self._process.wait()

    def _failure(self) -> RuntimeError:
        with suppress(subprocess.TimeoutExpired):  # it may still be writing down why it ends
            self._process.wait(5)
        code = self._process.poll()
        self._kill()
        how = "without coming to the gate" if code is None else f"with exit code {code}"
        if code == -signal.SIGKILL:
            how += ": killed, most likely because the machine's memory was full"
        return RuntimeError(f"{self.name} ended early, {how}:\n{self._log.read_text(errors='replace')[-3000:]}")
