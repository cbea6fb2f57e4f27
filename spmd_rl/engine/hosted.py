"""`HostedEngine`: base of engines over other packages: requests in progress, sleep, lost tensors."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from spmd_rl.base.errors import RunFailed
from spmd_rl.engine.base import Capacity, Engine, EngineCounts
from spmd_rl.engine.given_adapters import GivenAdapters
from spmd_rl.engine.sequence import SequenceState, TextOf, check
from spmd_rl.model.fingerprint import fingerprints
from spmd_rl.types import Completion, Request


class HostedEngine(Engine):
    """An `Engine` over a package. Subclasses define `model`, other methods of `Engine`, and `_reload`, `_release`,
    `_restore` and `_stop`."""

    model: nn.Module

    def __init__(
        self,
        capacity: Capacity,
        shapes: Mapping[str, torch.Size],
        sleeps: bool,
        text_of: TextOf,
        slot: GivenAdapters | None = None,
    ) -> None:
        """shapes: weights that `load` must bring, by Hugging Face name. sleeps: free memory, see `sleep`. slot: with
        it, `load` may bring adapters alone after the first."""
        self.capacity, self.shapes, self.slot = capacity, shapes, slot
        self._sleeps, self.text_of = sleeps, text_of
        self.under_way: dict[str, SequenceState] = {}
        self.version: int | None = None
        """Version of the weights; None while missing or incomplete"""
        self.token_counts = EngineCounts()
        self.lost = ""
        """Description of a tensor that changed since the load; `add` and `load` fail from then on"""
        self._aborted: list[Completion] = []
        self.num_added = 0
        # The first request since the load must find an empty cache: a hit proves that old keys survived.
        self._first: str | None = None
        self.checksums: dict[str, bytes] = {}
        self._num_awake = 0
        self._cache_sleeps = self._weights_sleep = False
        self.sleep()

    @property
    def num_unfinished(self) -> int:
        """Number of requests whose completion was not returned."""
        return len(self.under_way) + len(self._aborted)

    def begin(self, request: Request) -> SequenceState:
        """Register a request and return its state; errors as `Engine.add`."""
        assert self.version is not None, "no weights loaded in this process"
        if self.lost:
            raise RunFailed(self.lost)
        assert request.id not in self.under_way, f"request {request.id} is under way already"
        check(request, self.capacity.max_tokens, self.processor)
        if self._cache_sleeps:
            self._wake("kv_cache")
        self.num_added += 1
        if self._first is None:
            self._first = request.id
        row = self.under_way[request.id] = SequenceState(request)
        return row

    def count_prompt(self, request: Request, cached: int) -> None:
        """Count a prompt's cached tokens. RunFailed if there should be none."""
        self.token_counts.count(len(request.prompt_ids), cached)
        if request.id == self._first:
            self._first = ""
            if cached:
                raise RunFailed(f"the engine served keys and values older than version {self.version}")

    def take(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Take all weights, or adapters alone; return errors after reading all."""
        if self.slot is None:
            return self._reload(weights)
        base = self.slot.base(weights, is_first=not self.checksums)
        faults = self._reload(base) if self.slot.brings_base else []
        return faults + self.slot.put()

    def taken(self, plain: Iterator[tuple[str, Tensor | None]]) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the engine's tensors for the last load. plain: of the model's weights."""
        if self.slot is None:
            return plain
        return chain(plain if self.slot.brings_base else (), self.slot.held())

    def end_load(self, version: int, faults: list[str]) -> None:
        """Finish a load. RunFailed names the first fault."""
        if faults := [*filter(None, [self.lost]), *faults]:
            raise RunFailed(f"engine weights of version {version}: {faults[0]} ({len(faults)} faults)")
        self.version, self._first = version, None
        self.checksums = self._fingerprints()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Keep the weights on the device, until `sleep`; nests. The KV cache stays from the first request to the end.

        If a tensor changed since the load, the next `add` or `load` raises RunFailed.
        """
        if self._num_awake == 0:
            if self._weights_sleep:
                self._wake("weights")
                self._weights_sleep = False
            self.lost = self.lost or self._lost_tensor()
        self._num_awake += 1
        try:
            yield
        finally:
            self._num_awake -= 1
        # Not with an exception pending: the process is about to end.
        if self._num_awake == 0:
            self._free_cache()

    def _wake(self, tag: str) -> None:
        # The package allocates outside torch, whose cache may still hold memory that the trainer freed.
        torch.accelerator.empty_cache()
        self._restore(tag)
        self._cache_sleeps = self._cache_sleeps and tag != "kv_cache"

    def sleep(self) -> None:
        """Drop the weights; those below adapters go to host memory."""
        assert self._num_awake == 0, "sleep() while it is kept awake"
        if not self._sleeps or self._weights_sleep:
            return
        self._free_cache()
        self._release("weights")
        self._weights_sleep = True
        if self.slot is None:
            self.version = None

    def _free_cache(self) -> None:
        if self._sleeps and not self._cache_sleeps:
            self._release("kv_cache")
            self._cache_sleeps = True

    def _reload(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        raise NotImplementedError

    def _restore(self, tag: str) -> None:
        raise NotImplementedError

    def _release(self, tag: str) -> None:
        raise NotImplementedError

    def _fingerprints(self) -> dict[str, bytes]:
        """Return hashes of what must survive until the next load: buffers (rotary tables, ...), adapters, sleeping
        weights."""
        tensors = dict(self.model.named_buffers()) | dict(self.slot.held() if self.slot else ())
        if self._sleeps and self.slot:
            tensors |= dict(self.model.named_parameters())
        return fingerprints(tensors.items())

    def _lost_tensor(self) -> str:
        found = self._fingerprints() if self.checksums else {}
        lost = [name for name in self.checksums if found.get(name) != self.checksums[name]]
        return f"the engine lost {lost[0]} since its weights were loaded ({len(lost)} tensors)" if lost else ""

    def close(self) -> None:
        """Free everything but the default group; idempotent."""
        self._stop()
        if self.slot is not None:
            self.slot.close()
        self.slot = None
        self.under_way.clear()
        self._aborted.clear()
        self.version = None

    def _stop(self) -> None:
        raise NotImplementedError
