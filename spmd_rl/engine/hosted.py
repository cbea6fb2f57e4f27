"""`HostedEngine`: what engines over a package of others share: the requests under way, sleep, what may be lost.

Left out: how a request is computed, and how weights get in.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from spmd_rl.base.errors import RunFailed
from spmd_rl.engine.base import Capacity, Engine, EngineCounts
from spmd_rl.engine.given_adapters import GivenAdapters
from spmd_rl.engine.sequence import SequenceState, TextOf, check
from spmd_rl.model.fingerprint import finish, start
from spmd_rl.types import Completion, Request


class HostedEngine(Engine):
    """An `Engine` whose class has a `model`, and says how to `_reload`, `_release`, `_restore` and `_stop` it."""

    model: nn.Module
    """The module that the package computes with in this process."""

    def __init__(
        self,
        capacity: Capacity,
        shapes: Mapping[str, torch.Size],
        sleeps: bool,
        text_of: TextOf,
        slot: GivenAdapters | None = None,
    ) -> None:
        """`shapes`: of the weights that `load` must bring, by Hugging Face name. `sleeps`: outside `awake`.

        `slot`: where an adapter is computed with; then `load` may bring adapters alone, once it has brought all.
        """
        self.capacity, self.shapes, self.slot = capacity, shapes, slot
        self._sleeps, self.text_of = sleeps, text_of
        self.under_way: dict[str, SequenceState] = {}
        """What each request has, by id."""
        self.version: int | None = None
        """The version of the weights; None before the first, and while there are none that are whole."""
        self.token_counts = EngineCounts()
        self.lost = ""
        """What is not as it was when the weights had been loaded: no request is taken until it is emptied."""
        self._aborted: list[Completion] = []
        self.num_added = 0
        self._first: str | None = None  # the first request since the load: none has computed anything it could reuse
        self.checksums: dict[str, bytes] = {}
        self._num_awake = 0
        self._cache_sleeps = False
        if sleeps:
            self._sleep()

    @property
    def num_unfinished(self) -> int:
        """Requests whose completion has not been handed out."""
        return len(self.under_way) + len(self._aborted)

    def begin(self, request: Request) -> SequenceState:
        """Take a request; refusals as `Engine.add` has them."""
        assert self.version is not None, "no weights loaded in this process"
        if self.lost:
            raise RunFailed(self.lost)
        assert request.id not in self.under_way, f"request {request.id} is under way already"
        check(request, self.capacity.max_tokens)
        if self._cache_sleeps:
            self._wake("kv_cache")
        self.num_added += 1
        if self._first is None:
            self._first = request.id
        row = self.under_way[request.id] = SequenceState(request)
        return row

    def count_prompt(self, request: Request, cached: int) -> None:
        """Note how many of a prompt's tokens were not computed. RunFailed where none can have been there."""
        self.token_counts.count(len(request.prompt_ids), cached)
        if request.id == self._first:
            self._first = ""
            if cached:
                raise RunFailed(f"the engine served keys and values older than version {self.version}")

    def take(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Take over all weights, or adapters alone; what is wrong with them. All are read in any case."""
        if self.slot is None:
            return self._reload(weights)
        base = self.slot.base(weights, is_first=not self.checksums)
        faults = self._reload(base) if self.slot.brings_base else []
        return faults + self.slot.put()

    def taken(self, plain: Iterator[tuple[str, Tensor | None]]) -> Iterator[tuple[str, Tensor | None]]:
        """What the engine holds of what the last load brought; plain: of the model's weights."""
        if self.slot is None:
            return plain
        return chain(plain if self.slot.brings_base else (), self.slot.held())

    def end_load(self, version: int, faults: list[str]) -> None:
        """End a load. RunFailed names the first fault."""
        if faults := [*filter(None, [self.lost]), *faults]:
            raise RunFailed(f"engine weights of version {version}: {faults[0]} ({len(faults)} faults)")
        self.version, self._first = version, None
        self.checksums = self._fingerprints()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Weights on the device; nests. Where it sleeps outside, the KV cache follows with the first request.

        If anything that stood when the weights had been loaded is not as it was, the next `add` or `load` is RunFailed.
        """
        if self._num_awake == 0:
            if self._sleeps:
                self._wake("weights")
            self.lost = self.lost or self._lost_tensor()
        self._num_awake += 1
        try:
            yield
        finally:
            self._num_awake -= 1
        if self._sleeps and self._num_awake == 0:  # not with an exception pending: the process is about to end
            self._sleep()

    def _wake(self, tag: str) -> None:
        """Give `weights` or `kv_cache` their memory on the device back."""
        torch.accelerator.empty_cache()  # the package allocates past torch, which may keep what the trainer has freed
        self._restore(tag)
        self._cache_sleeps = self._cache_sleeps and tag != "kv_cache"

    def _sleep(self) -> None:
        """Weights to host memory, bit by bit; the KV cache is given up."""
        if self._cache_sleeps:  # a package may count as asleep until all is awake, and would not let the weights go
            self._wake("kv_cache")
        self._release()
        self._cache_sleeps = True

    def _reload(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        raise NotImplementedError

    def _restore(self, tag: str) -> None:
        raise NotImplementedError

    def _release(self) -> None:
        raise NotImplementedError

    def _fingerprints(self) -> dict[str, bytes]:
        """Hash what must survive until the next load: buffers (rotary tables, ...), adapters, weights that sleep."""
        tensors = dict(self.model.named_buffers()) | dict(self.slot.held() if self.slot else ())
        if self._sleeps:
            tensors |= dict(self.model.named_parameters())
        return finish({name: start(tensor) for name, tensor in tensors.items()})

    def _lost_tensor(self) -> str:
        """What is not as it was when the weights had been loaded, or nothing."""
        found = self._fingerprints() if self.checksums else {}
        lost = [name for name in self.checksums if found.get(name) != self.checksums[name]]
        return f"the engine lost {lost[0]} since its weights were loaded ({len(lost)} tensors)" if lost else ""

    def close(self) -> None:
        """Free everything; idempotent. The default process group stays."""
        self._stop()
        if self.slot is not None:
            self.slot.close()
        self.slot = None
        self.under_way.clear()
        self._aborted.clear()
        self.version = None

    def _stop(self) -> None:
        raise NotImplementedError
