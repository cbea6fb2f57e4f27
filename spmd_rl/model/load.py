"""Fill a model that was sharded without weights: each rank reads only its shards' bytes.

files = WeightFiles(folder)
load_weights(model, files)
files.bytes_read
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spmd_rl.base.errors import UserError
from spmd_rl.model.stored import Part, stored_parts

Region = tuple[slice, ...]
"""One slice per dimension of a tensor"""
Fill = Callable[[str, Region, Tensor], None]
"""Function of a model's tensor name, a region, and a tensor to fill"""
# Maps are released after so many bytes, because mapped pages count as this process's memory.
MAPPED_BYTES = 2**24


class MappedFiles:
    """Safetensors files of a directory, readable by parts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bytes_read = folder, 0
        self._opened: dict[str, Any] = {}
        self._mapped = 0

    def open(self, file: str) -> Any:
        """Return safetensors' view of a file. OSError or SafetensorError."""
        if file not in self._opened:
            self._opened[file] = safe_open(self.folder / file, "pt")
        return self._opened[file]

    def read_part(self, file: str, name: str, region: Region) -> Tensor:
        """Return part of a file's tensor, on the CPU, in its stored dtype."""
        opened = self.open(file)
        part = opened.get_slice(name)[region] if region else opened.get_tensor(name)
        self.bytes_read += part.nbytes
        self._mapped += part.nbytes
        if self._mapped > MAPPED_BYTES:
            self._opened.clear()
            self._mapped = 0
        return part


class WeightFiles(MappedFiles):
    """Tensors of a model directory's safetensors files, by name."""

    def __init__(self, folder: Path, stem: str = "model", parts: Sequence[str] = ("",)) -> None:
        """Read the indices. stem: of the files' names. parts: folders below it, each the first part of its tensors'
        names. UserError without such files, or if one of them is broken."""
        super().__init__(folder)
        self._places: dict[str, tuple[str, str]] = {}
        """File of each tensor and its name there."""
        try:
            for part in parts:
                index, single = folder / part / f"{stem}.safetensors.index.json", f"{stem}.safetensors"
                if index.is_file():
                    files = dict(json.loads(index.read_text())["weight_map"])
                else:
                    files = dict.fromkeys(self.open(str(Path(part, single))).keys(), single)
                for name, file in files.items():
                    self._places[f"{part}.{name}" if part else name] = str(Path(part, file)), name
            places = self._places.items()
            self._shapes = {name: self.open(file).get_slice(own).get_shape() for name, (file, own) in places}
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise UserError(f"policy.model: {folder} does not load: {error}".splitlines()[0]) from error

    @property
    def names(self) -> Collection[str]:
        """Names of all stored tensors."""
        return self._places.keys()

    def file_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self.folder / self._places[name][0]

    def shape(self, name: str) -> list[int]:
        """Return the shape of a stored tensor."""
        return self._shapes[name]

    def read(self, name: str, region: Region) -> Tensor:
        """Return part of a tensor, on the CPU, in its stored dtype."""
        return self.read_part(*self._places[name], region)


@torch.no_grad()
def load_weights(model: nn.Module, files: WeightFiles, on_progress: Callable[[], object] = lambda: None) -> None:
    """Fill this rank's part of parameters and saved buffers, converted to their dtypes.

    Tied weights are read once. on_progress: called after each tensor. UserError, before reading, for a weight that is
    missing, unknown to the model or misshapen.
    """
    read = RegionReader(model, files)
    for name, tensor in read.tensors.items():
        read(name, owned_region(tensor), local(tensor))
        on_progress()


class RegionReader:
    """Reader of any part of a model's tensors from its directory."""

    def __init__(self, model: nn.Module, files: WeightFiles) -> None:
        """model: may be on meta. UserError as `load_weights`."""
        every = dict([*model.named_parameters(), *model.named_buffers()])
        names, self._files = {id(tensor): name for name, tensor in every.items()}, files
        self._stored: dict[str, list[tuple[str, Part]]] = defaultdict(list)
        for stored, (tensor, part) in checked_weights(model, files).items():
            self._stored[names[id(tensor)]].append((stored, part))
        self.tensors: dict[str, Tensor] = {name: every[name] for name in self._stored}
        """Model's tensors by name, tied ones once"""

    @torch.no_grad()
    def __call__(self, name: str, region: Region, target: Tensor) -> None:
        """Fill `target` with a region of a tensor."""
        for stored, part in self._stored[name]:
            _fill(target, region, stored, part, self._files)


Wanted = dict[str, tuple[Tensor, Part]]
"""Model's tensor and part by stored name; tied weights share an entry."""


def checked_weights(model: nn.Module, files: WeightFiles) -> Wanted:
    """Return the stored tensors of a model, reading headers only. UserError as `load_weights`."""
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
    """Return one model tensor whole, in its dtype. wanted: see `checked_weights`."""
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for name, (owner, part) in wanted.items():
        if owner is tensor:
            _fill(whole, owned_region(whole), name, part, files)
    return whole


def _fill(target: Tensor, own: Region, name: str, part: Part, files: WeightFiles) -> None:
    common = overlap(own, part.region)
    if common is not None:
        source, place = (within(common, outer) for outer in (part.region, own))
        found = files.read(name, source[part.is_expert :])
        target[place].copy_(found[None] if part.is_expert else found)


def mismatch(model: nn.Module, files: WeightFiles) -> str:
    """Return a message about a missing or unknown weight; empty if all fit."""
    wanted = _stored_tensors(model, files)
    if missing := sorted(wanted.keys() - files.names):
        return f"policy.model: {files.folder} lacks {len(missing)} weights, among them {missing[0]}"
    known = {*wanted, *model.state_dict(keep_vars=True), *(name for name, _ in model.named_buffers())}
    for name in files.names:
        if name not in known and not is_ignored(model, name):
            return f"policy.model: {files.file_of(name)} holds {name}, which {type(model).__name__} lacks"
    return ""


def is_ignored(model: nn.Module, name: str) -> bool:
    """Return True if transformers ignores this stored tensor."""
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    return any(re.search(pattern, name) for pattern in ignored)


def overlap(one: Region, other: Region) -> Region | None:
    """Return two regions' common part; None if empty."""
    common = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return common if all(piece.stop > piece.start for piece in common) else None


def within(region: Iterable[slice], outer: Region) -> Region:
    """Return the region relative to `outer`'s beginning."""
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
    return Part(name, tuple(slice(0, size) for size in tensor.shape), False)


def owned_region(tensor: Tensor) -> Region:
    """Return this rank's region of the whole tensor.

    Mesh axes apply from last to first: tensor parallelism, then FSDP, which splits the rest like `torch.chunk`.
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
    """Return a rank's part of a dimension, split like `torch.chunk`: equal but for the last ones."""
    piece = -(-(whole.stop - whole.start) // num_ranks)
    begin = min(whole.stop, whole.start + rank * piece)
    return slice(begin, min(whole.stop, begin + piece))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def local_parts(named: Collection[tuple[nn.Module, str]]) -> Iterator[None]:
    """Replace parameters, by module and name, with this rank's parts."""
    # An attribute of the object hides the parameter of that name, which stays a DTensor.
    for module, name in named:
        module.__dict__[name] = local(getattr(module, name))
    try:
        yield
    finally:
        for module, name in named:
            del module.__dict__[name]
