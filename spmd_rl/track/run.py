"""`Run`: the run directory and all that is measured, one line a step. Every rank has one; rank 0's writes.

with Run.open(cfg, world) as track:
    with track.step(3):
        track.add({"actor/grad_norm": 0.8})                       # equal on all ranks
        track.add({"tokens": 512, "score": 9.0}, reduce="sum")    # this rank's share
        track.log_samples(3, rows)
"""

import fcntl
import gc
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import yaml

from spmd_rl.config.identity import write_config
from spmd_rl.config.schema import RlvrConfig
from spmd_rl.distributed import World
from spmd_rl.errors import UserError
from spmd_rl.track import origin, render
from spmd_rl.track.memory import PhaseMemory
from spmd_rl.track.metrics import MetricsFile, Reduce, Values, combine
from spmd_rl.track.profile import trace
from spmd_rl.track.progress import ProgressLine
from spmd_rl.track.samples import SampleLog, SampleRow
from spmd_rl.track.trackers import Tracker, check, open_trackers

_CLOSING_SECONDS = 3.0
"""How long the report and the trackers may hold up the end of a run that failed."""
GC_THRESHOLD = 20_000
"""Young objects between two searches for cycles: those of a step are thousands, in no cycle, and gone at its end."""
PHASES = ("generate", "score", "logprobs", "train", "publish", "checkpoint", "eval", "coordination")
"""`time/*` that every line has."""
_REDUCTIONS: tuple[Reduce, ...] = ("sum", "mean", "max")


