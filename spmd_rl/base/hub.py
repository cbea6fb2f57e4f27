"""Models of the Hugging Face hub: `policy.model=Qwen/Qwen2.5-0.5B-Instruct`; `@REVISION` adds a branch, tag or commit.

Complete snapshots in the cache (`HF_HOME`) are used without network access; `hf download ORG/NAME` fetches newer ones.
On each node local rank 0 downloads and the others wait; nodes that share a cache wait at the hub's file locks. Small
files come first, so the architecture is known before weights are fetched, and a snapshot with weights is complete.
Pickles are never downloaded.
"""

import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spmd_rl.base.errors import UserError, one_line

PREFIX = "hf:"
"""Marks a name of the hub even if it looks like a path"""
HUB_ID = re.compile(r"(?!.*(--|\.\.))(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
CANONICAL_ID = re.compile(r"(?P<repo>\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
"""Names without an owner, such as `gpt2`, valid only after `hf:`"""
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
WEIGHTS = ("*.safetensors",)
ALL_FILES = (*SMALL_FILES, *WEIGHTS)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
DATASET = re.compile(
    r"(?!.*(--|\.\.))(?P<name>\w[\w.-]*(/\w[\w.-]*)?)(@(?P<revision>[\w./-]+))?"
    r"(:(?P<config>[^:\[*?]*))?(:(?P<split>[^:\[*?]+(\[.*\])?))?"
)
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
"""Names that are read as a split if only one of configuration and split is given"""
DATA_FILES = (".jsonl", ".json", ".gz", ".parquet", ".csv", ".txt", ".zst")
OTHER_FORMATS = ("*/*", "consolidated*")
"""Folders (ONNX, original checkpoints) and Mistral's second copy of the weights"""
POLL_SECONDS = 0.5


def hub_id(name: str) -> tuple[str, str | None] | None:
    """Return a model name's repository and revision, or None for a path.

    A path that exists, or whose first folder does, is no name of the hub, except with `hf:`.
    """
    text = name.removeprefix(PREFIX)
    found = HUB_ID.fullmatch(text) or (CANONICAL_ID.fullmatch(text) if text != name else None)
    if found is None or (text == name and (Path(name).exists() or Path(Path(name).parts[0]).is_dir())):
        return None
    return found["repo"], found["revision"]


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A split of a dataset of the hub."""

    repo: str
    revision: str | None
    config: str | None
    split: str | None
    """`train`, `test[:100]`, `train[:10%]`, in the syntax of `datasets`"""


def hub_dataset(source: str) -> HubDataset | None:
    """Parse `[hf:]ORG/NAME[@REVISION][:CONFIG][:SPLIT]`; return None for files of this machine.

    Existing paths, and names of data files, are no names of the hub, except with `hf:`.
    """
    found = DATASET.fullmatch(source.removeprefix(PREFIX))
    if found is None:
        return None
    repo, config, split = found["name"], found["config"], found["split"]
    if source == found.string:
        is_file = repo.endswith(DATA_FILES) or Path(source).exists() or Path(repo.split("/")[0]).is_dir()
        if is_file or "/" not in repo:
            return None
    if split is None and config in SPLITS:
        config, split = None, config
    return HubDataset(repo, found["revision"], config or None, split)


def model_folder(name: str | Path) -> Path:
    """Return a model's directory: a path unchanged (it need not exist), a name of the hub as its cached snapshot.
    UserError if it is not cached.
    """
    found = hub_id(str(name))
    if found is None:
        return Path(name).expanduser()
    folder = _cached(*found, SMALL_FILES)
    if folder is None:
        raise UserError(f"no directory {name}, and no such model in the cache: run `{_command(*found)}`")
    return folder


def fetch_config(key: str, name: str, wait: bool = False) -> str:
    """Download a model's small files and return its name with the resolved commit; return a path unchanged.

    `wait`: until another process has downloaded the weights too. UserError, which names the setting `key`, if the hub
    has no such model or cannot be reached.
    """
    found = hub_id(name)
    if found is None:
        return name
    # Local rank 0 downloads; the others poll the cache, since no process group exists yet.
    while wait and not _cached(*found):
        time.sleep(POLL_SECONDS)
    folder = _cached(*found, SMALL_FILES) or _download(key, *found, SMALL_FILES)
    return f"{PREFIX if name.startswith(PREFIX) else ''}{found[0]}@{folder.name}"


def fetch_weights(key: str, name: str) -> None:
    """Download a model's weights, unless cached. Errors as in `fetch_config`."""
    found = hub_id(name)
    if found is not None and not _cached(*found):
        _download(key, *found, ALL_FILES)


def _snapshot(repo: str, revision: str | None, patterns: Sequence[str], cached: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    chosen = {"allow_patterns": [*patterns], "ignore_patterns": [*OTHER_FORMATS]}
    return Path(snapshot_download(repo, revision=revision, local_files_only=cached, **chosen))


def _cached(repo: str, revision: str | None, patterns: Sequence[str] = ALL_FILES) -> Path | None:
    try:
        folder = _snapshot(repo, revision, patterns, cached=True)
    except FileNotFoundError:
        return None
    # The client knows what is missing only if the list of files is in the cache, too.
    if not (folder / "config.json").exists() or not any((folder / name).exists() for name in TOKENIZERS):
        return None
    if patterns == SMALL_FILES:
        return folder
    try:
        names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()
    except (OSError, ValueError, KeyError):
        return folder if any(folder.glob(WEIGHTS[0])) else None
    return folder if all((folder / name).exists() for name in set(names)) else None


def _download(key: str, repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Complete a snapshot. UserError with a remedy for all errors of the hub's client."""
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return _snapshot(repo, revision, patterns)
    except errors.GatedRepoError:
        why = f"{repo} is gated: accept its terms on its page, then `hf auth login`"
    except errors.RevisionNotFoundError:
        why = f"{repo} has no revision {revision}"
    except errors.RepositoryNotFoundError:
        why = f"no directory {repo}, and the hub has no such model (if it is private: `hf auth login`)"
    except (errors.EntryNotFoundError, errors.OfflineModeIsEnabled, http_error()) as error:
        reason = (
            "offline, because HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else one_line(error.__cause__ or error)
        )
        way = f"run `{_command(repo, revision)}` on a machine with network access"
        why = f"no directory {repo}, and the hub cannot be reached ({reason}): {way}"
    raise UserError(f"{key}: {why}")


def http_error() -> type[Exception]:
    """Return the base of all errors of the HTTP library of this version of the hub's client."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__bases__[0]


def _command(repo: str, revision: str | None) -> str:
    return f"hf download {repo}" + (f" --revision {revision}" if revision else "")
