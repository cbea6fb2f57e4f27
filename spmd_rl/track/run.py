"""`Run`: the run directory and all measurements, one line a step. Every rank has one; rank 0's writes.

with Run.open(cfg, world) as track:
    with track.step(3):
        track.add({"actor/grad_norm": 0.8})                       # equal on all ranks
        track.add({"tokens": 512, "score": 9.0}, reduce="sum")    # this rank's share
        track.log_samples(3, rows)
"""

import fcntl
import os
import platform
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import yaml

from spmd_rl.base.errors import UserError, tell
from spmd_rl.config.main import BEGAN
from spmd_rl.config.ranks import world_size
from spmd_rl.config.run_identity import write_config
from spmd_rl.config.schema import JobConfig
from spmd_rl.distributed import World
from spmd_rl.track import messages
from spmd_rl.track.goodput import Goodput
from spmd_rl.track.memory import PhaseMemory
from spmd_rl.track.metrics import MetricsFile, Reduce, Values, combine, describe
from spmd_rl.track.report import write_report
from spmd_rl.track.samples import SampleLog, SampleRow
from spmd_rl.track.timeline import NAMES
from spmd_rl.track.trackers import Tracker, check, open_trackers

_CLOSE_TIMEOUT = 3.0
"""Delay of a failed run's end by the report and the trackers, at most."""
_PARTS_TIMEOUT = 1.0
"""Wait of a failed run's end for samples of other ranks."""
PHASES = ("generate", "score", "logprobs", "train", "publish", "checkpoint", "eval", "coordination")
"""Phases whose `time/*` is in every line."""
_REDUCTIONS: tuple[Reduce, ...] = ("sum", "mean", "max")


