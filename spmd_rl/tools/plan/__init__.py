"""Shows what a rank of a run would hold and receive, and whether it fits, without its peers, weights or devices.

    python -m spmd_rl plan rlvr plan.ranks=256 policy.model=Qwen/Qwen3-235B-A22B train.ep=32

Uncounted memory is covered by `plan.reserve_gb`. Nothing is written, and only a model's `config.json` is downloaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from spmd_rl.base.hub import model_folder
from spmd_rl.config.batch_arithmetic import tokens_per_turn
from spmd_rl.config.placement import Placement
from spmd_rl.config.ranks import world_size
from spmd_rl.config.schema import PlanConfig, RlConfig
from spmd_rl.model.build import shape_on_meta
from spmd_rl.model.size import ModelSize
from spmd_rl.tools.plan.engine import EngineBytes, beside_training, dtype_of, engine_bytes
from spmd_rl.tools.plan.fit import nearest
from spmd_rl.tools.plan.rank import Trace, trace
from spmd_rl.tools.plan.table import GB, TableRow, engine_rows, rows, show_map, show_rank, show_table, sleeps_while_idle
from spmd_rl.track.metrics import read_lines
from spmd_rl.track.timeline import NAMES

__all__ = ["show", "trace"]
# A proposed cache is a multiple of it.
ROUND = 1024


def show(cfg: RlConfig) -> None:
    """Print the ranks' map, the planned ones' memory, and whether it fits; if not, a layout that would.

    If `run.dir` holds a run, its measured peaks are shown too.
    """
    console, placement = Console(highlight=False, markup=False, soft_wrap=True, width=140), _placement(cfg)
    train, generate = planned_ranks(cfg, placement)
    found = _traced(cfg, placement, train)
    show_map(console, cfg, placement, found)
    measured: Mapping[str, int] = measured_peaks(Path(cfg.run.dir))
    tables = [_rows(cfg, one) for one in found]
    for one, table in zip(found, tables, strict=True):
        show_rank(console, one, table, measured)
    of_engine = engine_rows(_engine(cfg), sleeps_while_idle(cfg.train, cfg.plan)) if generate else []
    for who in generate:
        show_table(console, who, of_engine, {})
    console.print()
    worst = max((row for table in (*tables, of_engine) for row in table), key=lambda row: row.total)
    console.print(verdict(cfg.plan, worst))
    if line := largest_cache(cfg, [row for table in (*tables, of_engine) for row in table]):
        console.print(line)
    if any(row.total > room(cfg.plan) for table in tables for row in table):
        for line in nearest(cfg, len(placement.train), found[0], room(cfg.plan), _fits):
            console.print(line)
    if any(row.total > room(cfg.plan) for row in of_engine):
        console.print("generator ranks need a smaller engine.kv_tokens, or a larger engine.tp")


def _placement(cfg: RlConfig) -> Placement:
    return Placement.of(cfg.placement, world_size())


def planned_ranks(cfg: RlConfig, placement: Placement) -> tuple[list[int], list[str]]:
    """Return trainer ranks to trace, and names of generator ranks to estimate."""
    apart = [rank for rank in placement.generate if rank not in placement.train]
    if (one := cfg.plan.rank) is not None:
        return ([], [f"Rank {one}"]) if one in apart else ([one], [])
    generate = [f"Rank {apart[0]}"] if apart else []
    train = placement.train[:1]
    if placement.train and cfg.train.pp > 1:
        # With pipeline stages the first one has most micro-batches in flight, and the last one the output embedding and
        # the loss.
        train = (*train, placement.train[len(placement.train) // cfg.train.pp * (cfg.train.pp - 1)])
    return list(train), generate


def _traced(cfg: RlConfig, placement: Placement, ranks: Sequence[int]) -> list[Trace]:
    size = len(placement.train)
    return [replace(trace(cfg, placement.train.index(rank), size), rank=rank) for rank in ranks]


def _rows(cfg: RlConfig, found: Trace) -> list[TableRow]:
    return rows(found, beside_training(cfg, found.size, found.config), sleeps_while_idle(cfg.train, cfg.plan))


def _engine(cfg: RlConfig) -> EngineBytes:
    model = shape_on_meta(model_folder(cfg.policy.model), torch.float32, cfg.policy.trust_remote_code)
    return engine_bytes(cfg.engine, ModelSize.of(model), model.config.get_text_config(), dtype_of(cfg.policy, cfg.plan))


def room(plan: PlanConfig) -> float:
    """Return the bytes a plan may fill."""
    return (plan.device_gb - plan.reserve_gb) * GB


def verdict(plan: PlanConfig, worst: TableRow) -> str:
    """Return text on the fullest phase and its fit."""
    says = "fits" if worst.total <= room(plan) else "does not fit"
    return (
        f"{worst.total / GB:.1f} GB in {worst.phase} + {plan.reserve_gb:g} GB in reserve: {says} {plan.device_gb:g} GB "
        "(plan.device_gb)"
    )


def largest_cache(cfg: RlConfig, table: Sequence[TableRow]) -> str:
    """Return text on the largest KV cache that fits."""
    used = [row for row in table if row.columns.get("KV cache")]
    if not used:
        return ""
    per_token = used[0].columns["KV cache"] / cfg.engine.kv_tokens
    free = min(room(cfg.plan) - row.total + row.columns["KV cache"] for row in used)
    most, running = int(free / per_token) // ROUND * ROUND, cfg.engine.max_running
    longest = running * tokens_per_turn(cfg.rollout, cfg.rollout.max_prompt_tokens)
    return f"engine.kv_tokens: up to {max(0, most)} fit; {running} running answers of full length take {longest}"


def _fits(cfg: RlConfig) -> bool:
    placement = _placement(cfg)
    train, _ = planned_ranks(cfg, placement)
    found = [_rows(cfg, one) for one in _traced(cfg, placement, train)]
    return max(row.total for table in found for row in table) <= room(cfg.plan)


def measured_peaks(run_dir: Path) -> dict[str, int]:
    """Return any rank's and step's peak memory by phase, in bytes.

    On a device it is the allocator's peak; on the CPU the process's resident set.
    """
    peaks: dict[str, int] = {}
    phases = {name: phase for phase, name in NAMES.items()}
    for line in read_lines(run_dir / "metrics.jsonl"):
        for key, value in line.items():
            kind, _, name = key.partition("/")
            phase, _, last = name.rpartition("/")
            phase = phases.get(phase, phase)
            if (kind, last) == ("memory", "peak_bytes") and value:
                peaks[phase] = max(int(value), peaks.get(phase, 0))
    return peaks
