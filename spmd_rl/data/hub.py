"""Reads datasets of the Hugging Face hub with the package `datasets`: `data.train=openai/gsm8k:main:train[:1000]`.

Its cache and its variables apply (`HF_HOME`, `HF_HUB_OFFLINE`, `HF_DATASETS_OFFLINE`, `HF_TOKEN`).
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from spmd_rl.base.errors import UserError, one_line
from spmd_rl.base.hub import HubDataset, http_error, hub_dataset
from spmd_rl.data.files import Found, plain_rows, read_records, table_row

BATCH = 32
"""Rows of pictures that are read at once"""
DEFAULT_SPLITS = {"data.train": "train", "data.eval": "test"}


def source_records(name: str, key: str) -> Iterator[Found]:
    """Yield the records of a file, or of one split of a dataset. key: the setting that a `UserError` names."""
    if (source := hub_dataset(name)) is None:
        yield from read_records(Path(name).expanduser(), key)
        return
    split = source.split or DEFAULT_SPLITS[key]
    name = ":".join(filter(None, (source.repo, source.config, split)))
    table = _load(source, split, name, key)
    yield from (Found(f"{name}[{i}]", table_row(row, f"{key}: {name}[{i}]")) for i, row in enumerate(_rows(table)))


def _rows(table: Any) -> Iterable[Mapping[str, Any]]:
    features = getattr(table, "features", None)
    if features is None or "'_type': 'Image'" not in str(features.to_dict()):
        return table
    return chain.from_iterable(map(plain_rows, table.with_format("arrow").iter(BATCH)))


def _load(source: HubDataset, split: str, name: str, key: str) -> Any:
    try:
        import datasets
        from huggingface_hub.errors import RepositoryNotFoundError
    except ImportError:
        raise UserError(
            f"{key}: no file {source.repo}; a dataset of the hub needs the package datasets: "
            "pip install 'spmd-rl[data]'"
        ) from None
    if not sys.stderr.isatty():
        # Progress bars fill log files with control characters.
        datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(source.repo, source.config, split=split, revision=source.revision)
    except (RepositoryNotFoundError, datasets.exceptions.DatasetNotFoundError) as error:
        reason = "it is gated: accept its terms on its page" if "is a gated" in str(error) else "if it is private"
        raise UserError(
            f"{key}: no file {source.repo}, and no such dataset of the hub ({reason}: `hf auth login`)"
        ) from None
    except (OSError, ValueError, http_error(), datasets.exceptions.DatasetsError) as error:
        if isinstance(error, ValueError) and "cache" not in str(error):
            raise UserError(f"{key}: {name}: {one_line(str(error))}") from None
        arguments = ", ".join(map(repr, filter(None, (source.repo, source.config))))
        if source.revision:
            arguments += f", revision={source.revision!r}"
        command = f'python -c "from datasets import load_dataset; load_dataset({arguments})"'
        raise UserError(
            f"{key}: no file {source.repo}, and the hub cannot give {name} ({one_line(error)}): "
            f"on a machine with network access, run {command}"
        ) from None