class Run:
    """Metrics, samples, trackers and report of one run. `Stateful`: a checkpoint holds the line of its own step."""

    def __init__(self, cfg: RlvrConfig, world: World, run_id: str) -> None:
        self.directory = Path(cfg.run.dir)
        self._cfg = cfg
        self._world = world
        self._id = run_id
        self._metrics = MetricsFile(self.directory / "metrics.jsonl")
        self._samples = SampleLog(self.directory / "samples", world.rank, world.size)
        self._writer = ThreadPoolExecutor(1, "sample log")
        self._logged: Future[None] | None = None
        self._memory = PhaseMemory(world.device)
        self._trackers: list[Tracker] = []
        self._progress = ProgressLine(cfg.steps, live=not cfg.debug) if world.rank == 0 else None
        self._step: int | None = None
        self._num_begun = 0
        self._mark: float | None = None
        self._line: Values = {}
        self._local: dict[Reduce, Values] = {}

    @classmethod
    @contextmanager
    def open(cls, cfg: RlvrConfig, world: World) -> Iterator["Run"]:
        """[all] Make the run directory, or finish what a killed start left in it. UserError where that cannot be.

        Leaving it, cleanly or not, writes the report and meets nobody.
        """
        with ExitStack() as held:
            word = world.broadcast("track: open", _prepare(cfg, world, held) if world.rank == 0 else None)  # [all]
            if word["error"]:
                raise UserError(word["error"])
            track = cls(cfg, world, word["id"])
            world.journal.watch(track._memory)
            world.on_exit(track.write_report)
            world.on_exit(track._close_trackers)
            clean = False
            try:
                yield track
                clean = True
            finally:
                track._close(clean)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """[all] Everything inside belongs to `step`; its line is written at a clean exit, with one collective."""
        self._begin(step)
        self._num_begun += 1
        profiled = self._cfg.profile and self._num_begun == 2  # the first pays for what is only done once
        name = f"step-{step:06d}-rank-{self._world.rank}.json"
        with trace(self.directory / "traces" / name) if profiled else nullcontext():
            yield  # no `finally`: with an exception pending, nobody is met and nothing is written
        self._end(step)  # [all]

    def add(self, values: Mapping[str, float], reduce: Reduce | None = None) -> None:
        """Add to the step's line. `reduce=None`: already equal on all ranks; else over the ranks that have the key.

        `tokens` is special: trained-on and generated tokens of the step, from which `system/tokens_per_s` is made.
        """
        target = self._line if reduce is None else self._local.setdefault(reduce, {})
        assert not target.keys() & values.keys(), f"measured twice in a step: {sorted(target.keys() & values.keys())}"
        target.update({key: float(value) for key, value in values.items()})

    def log_samples(self, step: int, rows: Iterable[SampleRow]) -> None:
        """Write this rank's samples of `step`. Once a step, on every rank.

        On a thread, beside what the step still has to compute; `rows` is iterated there. The step ends with it.
        """
        with self._world.phase("track"):
            self._logged = self._writer.submit(self._samples.write, step, rows)

    def state(self) -> dict[str, Any]:
        """[all] For the checkpoint of the present step, whose line is not written yet."""
        assert self._step is not None, "a checkpoint is saved inside a step"
        self._finish_log()  # a run that ends right after the checkpoint has the samples it was made of
        self._fold()
        return {"run": self._cfg.run.name, "id": self._id, "step": self._step, "line": self._line}

    def load_state(self, state: dict[str, Any]) -> None:
        """[all] Cut metrics and samples back to the checkpoint's step; its line comes from the state if it is missing.

        Such a line lacks the times: the start that measured them was killed before it wrote them.
        """
        if state["run"] == self._cfg.run.name:  # else: another run begins from this one's checkpoint
            self._id = state["id"]
        if self._world.rank == 0:
            self._cut(state["step"], state["line"])

    def write_report(self) -> None:
        """Draw `report.html` from what is on the disk; callable from any thread, on rank 0 alone does anything."""
        if self._world.rank == 0 and self._metrics.path.exists():
            render.write(self.directory)

    def _begin(self, step: int) -> None:
        self._step, self._line, self._local = step, {}, {}
        self._world.journal.set_step(step)
        if self._mark is None:
            if self._world.rank == 0:
                self._cut(step - 1, None)
                self._open_trackers(step)
            gc.collect()
            gc.freeze()  # what the start has made stays: no collection needs to look at a million objects again
            gc.set_threshold(GC_THRESHOLD)
            self._world.journal.take_times()  # what came before the first step is nobody's step
            self._memory.take()
            self._world.traffic.take()
            self._mark = time.perf_counter()

    def _end(self, step: int) -> None:
        self._finish_log()
        # The clock runs on from here: writing this line is timed as the next step's phase `track`.
        now = time.perf_counter()
        total, self._mark = now - self._mark, now
        times = _times(self._world.journal.take_times(), total)
        # Shares of a mean, not a mean: a phase that only some ranks went through counts as 0 on the others.
        self.add({key: seconds / self._world.size for key, seconds in times.items()}, reduce="sum")
        self.add({f"memory/{_shown(phase)}/peak_bytes": peak for phase, peak in self._memory.take().items()}, "max")
        self.add({f"system/{name}": count for name, count in self._world.traffic.take().items()}, "sum")
        with self._world.phase("coordination"):
            self._fold()  # [all]
        self._derive()
        if self._world.rank == 0:
            with self._world.phase("track"):
                self._samples.merge(step)
                self._metrics.append(step, self._line)
                self._progress.show(step, self._line)
                for tracker in self._trackers:
                    tracker.log(step, self._line)
        self._step = None

    def _finish_log(self) -> None:
        """Wait for the sample log's thread, and raise what it raised."""
        if self._logged is not None:
            with self._world.phase("track"):
                self._logged.result()
            self._logged = None

    def _fold(self) -> None:
        """[all] Bring the rank-local values into the line, with one collective."""
        records = self._world.gather("track: metrics", self._local)
        for reduce in _REDUCTIONS:
            self._line |= combine(reduce, [record.get(reduce, {}) for record in records])
        self._local = {}

    def _derive(self) -> None:
        line = self._line
        line["system/overhead"] = line["time/coordination"] / line["time/total"]
        if "tokens" in line:
            line["system/tokens_per_s"] = line.pop("tokens") / line["time/total"]
        if least := sum([seconds for key, seconds in line.items() if key.startswith("roofline/")]):
            line["system/efficiency"] = least / (line["time/total"] - line["time/eval"] - line["time/checkpoint"])

    def _cut(self, last: int, line: Values | None) -> None:
        written = self._metrics.cut(last)
        self._samples.cut(last)
        if line is not None and not written:
            self._metrics.append(last, {key: value for key, value in line.items() if key != "tokens"})

    def _open_trackers(self, step: int) -> None:
        settings = yaml.safe_load((self.directory / "config.yaml").read_text(encoding="utf-8"))
        self._trackers = open_trackers(self._cfg.track, self.directory, self._id, step, settings)

    def _close(self, clean: bool) -> None:
        """Leave the terminal and the trackers in order and draw the report, whatever the reason for leaving."""
        if self._progress is not None:
            self._progress.close()
        for act in (self.write_report, self._close_trackers):
            if clean:
                act()
            else:  # what it raises is printed, and does not hide what ended the run
                thread = threading.Thread(target=act, daemon=True)
                thread.start()
                thread.join(_CLOSING_SECONDS)

    def _close_trackers(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def _prepare(cfg: RlvrConfig, world: World, held: ExitStack) -> dict[str, str | None]:
    """Rank 0: the directory, its settings, and what a killed start left; `error` in one line."""
    directory = Path(cfg.run.dir)
    try:
        check(cfg.track)
        (directory / "samples").mkdir(parents=True, exist_ok=True)
        _lock(directory, held)
        write_config(cfg, directory, type(cfg).__name__.removesuffix("Config").lower())
        SampleLog(directory / "samples", world.rank, world.size).recover()
        world.journal.note("run", command=origin.command(), machine=origin.machine(), ranks=world.size)
    except UserError as error:
        return {"error": str(error), "id": None}
    except OSError as error:
        return {"error": f"run.dir={directory}: {error.strerror}", "id": None}
    return {"error": None, "id": secrets.token_hex(4)}


def _lock(directory: Path, held: ExitStack) -> None:
    """Keep the directory to ourselves until `held` is left: the same line in a second terminal is the same run."""
    fd = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise UserError(f"run.dir: {directory} is in use by another job") from None
    held.callback(os.close, fd)


def _shown(phase: str) -> str:
    """A journal's phase under the name that metrics give it."""
    return render.NAMES.get(phase, phase)


def _times(phases: Mapping[str, float], total: float) -> Values:
    """Seconds by phase, `time/total`, and `time/other` for what no phase accounts for."""
    times = dict.fromkeys((f"time/{phase}" for phase in PHASES), 0.0)
    for phase, seconds in phases.items():
        times[f"time/{_shown(phase)}"] = seconds
    return times | {"time/other": total - sum(times.values()), "time/total": total}
