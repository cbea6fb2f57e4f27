"""`read_metadata`: which tensors lie in a folder of `torch.distributed.checkpoint` (DCP), and where in its files.

DCP pickles this table and loads it with a plain unpickler, which runs whatever a stranger has put there, and a manifest
that vouches for it can be rewritten. Here the pickle is read with inert stand-ins for the few classes that DCP
stores, and torch's objects are made anew from the plain values in them, each of which is checked.
"""

import pickle
import pickletools
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from spmd_rl.errors import UserError, one_line

NAME = ".metadata"
BROKEN = (pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError, ValueError)
BOMBS = (ArithmeticError, ImportError, MemoryError, RecursionError)
"""What bytes that DCP has not written make the unpickler raise, or us"""


class _Record:
    """Holds what the pickle of an object says of it, and does nothing."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any) -> "_Record":
        record = super().__new__(cls)
        record.args = args
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


_DCP = "torch.distributed.checkpoint"
_PLAIN = (
    "Metadata",
    "TensorStorageMetadata",
    "TensorProperties",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "StorageMeta",
)
KNOWN: dict[tuple[str, str], type] = {
    **{(f"{_DCP}.metadata", name): _Record for name in (*_PLAIN, "_MEM_FORMAT_ENCODING")},
    (f"{_DCP}.filesystem", "_StorageInfo"): _Record,
    ("torch.serialization", "_get_layout"): _Record,
    ("pathlib", "PosixPath"): _Record,
    ("pathlib", "WindowsPath"): _Record,
    ("torch", "Size"): tuple,
}
"""What stands in for each name that DCP's table may hold; dtypes of torch stand for themselves"""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = KNOWN.get((module, name))
        if found is None and module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if found is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return found


def read_metadata(folder: Path) -> Metadata:
    """Return DCP's table of `folder`, tensors alone. UserError if it is anything else; OSError if it cannot be read."""
    try:
        content = (folder / NAME).read_bytes()
        _check_memo(content)
        table = _Reader(BytesIO(content)).load().state
        tensors = {_text(name): _tensor(found.state) for name, found in table["state_dict_metadata"].items()}
        files = {path.name for path in folder.iterdir() if path.is_file()}
        places = {_index(key.state): _place(found.state, files) for key, found in table["storage_data"].items()}
    except (*BROKEN, *BOMBS) as error:
        raise UserError(f"{folder / NAME} is no table of tensors: {one_line(error)}") from error
    return Metadata(tensors, storage_data=places)


def _check_memo(content: bytes) -> None:
    """Raise a ValueError for a pickle whose memory of what it has read would be larger than itself."""
    for opcode, number, _ in pickletools.genops(content):
        if opcode.name.endswith("PUT") and int(number) > len(content):
            raise ValueError(f"it counts to {number}")


def _tensor(state: dict[str, Any]) -> TensorStorageMetadata:
    dtype = state["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError("a tensor without a dtype")
    chunks = [ChunkStorageMetadata(_size(c.state["offsets"]), _size(c.state["sizes"])) for c in state["chunks"]]
    return TensorStorageMetadata(TensorProperties(dtype), _size(state["size"]), chunks)


def _index(state: dict[str, Any]) -> MetadataIndex:
    return MetadataIndex(_text(state["fqn"]), _size(state["offset"]), _count(state["index"]))


def _place(state: dict[str, Any], files: set[str]) -> _StorageInfo:
    name = _text(state["relative_path"])
    if name not in files or state.get("transform_descriptors"):
        raise ValueError(f"tensors in {name!r:.40}, which is no plain file of the folder")
    return _StorageInfo(name, _count(state["offset"]), _count(state["length"]))


def _size(found: Any) -> torch.Size:
    if type(found) is not tuple or prod(_count(n) for n in found) >= 2**60:
        raise TypeError(f"{found!r:.40} where a shape is due")
    return torch.Size(found)


def _count(found: Any) -> int:
    if type(found) is not int or not 0 <= found < 2**63:
        raise TypeError(f"{found!r:.40} where a count is due")
    return found


def _text(found: Any) -> str:
    if type(found) is not str:
        raise TypeError(f"{found!r:.40} where a name is due")
    return found
