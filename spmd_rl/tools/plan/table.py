"""A rank's plan as tables: memory in each phase, incoming traffic, coordinates."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spmd_rl.config.placement import Placement, ranks_do
from spmd_rl.config.ranks import LayoutSizes
from spmd_rl.config.schema import PlanConfig, RlConfig, TrainConfig
from spmd_rl.tools.plan.engine import NOTHING, EngineBytes
from spmd_rl.tools.plan.rank import GRADIENTS, OPTIMIZER, WEIGHTS, Phase, Trace

COLUMNS = (
    *("weights", "gradients", "optimizer", "gathered", "activations", "temporary", "pictures", "encoders", "decoder"),
    *("engine", "KV cache"),
)
GENERATE, SAVE = "generate, evaluate", "save"
GB = 1e9


@dataclass(frozen=True, slots=True)
class TableRow:
    """A phase's memory on one rank."""

    phase: str
    columns: dict[str, int]
    largest: str = ""

    @property
    def total(self) -> int:
        """Bytes of all columns in sum."""
        return sum(self.columns.values())


def rows(found: Trace, engine: EngineBytes, sleeps: bool) -> list[TableRow]:
    """Return a trainer rank's phases in order, with peak memory."""
    made = []
    for phase in ("publish", GENERATE, "prepare", "update", SAVE):
        parts = [_columns(part) for part in found.phases.get(phase, ())]
        if phase == GENERATE and engine is not NOTHING:
            parts = [({} if sleeps else _held(found), "")]
        elif phase == SAVE:
            # All roles that are saved are awake.
            saved = {tag.partition(" ")[0] for tag in found.held if tag.endswith(OPTIMIZER)}
            parts = [(_held(found, saved if sleeps else ()), "")]
        if not parts:
            continue
        columns, largest = max(parts, key=lambda part: sum(part[0].values()))
        # From a publish to the end of the next generation it keeps its weights.
        asleep = sleeps and phase in ("prepare", "update")
        made.append(TableRow(phase, columns | ({} if asleep else _of_engine(engine, phase, sleeps)), largest))
    return made


def engine_rows(engine: EngineBytes, sleeps: bool) -> list[TableRow]:
    """Return the phases of a rank that only generates."""
    return [TableRow(phase, _of_engine(engine, phase, sleeps)) for phase in ("publish", GENERATE)]


def sleeps_while_idle(train: TrainConfig, plan: PlanConfig) -> bool:
    """Return True if idle roles leave the device."""
    return train.offload and plan.device != "cpu"


def _of_engine(engine: EngineBytes, phase: str, sleeps: bool) -> dict[str, int]:
    # An engine that sleeps has its cache while it generates.
    kv = 0 if sleeps and phase != GENERATE else engine.kv
    working = engine.working if phase == GENERATE else 0
    return {"engine": engine.weights, "KV cache": kv} | ({"temporary": working} if working else {})


def _held(found: Trace, only: Collection[str] = ()) -> dict[str, int]:
    columns = Counter[str]()
    for tag, num_bytes in found.held.items():
        if not only or tag.partition(" ")[0] in only:
            columns[tag.rpartition(" ")[2]] += num_bytes
    return dict(columns)


def _columns(part: Phase) -> tuple[dict[str, int], str]:
    columns = Counter[str]()
    for tag, num_bytes in part.peak.by_tag.items():
        kind = tag.rpartition(" ")[2] if tag.endswith((f" {WEIGHTS}", OPTIMIZER, GRADIENTS)) else tag
        columns["gathered" if tag.startswith("gathered") else kind] += num_bytes
    size, made_by = part.peak.largest
    return dict(columns), f"{size / GB:.2f} GB by {made_by.partition('::')[2]} in {part.peak.meeting or part.role}"


def show_map(console: Console, cfg: RlConfig, placement: Placement, found: Sequence[Trace]) -> None:
    """Print ranks along each axis, and generator ranks."""
    if found:
        who = ranks_do(placement.train, "train") if cfg.placement.is_split else ""
        show_axes(console, cfg.train, placement.train, found[0], who)
    where = f"{ranks_do(placement.generate, 'generate')}: " if cfg.placement.is_split else ""
    count = f"{len(placement.generate) // cfg.engine.ranks} " if placement.generate else ""
    console.print(f"  engine        {where}{count}replicas of {cfg.engine.name} x {cfg.engine.axes}")


def show_axes(console: Console, train: TrainConfig, ranks: Sequence[int], found: Trace, who: str = "") -> None:
    """Print trainer ranks along each axis. who: text on them, if not all ranks train."""
    sizes = LayoutSizes.of("train", len(ranks), **train.axes)
    used = {"pp": sizes.pp, "dp_replicate": sizes.dp_replicate, "dp_shard": sizes.dp_shard, "cp": sizes.cp}
    used |= {"tp": sizes.tp}
    product = " x ".join(f"{axis} {size}" for axis, size in used.items() if size > 1) or "one rank"
    console.print(Text(f"{who or f'{len(ranks)} ranks'} = {product}", "bold"))
    stride = 1
    for axis, size in reversed(used.items()):
        if size > 1:
            others = ", ".join(str(ranks[i * stride]) for i in range(min(size, 4))) + (", ..." if size > 4 else "")
            console.print(f"  {axis:13} groups of {size}: ranks {others}")
        stride *= size
    console.print(f"  optimizer     a copy on {sizes.fsdp * sizes.tp * sizes.pp} ranks, sharded over {sizes.fsdp}")
    if sizes.ep > 1:
        console.print(f"  experts       1/{sizes.ep} on a rank (ep), sharded over {sizes.expert_fsdp}")
    shards = sizes.dp_replicate * sizes.dp_shard
    console.print(f"  data          {shards} shards, at most {found.microbatches} micro-batches each an update")


def show_rank(console: Console, found: Trace, table: Sequence[TableRow], measured: Mapping[str, int]) -> None:
    """Print a rank's memory and incoming traffic. measured: an earlier run's bytes by phase."""
    place = ", ".join(f"{axis} {at}" for axis, at in found.places.items())
    show_table(console, f"Rank {found.rank} ({place})", table, measured)
    for row in table:
        if row.largest:
            console.print(f"  largest in {row.phase}: {row.largest}")
    for phase, parts in found.phases.items():
        for part in parts:
            told = ", ".join(f"{kind} {size / GB:.2f}" for kind, size in sorted(part.travelled.items()) if size)
            if told:
                console.print(f"  GB to this rank a step, {phase} of the {part.role}: {told}")


def show_table(console: Console, who: str, table: Sequence[TableRow], measured: Mapping[str, int]) -> None:
    """Print a rank's memory in each phase."""
    console.print()
    console.print(Text(f"{who}, GB at the peak of each phase", "bold"))
    grid = Table(box=None, pad_edge=False, padding=(0, 1))
    grid.add_column("phase")
    used = [column for column in COLUMNS if any(row.columns.get(column, 0) >= GB / 200 for row in table)]
    for name in (*used, "total", *["measured"] * bool(measured)):
        grid.add_column(name, justify="right")
    for row in table:
        cells = [f"{row.columns.get(column, 0) / GB:.2f}" for column in used]
        seen = measured.get(row.phase.partition(",")[0])
        more = [f"{seen / GB:.2f}" if seen else "-"] if measured else []
        grid.add_row(row.phase, *cells, f"{row.total / GB:.2f}", *more)
    console.print(grid)
