"""Fill a model that has been built and sharded without weights: each rank reads the bytes of its own shards alone.

files = WeightFiles(folder)
load_weights(model, files)
files.bytes_read
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spmd_rl.base.errors import UserError
from spmd_rl.model.stored import Part, stored_parts

Region = tuple[slice, ...]
"""One slice a dimension."""
Fill = Callable[[str, Region, Tensor], None]
"""Called like a `RegionReader`, with the name of a model's tensor, a region of it, and what is to be filled with it."""
MAPPED_BYTES = 2**24
"""Files are mapped into memory; after so many bytes the maps are given back, or they would count as this process's."""


class MappedFiles:
    """Safetensors files of a directory, of which any part of any tensor can be read."""

    def __init__(self, folder: Path) -> None:
        """Nothing is opened yet."""
        self.folder, self.bytes_read = folder, 0
        self._opened: dict[str, Any] = {}
        self._mapped = 0

    def open(self, file: str) -> Any:
        """The library's view of a file. OSError or SafetensorError as it gives them."""
        if file not in self._opened:
            self._opened[file] = safe_open(self.folder / file, "pt")
        return self._opened[file]

    def read_part(self, file: str, name: str, region: Region) -> Tensor:
        """Part of a tensor of a file, on the CPU, in the dtype in which it is stored."""
        opened = self.open(file)
        part = opened.get_slice(name)[region] if region else opened.get_tensor(name)
        self.bytes_read += part.nbytes
        self._mapped += part.nbytes
        if self._mapped > MAPPED_BYTES:
            self._opened.clear()
            self._mapped = 0
        return part


class WeightFiles(MappedFiles):
    """The tensors in the safetensors files of a model directory, by name."""

    def __init__(self, folder: Path) -> None:
        """UserError if the directory has no such files, or if one of them is broken."""
        super().__init__(folder)
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        try:
            if index.is_file():
                self._files = dict(json.loads(index.read_text())["weight_map"])
            else:
                self._files = dict.fromkeys(self.open(single.name).keys(), single.name)
            self._shapes = {name: self.open(file).get_slice(name).get_shape() for name, file in self._files.items()}
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise UserError(f"policy.model: {folder} does not load: {error}".splitlines()[0]) from error

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""
        return self._files.keys()

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self.folder / self._files[name]

    def shape(self, name: str) -> list[int]:
        """The shape of a tensor, whole."""
        return self._shapes[name]

    def read(self, name: str, region: Region) -> Tensor:
        """Part of a tensor, on the CPU, in the dtype in which it is stored."""
        return self.read_part(self._files[name], name, region)


@torch.no_grad()
def load_weights(model: nn.Module, files: WeightFiles, on_progress: Callable[[], object] = lambda: None) -> None:
    """Fill this rank's part of every parameter and saved buffer from `files`, converted to the dtype that it has.

    Tied weights are read once, under whichever name is stored. `on_progress` is called after each tensor. UserError,
    before anything is read, if a weight is missing, unknown to the model or of another shape.
    """
    read = RegionReader(model, files)
    for name, tensor in read.tensors.items():
        read(name, owned_region(tensor), local(tensor))
        on_progress()


class RegionReader:
    """Any part of a model's parameters and saved buffers, read from its directory."""

    def __init__(self, model: nn.Module, files: WeightFiles) -> None:
        """`model` may be on the meta device; UserError: see `load_weights`."""
        every = dict([*model.named_parameters(), *model.named_buffers()])
        names, self._files = {id(tensor): name for name, tensor in every.items()}, files
        self._stored: dict[str, list[tuple[str, Part]]] = defaultdict(list)
        for stored, (tensor, part) in checked_weights(model, files).items():
            self._stored[names[id(tensor)]].append((stored, part))
        self.tensors: dict[str, Tensor] = {name: every[name] for name in self._stored}
        """The model's, by name: tied ones once"""

    @torch.no_grad()
    def __call__(self, name: str, region: Region, target: Tensor) -> None:
        """Fill `target` with a region of the tensor `name`."""
        for stored, part in self._stored[name]:
            _fill(target, region, stored, part, self._files)


Wanted = dict[str, tuple[Tensor, Part]]
"""By each name that is stored, the model's tensor that it belongs to; those that tie weights share an entry."""


