"""`MemoryTracker`: lifetimes and sizes of the storages of tensors.

    with MemoryTracker() as memory:
        with memory.window("update"):
            role.update(...)
    memory.peak("update").total

It counts the storage of every tensor, real or fake, that an operation makes, until its last reference is gone or it is
resized: without an allocator's rounding and fragmentation, and operations' scratch memory.
"""

import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALIVE = 2**62
RESIZED = "resize_"
GATHERED = "gathered weights"
"""Tag of resized storages: weights that FSDP gathers and frees"""


@dataclass(slots=True)
class Allocation:
    """One storage, from allocation to release."""

    num_bytes: int
    made_by: str
    born: int
    died: int = ALIVE
    tag: str = ""
    """tag of its content; empty for temporary data"""


@dataclass(frozen=True, slots=True)
class Peak:
    """The live storages at largest use."""

    total: int
    by_tag: Counter[str]
    """bytes by tag; untagged ones are `activations`, which outlive the collective, or `temporary`"""
    largest: tuple[int, str]
    """bytes of the largest untagged storage, and its operation"""
    meeting: str
    """collective in or after which the peak was"""


@dataclass
class _Window:
    begin: int
    end: int = ALIVE


@dataclass
class MemoryTracker(TorchDispatchMode):
    """A mode that counts storages inside."""

    entries: list[Allocation] = field(default_factory=list)
    _alive: dict[int, tuple[Any, Allocation]] = field(default_factory=dict)
    _windows: dict[str, _Window] = field(default_factory=dict)
    _meetings: list[tuple[int, str]] = field(default_factory=list)
    now: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __enter__(self) -> "MemoryTracker":
        self._resize = UntypedStorage.resize_
        memory, resize = self, self._resize

        def counted(storage: UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            memory._seen(storage, RESIZED)
            return result

        # No operation reports these: FSDP resizes storages to free gathered weights and to gather them again.
        UntypedStorage.resize_ = counted
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        UntypedStorage.resize_ = self._resize

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # The operations on its local parts are dispatched here separately.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta:
                self._seen(tensor.untyped_storage(), func.name())
        return result

    def _seen(self, storage: UntypedStorage, made_by: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        _, known = self._alive.get(key, (None, None))
        if known is not None:
            if known.num_bytes == size:
                return
            self._end(key, known)
        if made_by == RESIZED and known is not None:
            known.tag = known.tag or GATHERED
        if size:
            self.now += 1
            tag = known.tag if known is not None else GATHERED if made_by == RESIZED else ""
            entry = Allocation(size, made_by, self.now, tag=tag)
            self.entries.append(entry)
            # A weak reference: a strong one would keep the storage alive that it measures.
            self._alive[key] = weakref.ref(storage, partial(self._gone, key, entry)), entry

    def _gone(self, key: int, entry: Allocation, _: Any) -> None:
        if self._alive.get(key, (None, None))[1] is entry:
            self._end(key, entry)

    def _end(self, key: int, entry: Allocation) -> None:
        self.now += 1
        entry.died = self.now
        del self._alive[key]

    def tag(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Tag these tensors' storages (of DTensors, the local parts); uncounted ones count from now on."""
        for tensor in tensors:
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
            self._seen(storage, "")
            if storage._cdata in self._alive:
                self._alive[storage._cdata][1].tag = name

    def meeting(self, name: str) -> None:
        """Record a collective at this time."""
        self._meetings.append((self.now, name))

    @contextmanager
    def window(self, name: str) -> Iterator[None]:
        """Record events inside under this name."""
        self._windows[name] = window = _Window(self.now)
        yield
        window.end = self.now

    def split(self, window: str, meeting: str) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return a window as two spans of events, split at a collective whose name begins with `meeting`."""
        begin, end = self._windows[window].begin, self._windows[window].end
        at = next((when for when, name in self._meetings if begin <= when and name.startswith(meeting)), end)
        return (begin, min(at, end)), (min(at, end), end)

    def span(self, window: str) -> tuple[int, int]:
        """Return the span of a window."""
        return self._windows[window].begin, self._windows[window].end

    def peak(self, span: tuple[int, int], without: Iterable[str] = ()) -> Peak:
        """Return a span's peak, without storages of the tags `without`."""
        begin, end = span
        entries = [e for e in self.entries if e.born <= end and e.died > begin and e.tag not in set(without)]
        changes: Counter[int] = Counter()
        for entry in entries:
            changes[max(entry.born, begin)] += entry.num_bytes
            # Storages that outlive the span stay counted until its end.
            if entry.died <= end:
                changes[entry.died] -= entry.num_bytes
        most, at, held = 0, begin, 0
        for when in sorted(changes):
            held += changes[when]
            if held > most:
                most, at = held, when
        alive = [entry for entry in entries if entry.born <= at < entry.died]
        by_tag: Counter[str] = Counter()
        number = bisect_left(self._meetings, at, key=lambda meeting: meeting[0])
        start, meeting = self._meetings[number - 1] if number else (begin, "")
        stop = self._meetings[number][0] if number < len(self._meetings) else end
        for entry in alive:
            stays = entry.born <= start or entry.died > stop
            by_tag[entry.tag or ("activations" if stays else "temporary")] += entry.num_bytes
        passing = max((entry for entry in alive if not entry.tag), key=lambda entry: entry.num_bytes, default=None)
        return Peak(most, by_tag, (passing.num_bytes, passing.made_by) if passing else (0, ""), meeting)
