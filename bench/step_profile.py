"""Where the CPU-seconds of our step go: by phase, and in each phase by family of operators. The real door, one step.

    OMP_NUM_THREADS=1 python -m bench.step_profile --step 3 --json p.json [key=value ...]

Steps before `--step` warm up. CPU-seconds of a phase are measured (`time.process_time`), in a step without profiler;
the next step runs under torch's profiler, and each phase's CPU-seconds are dealt out by the wall time that its
operators take for themselves there. With one thread that is nearly exact; with more, operators that use only one get
too little. What no operator accounts for is Python: the modules of transformers, the bookkeeping of autograd and FSDP,
and ours.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent

from bench import show, work
from spmd_rl.config import RlvrConfig, main
from spmd_rl.distributed import World
from spmd_rl.engine.native import engine as native
from spmd_rl.rlvr import run
from spmd_rl.track.run import Run
from spmd_rl.train.fsdp2.optimizer import Optimizer

FAMILIES = {
    "attention": ("scaled_dot_product", "_flash_attention"),
    "matmul": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::matmul", "aten::linear", "mkldnn"),
    "optimizer": ("_fused_adamw", "_foreach", "linalg_vector_norm"),
    "copies, casts, gathers": (
        *("aten::copy_", "aten::_to_copy", "aten::clone", "aten::cat", "aten::index", "aten::gather", "aten::scatter"),
        *("aten::fill_", "aten::zero", "aten::embedding", "aten::pad", "aten::constant_pad", "aten::repeat"),
        *("fsdp::", "c10d::", "gloo", "aten::split_with_sizes_copy", "aten::_index", "aten::empty", "aten::resize"),
    ),
}
"""By the beginning of an operator's name; any other operator is elementwise or a reduction."""
MARK = "phase: "
PYTHON, ELEMENTWISE = "Python and the rest", "elementwise, reductions"


class Clock:
    """CPU-seconds of this process by innermost mark, and the same marks for the profiler."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open, self._since = ["outside"], time.process_time()

    @contextmanager
    def mark(self, name: str, part: bool = False) -> Iterator[None]:
        """Charge what is inside to `name`, or to a part of the phase that it is called in."""
        self._charge()
        name = f"{self._open[-1].partition(':')[0]}: {name}" if part else name
        self._open.append(name)
        with torch.profiler.record_function(MARK + name):
            yield
        self._charge()
        self._open.pop()

    def take(self) -> dict[str, float]:
        """What has been charged since the last call."""
        self._charge()
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        return seconds

    def _charge(self) -> None:
        now = time.process_time()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now


def marked(clock: Clock, owner: Any, attribute: str, name: str) -> None:
    """Have `owner.attribute` run under a mark of its own, as a part of the phase."""
    inner: Callable = getattr(owner, attribute)

    @wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        with clock.mark(name, part=True):
            return inner(*args, **kwargs)

    setattr(owner, attribute, outer)


def mark_everything(clock: Clock) -> None:
    """Phases of the journal, and parts of the long ones."""
    phase = World.phase

    @contextmanager
    def marked_phase(world: World, name: str) -> Iterator[None]:
        with clock.mark(name), phase(world, name):
            yield

    World.phase = marked_phase
    marked(clock, torch.Tensor, "backward", "backward")
    marked(clock, Optimizer, "counted_grads", "optimizer")
    marked(clock, Optimizer, "step", "optimizer")
    marked(clock, native.NativeEngine, "_prefill", "prefill")
    marked(clock, native.NativeEngine, "_decode", "decode")
    marked(clock, native, "sample", "sampling")


def family(name: str) -> str:
    """Of an operator, or Python for what is only a mark."""
    if not name.startswith(("aten::", "c10d::", "fsdp::", "gloo", "mkldnn")):
        return PYTHON
    found = (kind for kind, beginnings in FAMILIES.items() if any(b in name for b in beginnings))
    return next(found, ELEMENTWISE)


def phase_of(event: FunctionEvent) -> str | None:
    """The innermost mark around an event; None outside of any."""
    at: FunctionEvent | None = event
    while at is not None:
        if at.name.startswith(MARK):
            return at.name.removeprefix(MARK)
        at = at.cpu_parent
    return None


def shares(events: list[FunctionEvent]) -> tuple[dict[str, dict[str, float]], dict[tuple[str, str], list[float]]]:
    """Own wall time in us by phase and family, and by phase and operator with the number of calls."""
    table: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    operators: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in events:
        if (phase := phase_of(event)) is not None:
            table[phase][family(event.name)] += event.self_cpu_time_total
            operators[phase, event.name][0] += event.self_cpu_time_total
            operators[phase, event.name][1] += 1
    return table, operators


def report(cpu: dict[str, float], events: list[FunctionEvent], path: Path | None) -> None:
    """Print the tables, and write the figures."""
    table, operators = shares(events)
    columns = (*FAMILIES, ELEMENTWISE, PYTHON)
    dealt: dict[str, dict[str, float]] = {}
    for phase in sorted(cpu, key=cpu.get, reverse=True):
        total = sum(table[phase].values())
        dealt[phase] = {kind: cpu[phase] * table[phase][kind] / total if total else 0.0 for kind in columns}
        if not total:
            dealt[phase][PYTHON] = cpu[phase]
    rows = [[p, *(f"{dealt[p][kind]:.3f}" for kind in columns), f"{cpu[p]:.3f}"] for p in dealt if cpu[p] >= 0.0005]
    sums = {kind: sum(dealt[p][kind] for p in dealt) for kind in columns}
    rows.append(["all", *(f"{value:.3f}" for value in sums.values()), f"{sum(cpu.values()):.3f}"])
    title = f"CPU-seconds of one step of this process, {torch.get_num_threads()} thread(s)"
    show.table(title, ("phase", *columns, "all"), rows)
    scale = {phase: cpu.get(phase, 0.0) / (sum(kinds.values()) or 1.0) for phase, kinds in table.items()}
    top = sorted(operators.items(), key=lambda item: -item[1][0] * scale[item[0][0]])[:25]
    rows = [[f"{p}: {name}", f"{calls:.0f}", f"{us * scale[p]:.3f}"] for (p, name), (us, calls) in top]
    show.table("The dearest operators, their own time", ("phase: operator", "calls", "CPU-s"), rows)
    figures = {"benchmark": "step_profile", "threads": torch.get_num_threads(), "cpu_seconds": cpu, "families": dealt}
    show.record(path, figures)


def door(step: int, path: Path | None) -> None:
    """Have the door stop after `step` and the step behind it, and report."""
    clock, step_of, measured = Clock(), Run.step, {}
    mark_everything(clock)

    @contextmanager
    def watched(track: Run, number: int) -> Iterator[None]:
        clock.take()
        if number <= step:
            with step_of(track, number):
                yield
            measured.update(clock.take())
            return
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            with step_of(track, number):
                yield
        if os.environ.get("RANK", "0") == "0":
            report(measured, list(profiler.events()), path)
            sys.stdout.flush()
        os._exit(0)

    Run.step = watched


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--step", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("settings", nargs="*", metavar="key=value")
    asked = parser.parse_args()
    door(asked.step, asked.json)
    folder = Path(tempfile.mkdtemp(prefix="profile-"))
    main("rlvr", RlvrConfig, run, work.settings(asked.settings, asked.seed, asked.step + 2, folder))
