"""Run a function on N real ranks (processes over gloo) and get back what each returned.

    def shares(world, total):                       # at module level, in the test's own file
        mine = list(range(world.rank, total, world.size))
        return world.gather("shares", mine)

    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_shares(size):
        assert run_ranks(size, shares, 5)[0] == ...

Arguments and results travel as JSON. Each rank runs `fn(world, *args)` inside `World.open`; `run_ranks` fails with the
ranks' output if any of them ends with another exit code than 0, and kills them all at the timeout. To watch ranks die,
use `launch` (bare processes; the parent holds the store) or `torchrun` (under a real agent) and look at `Job`. Where
they would import a large library each time, `Ranks` are used again by one test after the other.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from spmd_rl.distributed import World
from tests.forked import Forked, new_store, rank_environments
from tests.patience import patient

ROOT = Path(__file__).parents[2]
IDLE = timedelta(hours=1)
"""How long `Ranks` wait for something to do."""


@dataclasses.dataclass
class Job:
    """Ranks on their way. A context manager: nothing outlives it."""

    directory: Path
    """holds `run/` (the run directory), and `rank-N.json` and `rank-N.log` per rank (`agent.log` under torchrun)"""
    processes: list[Any]
    """one per rank, or the agent alone: `subprocess.Popen` or `Forked`"""
    store: dist.Store | None = None

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for process in [member for started in self.processes for member in family(started.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for process in self.processes:
            process.wait()

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    def wait(self, timeout: float) -> list[int]:
        """Exit codes of `processes`; AssertionError, with all output, if they take longer than `timeout` seconds."""
        deadline = time.monotonic() + patient(timeout)
        while any(process.poll() is None for process in self.processes):
            assert time.monotonic() < deadline, f"still running after {timeout} s\n{self.output()}"
            time.sleep(0.02)
        return [process.returncode for process in self.processes]

    def wait_for(self, event: str, ranks: int, timeout: float = 30.0, **fields: Any) -> None:
        """Until the journals of so many ranks hold a line with this event and these fields."""
        deadline = time.monotonic() + patient(timeout)
        while sum(any_line(lines, event, fields) for lines in self.journals().values()) < ranks:
            assert time.monotonic() < deadline, f"no {event} {fields} after {timeout} s\n{self.output()}"
            time.sleep(0.02)

    def journals(self) -> dict[int, list[dict[str, Any]]]:
        """Each rank's journal, as far as it is written."""
        texts = {int(p.stem[5:]): p.read_text() for p in (self.run_dir / "journal").glob("rank-*.jsonl")}
        return {rank: [json.loads(line) for line in text.split("\n")[:-1]] for rank, text in texts.items()}

    def pids(self) -> dict[int, int]:
        """Each rank's process id, once its journal has begun."""
        return {rank: lines[0]["pid"] for rank, lines in self.journals().items()}

    def results(self) -> list[Any]:
        """What each rank's function returned."""
        paths = sorted(self.directory.glob("rank-*.json"), key=lambda path: int(path.stem[5:]))
        return [json.loads(path.read_text()) for path in paths]

    def output(self) -> str:
        """Everything that was printed."""
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.directory.glob("*.log")))


def run_ranks(size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0, **settings: Any) -> list[Any]:
    """What `fn(world, *args)` returned on each of `size` ranks. `settings`: see `launch`."""
    with tempfile.TemporaryDirectory() as directory, launch(size, fn, *args, directory=directory, **settings) as job:
        codes = job.wait(timeout)
        assert not any(codes), f"exit codes {codes}\n{job.output()}"
        return job.results()


def launch(
    size: int,
    fn: Callable[..., Any],
    *args: Any,
    directory: Path | str,
    stall_seconds: float = 60.0,
    env: dict[str, str] | None = None,
    per_machine: int | None = None,
    store: Any = None,
) -> Job:
    """Start `size` ranks without an agent; the store lives in this process. `directory` must be empty or new.

    `per_machine`: ranks that take each other for neighbours; the last machine has what is left. By default all.
    `store`: what has its `port`, where it lives elsewhere.

    They are forked from a process that has torch loaded, unless `env` must come before it.
    """
    store = store or new_store()
    job = Job(Path(directory), [], store)
    task = _task(job, fn, args, stall_seconds)
    for rank, mine in enumerate(rank_environments(store, size, per_machine)):
        log = job.directory / f"rank-{rank}.log"
        if env is None:
            job.processes.append(Forked(log, mine, main, *task))
        else:
            job.processes.append(_start([sys.executable, "-m", __name__, *task], log, mine | env))
    return job


