"""A plan that fits before it runs: what a rank of a run would hold and be sent, without its peers, weights or devices.

    python -m spmd_rl.rlvr --plan plan.ranks=256 policy.model=Qwen/Qwen3-235B-A22B train.ep=32

What is not counted, `plan.reserve_gb` is for. Nothing is written, and nothing downloaded but a model's `config.json`.
"""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from spmd_rl.config.ranks import world_size
from spmd_rl.config.schema import PipelineConfig
from spmd_rl.plan.fit import nearest
from spmd_rl.plan.measured import measured_peaks
from spmd_rl.plan.rank import trace
from spmd_rl.plan.table import GB, Row, rows, show_map, show_rank

__all__ = ["show", "trace"]


def show(cfg: PipelineConfig) -> None:
    """Print the map of the ranks, what the planned ones hold, and whether it fits; if not, what would.

    Where `run.dir` holds steps of a run, their measured peaks stand beside the planned ones.
    """
    console, ranks = Console(highlight=False, markup=False, soft_wrap=True, width=140), world_size()
    found = [trace(cfg, rank, ranks) for rank in planned_ranks(cfg, ranks)]
    show_map(console, cfg, ranks, found)
    measured: Mapping[str, int] = measured_peaks(Path(cfg.run.dir))
    tables = [rows(cfg, one) for one in found]
    for one, table in zip(found, tables, strict=True):
        show_rank(console, cfg, one, table, measured)
    console.print()
    worst = max((row for table in tables for row in table), key=lambda row: row.total)
    console.print(verdict(cfg, worst))
    if worst.total > room(cfg):
        for line in nearest(cfg, ranks, found[0], room(cfg), lambda other: _fits(other, ranks)):
            console.print(line)


def planned_ranks(cfg: PipelineConfig, ranks: int) -> list[int]:
    """The ranks that are traced."""
    if cfg.plan.rank is not None:
        return [cfg.plan.rank]
    return [0] if cfg.train.pp == 1 else [0, ranks // cfg.train.pp * (cfg.train.pp - 1)]


def room(cfg: PipelineConfig) -> float:
    """Bytes that a plan may fill."""
    return (cfg.plan.device_gb - cfg.plan.reserve_gb) * GB


def verdict(cfg: PipelineConfig, worst: Row) -> str:
    """Say whether the fullest phase fits."""
    plan = cfg.plan
    says = "fits" if worst.total <= room(cfg) else "does not fit"
    return (
        f"{worst.total / GB:.1f} GB in {worst.phase} + {plan.reserve_gb:g} GB in reserve: {says} {plan.device_gb:g} GB "
        "(plan.device_gb)"
    )


def _fits(cfg: PipelineConfig, ranks: int) -> bool:
    found = [rows(cfg, trace(cfg, rank, ranks)) for rank in planned_ranks(cfg, ranks)]
    return max(row.total for table in found for row in table) <= room(cfg)
