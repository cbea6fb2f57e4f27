"""Checks of `run`, `checkpoint` and `track`, before the process group forms."""

import netrc
import os
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from spmd_rl.base.errors import UserError
from spmd_rl.config.ranks import rank, world_size
from spmd_rl.config.resume import holds_run
from spmd_rl.config.sections.run import CheckpointConfig, RunConfig, TrackConfig

FOLDERS = ("checkpoints", "journal", "rollouts", "samples", "traces")
FILES = ("config.yaml", "metrics.jsonl", "report.html")
WANDB_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def check_run(run: RunConfig, debug: bool) -> None:
    """Check that `run.dir` can be written, and `debug` fits the ranks."""
    check_writable(Path(run.dir))
    if debug and world_size() != 1:
        raise UserError(f"debug: works in one process, not with {world_size()} ranks; use python -m, not torchrun")


def check_resume(run: RunConfig, checkpoint: CheckpointConfig) -> None:
    """Check that `checkpoint.resume` fits the directory's contents."""
    folder, resume = Path(run.dir), checkpoint.resume
    if resume == "never" and holds_run(folder):
        raise UserError(f"checkpoint.resume: never, but {folder} holds a run; choose another run.dir")
    if checkpoint.is_given and not Path(resume).is_dir():
        raise UserError(f"checkpoint.resume: no directory {resume}; known names: auto, never")
    if checkpoint.is_given and not (Path(resume) / "manifest.json").is_file():
        known = [path for place in ("", "checkpoints/") for path in Path(resume).glob(f"{place}step-*/manifest.json")]
        known = f"give {max(known).parent}" if known else "give a checkpoint such as runs/mine/checkpoints/step-000010"
        raise UserError(f"checkpoint.resume: {resume} is not a checkpoint: it has no manifest.json; {known}")


def check_writable(folder: Path) -> None:
    """Check that a run directory, and its files, can be created."""
    try:
        ancestor = next(path for path in (folder, *folder.parents) if path.exists())
        if not ancestor.is_dir():
            raise UserError(f"run.dir: {ancestor} is not a directory")
        if not os.access(ancestor, os.W_OK | os.X_OK):
            raise UserError(f"run.dir: {ancestor} is not writable")
        # Permissions are not enough: in /proc root may write, but nothing can be created.
        os.rmdir(tempfile.mkdtemp(prefix=".spmd-rl-", dir=ancestor))
    except OSError as error:
        raise UserError(f"run.dir: {folder} cannot be created: {error.strerror}") from None
    for names, fits, kind in ((FOLDERS, Path.is_dir, "a directory"), (FILES, Path.is_file, "a file")):
        for path in (folder / name for name in names):
            if path.exists() and not fits(path):
                raise UserError(f"run.dir: {path} exists, but the run needs {kind} of this name")


def check_wandb(track: TrackConfig) -> None:
    """Check that `track.wandb=online` finds a key."""
    # wandb itself would ask for one, or wait for twenty seconds.
    # Only rank 0 logs to trackers.
    if track.wandb != "online" or rank() != 0 or any(os.environ.get(name) for name in WANDB_KEYS):
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        known = netrc.netrc(str(path)).hosts
    except (OSError, netrc.NetrcParseError):
        known = {}
    if host not in known:
        raise UserError(
            f"track.wandb: online needs a key for {host}: run `wandb login`, set WANDB_API_KEY, or set "
            "track.wandb=offline"
        )