class Ranks:
    """Ranks that do one thing after the other, `ranks.run(fn, ...)`: what they import they import once.

    A context manager. Where one of them fails all end, and the next call starts others.
    """

    def __init__(self, size: int) -> None:
        self._size, self._folder, self._job, self._calls = size, None, None, 0

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        if self._job is not None:
            self._send(None)
            self._job.wait(60.0)
        self._end()

    def run(
        self, fn: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None, timeout: float = 120.0
    ) -> list:
        """As `run_ranks`; with `ranks`, `fn` gets the world of these alone, and the others never meet them."""
        if self._job is None:
            self._folder = tempfile.TemporaryDirectory()
            compiled = f"{self._folder.name}/compiled"
            self._job, self._calls = launch(self._size, _serve, compiled, directory=self._folder.name), 0
        members = list(range(self._size) if ranks is None else ranks)
        self._send([fn.__module__, fn.__name__, members, args])
        deadline, keys = time.monotonic() + patient(timeout), [f"result {self._calls} {rank}" for rank in members]
        while not self._job.store.check(keys):
            ended, late = any(one.poll() is not None for one in self._job.processes), time.monotonic() > deadline
            if ended or late:
                said = self._job.output()
                self._end()
                raise AssertionError(f"{'still running' if late else 'ranks ended'}: {fn.__name__}\n{said}")
            time.sleep(0.02)
        return [json.loads(self._job.store.get(key)) for key in keys]

    def _send(self, call: Any) -> None:
        self._calls += 1
        self._job.store.set(f"call {self._calls}", json.dumps(call))

    def _end(self) -> None:
        if self._job is not None:
            self._job.__exit__()
            self._folder.cleanup()
        self._job = None


def _serve(world: World, compiled: str) -> None:
    """What each of `Ranks` does until there is nothing more to do. compiled: where libraries would compile things."""
    os.environ["TORCH_EXTENSIONS_DIR"] = compiled
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    worlds, number = {}, 0
    while True:
        number += 1
        with world.journal.extend_timeout(IDLE.total_seconds()):
            store.wait([f"call {number}"], IDLE)
        call = json.loads(store.get(f"call {number}"))
        if call is None:
            return
        module, name, ranks, args = call
        key = tuple(ranks)
        if key not in worlds:
            worlds[key] = world.subset(f"ranks {ranks}", ranks)
        if worlds[key] is not None:
            result = getattr(importlib.import_module(module), name)(worlds[key], *args)
            store.set(f"result {number} {world.rank}", json.dumps(result))


def torchrun(
    size: int,
    fn: Callable[..., Any],
    *args: Any,
    directory: Path | str,
    stall_seconds: float = 60.0,
    env: dict[str, str] | None = None,
    agent: Sequence[str] = (),
) -> Job:
    """The same under `torch.distributed.run` on one node; `Job.processes` is the agent alone, `agent` its options."""
    job = Job(Path(directory), [])
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command = [*run, *agent, "-m", __name__, *_task(job, fn, args, stall_seconds)]
    job.processes.append(_start(command, job.directory / "agent.log", env or {}))
    return job


def family(pid: int) -> list[psutil.Process]:
    """A process and all its descendants, those that are gone left out."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def alive(pids: list[int]) -> list[int]:
    """Those that still run (a zombie does not)."""
    running = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                running.append(pid)
    return running


def any_line(lines: list[dict[str, Any]], event: str, fields: dict[str, Any]) -> bool:
    """Whether a journal holds such a line."""
    return any(line["event"] == event and fields.items() <= line.items() for line in lines)


def _task(job: Job, fn: Callable[..., Any], args: tuple[Any, ...], stall_seconds: float) -> list[str]:
    assert fn.__qualname__.isidentifier(), f"{fn.__qualname__} must stand at module level"
    job.directory.mkdir(parents=True, exist_ok=True)
    return [fn.__module__, fn.__name__, json.dumps(args), str(job.directory), str(stall_seconds)]


def _start(command: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    paths = [str(ROOT), *filter(None, sys.path)]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    with open(log, "wb") as out:
        everything = inherited | defaults | env
        return subprocess.Popen(command, env=everything, stdout=out, stderr=out, stdin=subprocess.DEVNULL)


def main(module: str, name: str, args: str, directory: str, stall_seconds: str) -> None:
    """One rank's program."""
    fn = getattr(importlib.import_module(module), name)
    with World.open(Path(directory) / "run", float(stall_seconds)) as world:
        result = fn(world, *json.loads(args))
        (Path(directory) / f"rank-{world.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
