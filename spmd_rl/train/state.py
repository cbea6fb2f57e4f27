"""A role's saved state: one format for all backends and layouts.

    files = write_state(folder / "00000.safetensors", model.state(), {"backend": "fsdp2"}, world.progress)
    read_state(model.state(), SavedState.open(folder, world), world.progress)  # [all]; model: a `ShardedModel`

Each rank writes its pieces to one safetensors file. Names are Hugging Face's: `model/<name>` is a weight,
`optimizer/<state>/<name>` its optimizer state (such as `exp_avg`), `optimizer/<state>` state without a weight. A piece
is `<name>@<begin>`, like `model/lm_head.weight@128,0`; metadata has whole shapes.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor

from spmd_rl.base.errors import UserError, one_line
from spmd_rl.distributed import World
from spmd_rl.model.load import MappedFiles, Region, overlap, within
from spmd_rl.model.stored import Part

FORMAT = "spmd_rl.state.1"
MODEL, OPTIMIZER = "model/", "optimizer/"
DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
"""Dtype names of safetensors, in its order of tensors"""
DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}
ALIGNMENT = 8
BROKEN = (ValueError, TypeError, KeyError, SafetensorError, msgspec.MsgspecError)


class Shard(NamedTuple):
    """This rank's part of a saved tensor; every rank lists all tensors."""

    name: str
    shape: tuple[int, ...]
    begin: tuple[int, ...]
    tensor: Tensor | None
    """Live part; None if on other ranks"""
    is_mine: bool
    """True if this rank writes the part, among those that hold it"""


def shards_of(prefix: str, tensor: Tensor | None, own: Region, parts: Sequence[Part], is_mine: bool) -> Iterator[Shard]:
    """Yield the region `own` of a parameter, or of its optimizer state, under stored names."""
    for part in parts:
        shape = tuple(piece.stop - piece.start for piece in part.region)[part.is_expert :]
        common = overlap(own, part.region) if tensor is not None else None
        if common is None:
            yield Shard(prefix + part.name, shape, (), None, False)
            continue
        mine = tensor[within(common, own)]
        begin = tuple(piece.start for piece in within(common, part.region))[part.is_expert :]
        yield Shard(prefix + part.name, shape, begin, mine[0] if part.is_expert else mine, is_mine)


class TensorSpec(NamedTuple):
    """Dtype and size of a tensor."""

    dtype: torch.dtype
    size: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """Return the spec of a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def num_bytes(self) -> int:
        """Size of the contents in bytes."""
        return math.prod(self.size) * self.dtype.itemsize


def write_safetensors(
    path: Path, specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, Tensor]], about: Mapping[str, str]
) -> None:
    """Write `tensors` in the order of `specs`, one at a time, taking `len(specs)` from an iterator that may go on in
    another file. OSError."""
    # safetensors' `save_file` needs all of them in memory. The bytes are the same: a JSON head, then the tensors, wider
    # dtypes first, by name.
    order = sorted(specs, key=lambda name: (list(DTYPES).index(specs[name].dtype), name))
    head, begins, end = {"__metadata__": dict(about)}, {}, 0
    for name in order:
        begins[name], end = end, end + specs[name].num_bytes
        dtype, size = DTYPES[specs[name].dtype], list(specs[name].size)
        head[name] = {"dtype": dtype, "shape": size, "data_offsets": [begins[name], end]}
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        coming = iter(tensors)
        for name, spec in specs.items():
            # An iterator that ends early would leave a hole in the file.
            given, tensor = next(coming, (None, None))
            assert given == name and TensorSpec.of(tensor) == spec, (given, name)
            file.seek(8 + len(text) + begins[name])
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy())


def write_state(
    path: Path, state: Iterable[Shard], about: Mapping[str, str], on_progress: Callable[[], object] = lambda: None
) -> list[Path]:
    """Write this rank's pieces into `path`; return it, or nothing without pieces. OSError."""
    mine = {key_of(one.name, one.begin): one for one in state if one.is_mine and one.tensor is not None}
    specs = {key: TensorSpec.of(one.tensor) for key, one in mine.items()}
    wholes = {one.name: one.shape for one in mine.values()}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for key, one in mine.items():
            on_progress()
            yield key, one.tensor.detach().cpu()

    if mine:
        write_safetensors(path, specs, tensors(), head_of(wholes, about))
    return [path] if mine else []


@torch.no_grad()
def staged(state: Iterable[Shard]) -> list[Shard]:
    """Return host copies of this rank's pieces, so that training continues before the write."""
    mine = (one for one in state if one.is_mine and one.tensor is not None)
    return [one._replace(tensor=one.tensor.detach().to("cpu", copy=True)) for one in mine]


def head_of(wholes: Mapping[str, Sequence[int]], about: Mapping[str, str]) -> dict[str, str]:
    """Return a file's metadata, with whole shapes. about: the writer."""
    return {"format": FORMAT, **about, "shapes": json.dumps(wholes, separators=(",", ":"))}


