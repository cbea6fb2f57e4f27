"""Experiment trackers, which get each line of `metrics.jsonl` on rank 0. None by default.

`wandb sync` and `swanlab sync` send an offline run's `run.dir/wandb` and `run.dir/swanlab` later. `tensorboard --logdir
RUN_DIR/tensorboard` shows event files, `trackio show --project spmd_rl` the runs of `track.trackio=true`.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from spmd_rl.base.errors import UserError
from spmd_rl.base.process import in_background
from spmd_rl.config.schema import TrackConfig

PROJECT, PICTURES = "spmd_rl", "pictures"


@dataclass(frozen=True, slots=True)
class Tracker:
    """A service or file format that receives metrics."""

    log: Callable[[int, Mapping[str, float], Sequence[Path]], object]
    """`log(step, values, pictures)`: send a step's metrics and pictures, PNG, or GIF for videos."""
    close: Callable[[], object]


def check(cfg: TrackConfig) -> None:
    """Raise UserError if a chosen tracker is not installed."""
    for name in cfg.chosen:
        if find_spec(name) is None:
            raise UserError(f"track.{name} needs a package that is not installed: pip install 'spmd-rl[{name}]'")


def open_trackers(
    cfg: TrackConfig, run_dir: Path, run_id: str, first_step: int, settings: Mapping[str, Any]
) -> list[Tracker]:
    """Open the chosen trackers. run_id: the same after a resume, which begins with `first_step`."""
    trackers = []
    if cfg.wandb != "off":
        trackers.append(wandb(cfg.wandb, run_dir, run_id, settings))
    if cfg.tensorboard:
        trackers.append(tensorboard(run_dir, first_step))
    if cfg.swanlab != "off":
        trackers.append(swanlab(cfg.swanlab, run_dir, run_id, settings))
    if cfg.trackio:
        trackers.append(trackio(run_dir, run_id, settings))
    return trackers


def wandb(mode: str, run_dir: Path, run_id: str, settings: Mapping[str, Any]) -> Tracker:
    """Open a Weights & Biases run, or continue this id."""
    import wandb

    given = _run(run_dir, run_id, settings) | {"project": os.environ.get("WANDB_PROJECT") or PROJECT}
    run = wandb.init(**given, dir=run_dir, mode=mode, settings=wandb.Settings(console="off"))
    return Tracker(lambda step, *line: run.log(_media(wandb, *line), step=step), run.finish)


def swanlab(mode: str, run_dir: Path, run_id: str, settings: Mapping[str, Any]) -> Tracker:
    """Open a SwanLab experiment, or continue this id."""
    import swanlab

    options = {
        **_run(run_dir, run_id, settings),
        "log_dir": str(run_dir / "swanlab"),
        "mode": "online" if mode == "cloud" else mode,
        "settings": swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}),
    }
    # On the main thread it would take SIGINT, which belongs to the world's own thread.
    run = in_background("swanlab", lambda: swanlab.init(**options)).result()
    return Tracker(lambda step, *line: run.log(_media(swanlab, *line), step=step), run.finish)


def trackio(run_dir: Path, run_id: str, settings: Mapping[str, Any]) -> Tracker:
    """Open a trackio run, or continue this id, where trackio's variables say."""
    import trackio

    # Its runs have names alone, and those of two directories may be equal.
    name, quiet = f"{run_dir.name}-{run_id}", {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    run = trackio.init(PROJECT, name, config=dict(settings), resume="allow", **quiet)

    def log(step: int, values: Mapping[str, float], pictures: Sequence[Path]) -> None:
        # It takes one picture a name.
        shown = {f"{PICTURES}/{number}": _shown(trackio, path) for number, path in enumerate(pictures)}
        run.log({**values, **shown}, step=step)

    return Tracker(log, run.finish)


def tensorboard(run_dir: Path, first_step: int) -> Tracker:
    """Open TensorBoard event files; a resume hides steps from its first on."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import SummaryWriter

    # `purge_step` hides events of steps that a resumed run repeats.
    writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def log(step: int, values: Mapping[str, float], pictures: Sequence[Path]) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)
        for number, path in enumerate(pictures):
            # As the file is: `add_image` would decode and encode it, which needs another package.
            image = Summary.Image(encoded_image_string=path.read_bytes(), colorspace=3)
            tag = f"{PICTURES}/{path.name.partition('-')[0]}-{number}"
            writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)

    return Tracker(log, writer.close)


def _media(library: Any, values: Mapping[str, float], pictures: Sequence[Path]) -> dict[str, Any]:
    return {**values, PICTURES: [_shown(library, path) for path in pictures]} if pictures else dict(values)


def _shown(library: Any, path: Path) -> Any:
    return (library.Video if path.suffix == ".gif" else library.Image)(str(path))


def _run(run_dir: Path, run_id: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"project": PROJECT, "name": run_dir.name, "id": run_id, "resume": "allow", "config": dict(settings)}