class Run:
    """Metrics, samples, trackers and report of one run. State: the line of the step."""

    def __init__(self, cfg: JobConfig, world: World, run_id: str) -> None:
        self.directory = Path(cfg.run.dir)
        self._cfg = cfg
        self._world = world
        self._id = run_id
        self._metrics = MetricsFile(self.directory / "metrics.jsonl")
        self._samples, self._held_out = _sample_logs(self.directory, world)
        self._goodput = Goodput(self.directory, BEGAN) if world.rank == 0 else None
        self._memory = PhaseMemory(world.device)
        self._phase_reporter = messages.PhaseReporter()
        self._trackers: list[Tracker] = []
        self._step: int | None = None
        self._latest = 0
        self.stop_signal = 0
        """Signal that asked for the end of the run, as of the last step's end; 0 without one. Equal on all ranks."""
        self._merging = threading.Lock()
        self._num_started = 0
        self._step_start: float | None = None
        self.line: Values = {}
        """Values of the step so far that are equal on all ranks; after the step, its complete line."""
        self._local: dict[Reduce, Values] = {}

    @classmethod
    @contextmanager
    def open(cls, cfg: JobConfig, world: World) -> Iterator["Run"]:
        """[all] Open the run directory: make it, or clean up after a killed run.

        Leaving the context writes the report and meets no other rank. UserError if the directory cannot be written or
        another job uses it.
        """
        with ExitStack() as stack:
            opened = world.broadcast("track: open", _prepare(cfg, world, stack) if world.rank == 0 else None)  # [all]
            if opened["error"]:
                raise UserError(opened["error"])
            track = cls(cfg, world, opened["id"])
            world.journal.watch(track._memory)
            if world.rank == 0:
                world.journal.watch(track._phase_reporter)
            world.on_exit(lambda: tell(messages.interrupted(track.directory), lines=True))
            world.on_exit(track._merge_last)
            world.on_exit(track.write_report)
            world.on_exit(track._close_trackers)
            clean = False
            try:
                yield track
                clean = True
            finally:
                track._close(clean)

    def announce(self, num_train: int, num_eval: int) -> None:
        """Describe the run on rank 0's terminal, with the numbers of its prompts."""
        if self._world.rank == 0:
            tell(messages.header(self._cfg, self._world, num_train, num_eval), lines=True)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """[all] Measure everything inside as `step`; a clean exit writes its line, with one collective."""
        self._begin(step)
        self._num_started += 1
        # The first step includes one-time work, such as compilation.
        profiled = self._cfg.profile and self._num_started == 2
        name = f"step-{step:06d}-rank-{self._world.rank}.json"
        with _trace(self.directory / "traces" / name) if profiled else nullcontext():
            # No `finally`: with an exception pending, no rank may be met and nothing written.
            yield
        self._end(step)  # [all]

    def add(self, values: Mapping[str, float], reduce: Reduce | None = None) -> None:
        """Add values to the step's line, each key once a step.

        With `reduce=None` values are equal on all ranks; otherwise they are reduced over the ranks that have the key.
        `tokens` and `generated_tokens` become `system/tps` and `system/generated_tps`.
        """
        target = self.line if reduce is None else self._local.setdefault(reduce, {})
        assert not target.keys() & values.keys(), f"added twice in a step: {sorted(target.keys() & values.keys())}"
        target.update({key: float(value) for key, value in values.items()})

    def log_samples(self, step: int, rows: Iterable[SampleRow]) -> None:
        """Write this rank's samples of `step`, once a step; its end merges those of all ranks."""
        with self._world.phase("track"):
            self._samples.write(step, rows)

    def log_eval(self, step: int, rows: Iterable[SampleRow]) -> None:
        """Write this rank's held-out answers, as `log_samples` does."""
        with self._world.phase("track"):
            self._held_out.write(step, rows)

    @contextmanager
    def samples(
        self, step: int, rows: Callable[[], Iterable[SampleRow]], failure: Exception | None = None
    ) -> Iterator[None]:
        """[all] Log `rows()`, this rank's samples of `step`, after the code inside, even if it raises.

        failure: why the run ends with this step, alike on all ranks; raised once the samples are saved.
        """
        try:
            yield
        finally:
            self.log_samples(step, rows())
        if failure is not None:
            # All ranks have written their samples; rank 0 may merge them.
            self._world.gather("track: samples of the last step", None)  # [all] all have written theirs
            if self._world.rank == 0:
                self._merge_last()
            self._world.gather("track: samples of the last step are merged", None)  # [all]
            raise failure

    def state(self) -> dict[str, Any]:
        """[all] Return the state for a checkpoint, with the step's line so far."""
        self._reduce()  # [all]
        if self._goodput:
            # A run that is killed after the save and before the step's end does not repeat the step.
            self._goodput.step(self._latest)
        # Rank 0 alone knows the goodput, once the step is over.
        line = {key: value for key, value in self.line.items() if key != "system/goodput"}
        return {"run": self._cfg.run.name, "id": self._id, "step": self._latest, "line": line}

    def load_state(self, state: dict[str, Any]) -> None:
        """[all] Cut metrics and samples back to the checkpoint's step."""
        # Another run may begin from this one's checkpoint, with a new tracker id.
        if state["run"] == self._cfg.run.name:
            self._id = state["id"]
        # A missing line of that step is written from the state, without times: the process that measured them was
        # killed before it wrote the line.
        if self._world.rank == 0:
            self._truncate(state["step"], state["line"])

    def write_report(self) -> None:
        """Write `report.html`; any thread may call it, only rank 0 writes."""
        if self._world.rank == 0 and self._metrics.path.exists():
            write_report(self.directory)

    def _begin(self, step: int) -> None:
        self._step, self._latest, self.line, self._local = step, step, {}, {}
        self._world.journal.set_step(step)
        if self._step_start is None:
            if self._world.rank == 0:
                # A killed run may have written lines of steps that are repeated now.
                self._truncate(step - 1, None)
                settings = yaml.safe_load((self.directory / "config.yaml").read_text(encoding="utf-8"))
                self._trackers = open_trackers(self._cfg.track, self.directory, self._id, step, settings)
            # Time before the first step belongs to no step.
            self._world.journal.take_times()
            self._memory.take()
            self._step_start = time.perf_counter()

    def _end(self, step: int) -> None:
        # The next step's clock starts here: writing this line is timed as its phase `track`.
        now = time.perf_counter()
        total, self._step_start = now - self._step_start, now
        times = _times(self._world.journal.take_times(), total)
        # Shares of a mean, not a mean: a phase that only some ranks went through counts as 0 on the others.
        self.add({key: seconds / self._world.size for key, seconds in times.items()}, reduce="sum")
        self.add(
            {f"memory/{NAMES.get(phase, phase)}/peak_bytes": peak for phase, peak in self._memory.take().items()},
            "max",
        )
        with self._world.phase("coordination"):
            self._reduce()  # [all]
        self._add_derived()
        if self._goodput:
            with self._world.phase("track"):
                self.line["system/goodput"] = self._goodput.step(step)
                with self._merging:
                    for log in (self._samples, self._held_out):
                        log.merge(step)
                self._metrics.append(step, self.line)
                tell(describe(step, self._cfg.steps, self.line))
                # No tracker, no look into a folder that grows with every step.
                pictures = sorted(self.directory.glob(f"pictures/*-{step:06d}-*")) if self._trackers else []
                for tracker in self._trackers:
                    tracker.log(step, self.line, pictures)
        self._step = None
        self._phase_reporter.first_step = False

    def _reduce(self) -> None:
        """[all] Reduce all ranks' values into the line, and agree on the signal, with one collective."""
        asked = self._world.stop.asked() if self._world.rank == 0 else 0
        gathered = self._world.gather("track: metrics", [asked, self._local])
        self.stop_signal, records = gathered[0][0], [local for _, local in gathered]
        for reduce in _REDUCTIONS:
            self.line |= combine(reduce, [record.get(reduce, {}) for record in records])
        self._local = {}

    def _add_derived(self) -> None:
        line = self.line
        line["system/overhead"] = line["time/coordination"] / line["time/total"]
        # The answers of a warm-up step are demonstrations, not generated tokens.
        if "warmup/loss" in line:
            del line["generated_tokens"]
        for counted, speed in (("tokens", "system/tps"), ("generated_tokens", "system/generated_tps")):
            if counted in line:
                line[speed] = line.pop(counted) / line["time/total"]
        if seconds := line.pop("seconds_at_peak", 0.0):
            line["system/efficiency"] = seconds / (line["time/total"] - line["time/eval"] - line["time/checkpoint"])

    def _truncate(self, last: int, line: Values | None) -> None:
        """Remove everything after step `last`, and write its missing line; on rank 0."""
        self._goodput.resume(last)
        has_line = self._metrics.truncate(last)
        for log in (self._samples, self._held_out):
            log.truncate(last)
        if line is not None and not has_line:
            self._metrics.append(last, {key: value for key, value in line.items() if key != "tokens"})

    def _merge_last(self) -> None:
        if self._world.rank == 0 and (step := self._step) is not None:
            deadline = time.monotonic() + _PARTS_TIMEOUT
            while not self._samples.complete(step) and time.monotonic() < deadline:
                time.sleep(0.05)
            with self._merging:
                if self._samples.complete(step):
                    self._samples.merge(step)

    def _close(self, clean: bool) -> None:
        failed = not clean and isinstance(sys.exc_info()[1], Exception)
        for close in (*[self._merge_last] * failed, self.write_report, self._close_trackers):
            if clean:
                close()
            # In a thread, whose exceptions are printed and do not hide the reason for the end of the run.
            else:
                thread = threading.Thread(target=close, daemon=True)
                thread.start()
                thread.join(_CLOSE_TIMEOUT)
        if clean and self._goodput:
            self._goodput.end()
            ends = self._latest >= self._cfg.steps
            tell(messages.footer(self.directory, self._cfg.steps if ends else 0), lines=True)

    def _close_trackers(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def _prepare(cfg: JobConfig, world: World, stack: ExitStack) -> dict[str, str | None]:
    """Make, lock and clean up the run directory; on rank 0. Return the tracker id of a new run, or an error."""
    directory = Path(cfg.run.dir)
    try:
        check(cfg.track)
        (directory / "samples").mkdir(parents=True, exist_ok=True)
        _lock(directory, stack)
        write_config(cfg, directory, cfg.pipeline)
        for log in _sample_logs(directory, world):
            log.recover()
        world.journal.note(
            "run",
            command=command_line(),
            machine=machine(),
            ranks=max(world.size, world_size()),
        )
    except UserError as error:
        return {"error": str(error), "id": None}
    except OSError as error:
        return {"error": f"run.dir={directory}: {error.strerror}", "id": None}
    return {"error": None, "id": secrets.token_hex(4)}


def _sample_logs(directory: Path, world: World) -> list[SampleLog]:
    return [SampleLog(directory / "samples", world.rank, world.size, kind) for kind in ("step", "eval")]


def _lock(directory: Path, stack: ExitStack) -> None:
    # The same command in a second terminal would write the same run.
    fd = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise UserError(f"run.dir: {directory} is in use by another job") from None
    stack.callback(os.close, fd)


@contextmanager
def _trace(path: Path) -> Iterator[None]:
    with torch.profiler.profile() as profiler:
        yield
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))