def checked_weights(model: nn.Module, files: WeightFiles) -> Wanted:
    """Return which stored tensors make up the model's. UserError as of `load_weights`; nothing is read but heads."""
    if problem := mismatch(model, files):
        raise UserError(problem)
    wanted = _stored_tensors(model, files)
    for name, (_, part) in wanted.items():
        shape = [piece.stop - piece.start for piece in part.region][part.is_expert :]
        if files.shape(name) != shape:
            raise UserError(
                f"policy.model: {files.file_of(name)}: {name} has the shape {files.shape(name)}, "
                f"not {shape} as config.json says"
            )
    return wanted


def read_whole(tensor: Tensor, wanted: Wanted, files: WeightFiles) -> Tensor:
    """Read one of a model's tensors whole, in the dtype that it has there. `wanted`: see `checked_weights`."""
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for name, (owner, part) in wanted.items():
        if owner is tensor:
            _fill(whole, owned_region(whole), name, part, files)
    return whole


def _fill(target: Tensor, own: Region, name: str, part: Part, files: WeightFiles) -> None:
    """Copy what the region `own` of a model's tensor, which is `target`, shares with the stored tensor `name`."""
    common = overlap(own, part.region)
    if common is not None:
        source, place = (within(common, outer) for outer in (part.region, own))
        found = files.read(name, source[part.is_expert :])
        target[place].copy_(found[None] if part.is_expert else found)


def mismatch(model: nn.Module, files: WeightFiles) -> str:
    """Say which weight of the model is not stored under its name, or which stored name it lacks; empty if all fit."""
    wanted = _stored_tensors(model, files)
    if missing := sorted(wanted.keys() - files.names):
        return f"policy.model: {files.folder} lacks {len(missing)} weights, among them {missing[0]}"
    known = {*wanted, *model.state_dict(keep_vars=True), *(name for name, _ in model.named_buffers())}
    for name in files.names:
        if name not in known and not is_ignored(model, name):
            return f"policy.model: {files.file_of(name)} holds {name}, which {type(model).__name__} lacks"
    return ""


def is_ignored(model: nn.Module, name: str) -> bool:
    """Whether a stored tensor, for which the model has no place, is read by nobody: as transformers has it."""
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    return any(re.search(pattern, name) for pattern in ignored)


def overlap(one: Region, other: Region) -> Region | None:
    """What two regions of a tensor have in common; None if that is nothing."""
    common = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return common if all(piece.stop > piece.start for piece in common) else None


def within(region: Iterable[slice], outer: Region) -> Region:
    """The region, counted from where `outer` begins."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(region, outer, strict=True))


def _stored_tensors(model: nn.Module, files: WeightFiles) -> Wanted:
    tied: dict[int, list[str]] = defaultdict(list)
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        tied[id(tensor)].append(name)
    parts, found = stored_parts(model), {}
    for names in tied.values():
        choices = [choice for name in names for choice in ([_whole(name, tensors[name])], parts[name])]
        chosen = next((c for c in choices if c[0].name in files.names), parts[names[0]])
        found |= {part.name: (tensors[names[0]], part) for part in chosen}
    return found


def _whole(name: str, tensor: Tensor) -> Part:
    """A tensor that is stored under the name that it has."""
    return Part(name, tuple(slice(0, size) for size in tensor.shape), False)


def owned_region(tensor: Tensor) -> Region:
    """Which part of the whole tensor this rank holds; all of one that is not sharded.

    Mesh axes cut from the last to the first: tensor parallelism before FSDP, which cuts what is left like
    `torch.chunk`.
    """
    region = [slice(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for axis in reversed(range(mesh.ndim)):
            if not tensor.placements[axis].is_replicate():
                dim = tensor.placements[axis].dim
                region[dim] = share(region[dim], mesh.size(axis), mesh.get_local_rank(axis))
        assert tuple(part.stop - part.start for part in region) == local(tensor).shape
    return tuple(region)


def share(whole: slice, num_ranks: int, rank: int) -> slice:
    """Which part of a dimension a rank has: all of one size but for the last ones, like `torch.chunk`."""
    piece = -(-(whole.stop - whole.start) // num_ranks)
    begin = min(whole.stop, whole.start + rank * piece)
    return slice(begin, min(whole.stop, begin + piece))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