def key_of(name: str, begin: Iterable[int]) -> str:
    """Return the key of the piece that begins at `begin`."""
    return f"{name}@{','.join(map(str, begin))}"


class StoredPiece(NamedTuple):
    """Location of a saved part: file, key there, region of the whole."""

    file: str
    key: str
    region: Region


class SavedState:
    """Saved tensors in a folder, readable by region.

    saved = SavedState.open(folder)
    saved.read("model/lm_head.weight")
    """

    def __init__(self, folder: Path, heads: Iterable[Mapping[str, Any]]) -> None:
        """Use `open`, which reads `heads` of all files."""
        self.tensors: dict[str, TensorSpec] = {}
        self.folder, self._files, self._pieces = folder, MappedFiles(folder), dict[str, list[StoredPiece]]()
        for head in heads:
            for key, dtype, size in head["pieces"]:
                name, _, begin = key.rpartition("@")
                places = [int(number) for number in begin.split(",") if number]
                region = tuple(slice(at, at + count) for at, count in zip(places, size, strict=True))
                whole = TensorSpec(DTYPE_OF[dtype], tuple(head["shapes"][name]))
                inside = all(r.start >= 0 and r.stop <= n for r, n in zip(region, whole.size, strict=True))
                if self.tensors.setdefault(name, whole) != whole or not inside:
                    raise ValueError(f"{name} is of several shapes")
                self._pieces.setdefault(name, []).append(StoredPiece(file=head["file"], key=key, region=region))
        for name, whole in self.tensors.items():
            if sum(_count(piece.region) for piece in self._pieces[name]) != math.prod(whole.size):
                raise ValueError(f"{name} is not complete")

    @classmethod
    def open(cls, folder: Path, world: World | None = None) -> "SavedState":
        """[all] Read the index of all files, shared out over `world` if given. UserError, on all ranks, for files that
        are foreign or damaged; OSError if unreadable."""
        rank, size = (world.rank, world.size) if world is not None else (0, 1)
        files = sorted(path.name for path in folder.iterdir() if path.name.endswith(".safetensors"))
        error, heads = "", []
        try:
            if not files:
                old = (folder / ".metadata").exists()
                raise ValueError("it is of an earlier version, in torch's format" if old else "it holds no tensors")
            heads = [_head(folder, file) for file in files[rank::size]]
        except BROKEN as failed:
            error = one_line(failed)
        if world is not None:
            found = world.gather("restore: heads", [error, heads])  # [all]
            error = next((said for said, _ in found if said), "")
            heads = [head for _, some in found for head in some]
        try:
            if not error:
                return cls(folder, heads)
        except BROKEN as failed:
            error = one_line(failed)
        raise UserError(f"{folder} cannot be read as a saved state: {error}")

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return a tensor or its `region`, on the CPU. UserError if damaged."""
        dtype, size = self.tensors[name]
        own = tuple(slice(0, n) for n in size) if region is None else region
        found = torch.empty([piece.stop - piece.start for piece in own], dtype=dtype)
        for piece in self._pieces[name]:
            common = overlap(own, piece.region)
            if common is None:
                continue
            try:
                part = self._files.read_part(piece.file, piece.key, within(common, piece.region))
            except SafetensorError as failed:
                raise UserError(f"{self.folder / piece.file}: {name}: {one_line(failed)}") from failed
            found[within(common, own)] = part
        return found


def _head(folder: Path, file: str) -> dict[str, Any]:
    opened = MappedFiles(folder).open(file)
    about = opened.metadata() or {}
    if about.get("format") != FORMAT:
        raise ValueError(f"{file} has the format {about.get('format')}, this version reads {FORMAT}")
    slices = {key: opened.get_slice(key) for key in list(opened.keys())}
    pieces = [(key, found.get_dtype(), list(found.get_shape())) for key, found in slices.items()]
    return {"file": file, "pieces": pieces, "shapes": msgspec.json.decode(about["shapes"], type=dict[str, list[int]])}


def _count(region: Region) -> int:
    return math.prod(piece.stop - piece.start for piece in region)


@torch.no_grad()
def read_state(state: Sequence[Shard], saved: SavedState, on_progress: Callable[[], object] = lambda: None) -> None:
    """Fill `state` in place. ValueError, on every rank, if names or shapes differ from saved ones."""
    ours = {one.name: tuple(one.shape) for one in state}
    theirs = {name: tuple(whole.size) for name, whole in saved.tensors.items()}
    if odd := sorted(ours.keys() ^ theirs.keys()):
        whose = "this model has" if odd[0] in ours else "the checkpoint has"
        raise ValueError(f"{saved.folder} does not fit this model: only {whose} {odd[0]} ({len(odd)} names differ)")
    if odd := next((name for name in sorted(ours) if ours[name] != theirs[name]), None):
        raise ValueError(f"{saved.folder} does not fit this model: {odd} is {theirs[odd]} there and {ours[odd]} here")
    for one in state:
        if one.tensor is not None:
            on_progress()
            region = tuple(slice(at, at + n) for at, n in zip(one.begin, one.tensor.shape, strict=True))
            one.tensor.copy_(saved.read(one.name, region))