def _times(phases: Mapping[str, float], total: float) -> Values:
    times = dict.fromkeys((f"time/{phase}" for phase in PHASES), 0.0)
    for phase, seconds in phases.items():
        times[f"time/{NAMES.get(phase, phase)}"] = seconds
    return times | {"time/other": total - sum(times.values()), "time/total": total}


def command_line() -> str:
    """Return this run's command line, such as `torchrun --nproc-per-node 2 -m spmd_rl.rlvr steps=20`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", spec.name] if spec else [sys.argv[0]]
    return shlex.join([*_launcher(), *program, *sys.argv[1:]])


def machine() -> str:
    """Describe this machine: `2 x Intel(R) Xeon(R) Processor, 24 GiB`, accelerators first."""
    parts = []
    if torch.accelerator.is_available():
        parts.append(f"{torch.accelerator.device_count()} x {torch.accelerator.current_accelerator()}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts.append(f"{cores} x {_cpu_name()}")
    parts.append(f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB")
    return ", ".join(parts)


def _launcher() -> list[str]:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ["python"]
    # torchrun's own arguments are gone by now; they are reconstructed from its variables.
    local, total = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    nodes = ["--nnodes", str(total // local)] if total > local else []
    return ["torchrun", *nodes, "--nproc-per-node", str(local)]


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
