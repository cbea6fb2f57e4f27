"""`World`: one rank's view of all ranks. Who it is, where it meets the others, and how it ends with them.

    with World.open(Path(cfg.run.dir), cfg.journal.stall_seconds) as world:
        lengths = world.gather("plan: lengths", [len(x) for x in mine])  # [all]

It knows no model, batch or algorithm. Methods marked [all] meet the other ranks: no rank-local condition around them.
"""

import faulthandler
import math
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmd_rl.base.process import die_with_parent
from spmd_rl.distributed.collectives import Collectives
from spmd_rl.distributed.journal import Journal
from spmd_rl.distributed.membership import Membership, Rendezvous, form_group, host_backend, join, membership, mesh
from spmd_rl.distributed.supervisor import Supervisor
from spmd_rl.types import Node

_JOIN_SECONDS = 600
ExitCallback = Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], None]


@dataclass(frozen=True, slots=True)
class Subset:
    """Which ranks of the job a world has."""

    name: str
    ranks: tuple[int, ...]
    written: bool


ALL = Subset("", (), True)


class World(Collectives):
    """Where this rank stands, and how it meets the others. Made by `World.open`, or by `solo` in tests.

    All ranks of the job, or some of them: see `subset`. Metadata travels by the methods of `Collectives`.
    """

    _num_formed: ClassVar[Counter[tuple[str, tuple[int, ...]]]] = Counter()

    def __init__(self, me: Membership, rendezvous: Rendezvous, journal: Journal, subset: Subset = ALL) -> None:
        super().__init__(rendezvous.host, partial(self.collective, kind="wait"))
        self._me, self._rendezvous, self._subset = me, rendezvous, subset
        self.ranks = subset.ranks or tuple(range(me.size))
        """Numbers of these ranks in the job; `rank` is an index of it."""
        self.rank, self.size = self.ranks.index(me.rank), len(self.ranks)
        self.local_rank, self.local_size = me.local_rank, me.local_size
        """Index of this rank on its machine, and the number of the job's ranks there."""
        self.device = me.device
        self.store = dist.PrefixStore(f"world/{subset.name}", rendezvous.store)
        """Keys of this start. For the main thread; another thread takes a `clone_store()`."""
        self.journal = journal
        sockets = Path(tempfile.gettempdir()) / f"spmd-rl-{rendezvous.nonce}-{me.node}"
        first = me.rank - me.local_rank  # the ranks of a machine are numbered one after another
        before = sum(first <= rank < me.rank for rank in self.ranks)
        self.node = Node(me.rank, before, f"ipc://{sockets}/host")
        self._callbacks: list[Callable[[], None]] = []
        self._failed: ExitCallback = lambda kind, error, traceback: None

    @classmethod
    @contextmanager
    def open(cls, run_dir: Path, stall_seconds: float, debug: bool = False) -> Iterator["World"]:
        """[all] Form the world; leave it in order, or, with an exception pending, without meeting anyone.

        A stall, a signal or another rank's error ends the process from within, without unwinding. UserError if this
        node has too few devices. debug: a debugger may hold this rank for ever, and gets Ctrl-C.
        """
        me = membership()
        if me.launched:
            die_with_parent()
        if me.device.type == "cpu":
            _add_in_order()
        faulthandler.dump_traceback_later(max(_JOIN_SECONDS, stall_seconds), exit=True)
        rendezvous = join(me)
        journal = Journal(run_dir / "journal", me.rank, size=me.size, pid=os.getpid(), nonce=rendezvous.nonce)
        world = cls(me, rendezvous, journal)
        stall_seconds = math.inf if debug else stall_seconds
        signals = [signal.SIGTERM] if debug else [signal.SIGTERM, signal.SIGINT]
        supervisor = Supervisor(me, world.clone_store(), world, journal, run_dir, stall_seconds, signals)
        supervisor.shutdown.callbacks = world._callbacks
        world._failed = supervisor.on_exception
        faulthandler.cancel_dump_traceback_later()
        with ExitStack() as stack:
            if me.size == 1:
                stack.callback(dist.destroy_process_group)  # meets nobody: also with an exception pending
            stack.push(supervisor.on_exception)
            yield world
            supervisor.leaving()
            world.barrier("end of run")
            supervisor.close()
        if me.size > 1:
            dist.destroy_process_group()
        journal.note("end")
        journal.close()

    @contextmanager
    def resources(self) -> Iterator[ExitStack]:
        """What the run holds: an `ExitStack` that reports an exception to the other ranks before it unwinds.

        What it holds may then be slow to close: the other ranks have ended by then, and this one has a few seconds.
        """
        with ExitStack() as stack, ExitStack() as first:
            first.push(self._failed)
            yield stack

    def on_exit(self, callback: Callable[[], None]) -> None:
        """Let rank 0 call `callback` when a signal, a stall or another rank's error ends the process.

        `with` blocks are not left then. It runs on a thread of its own, beside whatever the main thread does, has three
        seconds, and may meet nobody. On the other ranks, and at an orderly end, nothing is called.
        """
        self._callbacks.append(callback)

    def mesh(self, **axes: int) -> DeviceMesh:
        """[all] A mesh over all ranks, the last axis varying fastest: `mesh(dp=2, tp=2)`. UserError if impossible."""
        return mesh(self._unique(f"{self._subset.name} mesh", self.ranks), self.ranks, self.rank, self.device, axes)

    def process_group(
        self, name: str, backend: str | None = None, ranks: Sequence[int] | None = None
    ) -> dist.ProcessGroup | None:
        """[all] Form a torch process group for a library's own use; None in a world without groups.

        backend: that of the default group, unless given. ranks: indices, like `rank`, of its members, which alone call
        this then; all, unless given.
        """
        members = self.ranks if ranks is None else tuple(self.ranks[rank] for rank in ranks)
        return form_group(self._unique(name, members), members, backend) if dist.is_initialized() else None

    def subset(self, name: str, ranks: Sequence[int], written: bool = True) -> "World | None":
        """[ranks] The same interface over some of these ranks (indices, like `rank`), on those; None on the others.

        The subset that has all ranks is this world itself. name: for reports; two subsets of one name must not share
        ranks. written: whether its meetings are, in the journal's file, which is progress; a hang report shows them in
        any case.
        """
        members = tuple(self.ranks[rank] for rank in ranks)
        if written and members == self.ranks:
            return self
        if self._me.rank not in members:
            return None
        name = f"{self._subset.name}/{name}" if self._subset.name else name
        unique = self._unique(f"{name} host", members)
        host = form_group(unique, members, host_backend(self._me)) if len(members) > 1 else None  # [ranks]
        rendezvous = replace(self._rendezvous, host=host)
        world = World(self._me, rendezvous, self.journal, Subset(name, members, written))
        world._callbacks = self._callbacks
        return world

    def _unique(self, what: str, ranks: tuple[int, ...]) -> str:
        """A name for a group of these ranks, the same on all of them."""
        self._num_formed[what, ranks] += 1
        return f"{what} {self._num_formed[what, ranks]}"

    def clone_store(self) -> dist.Store:
        """A connection of its own to the same keys: a store's `add` waits behind another thread's `wait`."""
        return self.store.clone()

    def exchange(
        self, name: str, rows: Tensor, sent: Sequence[int], received: Sequence[int], agreed: Any = None
    ) -> Tensor:
        """[all] One all-to-all of rows, uint8 [n, bytes], on the CPU: this rank's, by the rank that they go to.

        sent, received: rows that go to and come from each rank; any may be 0. Returns what comes, by rank. agreed: what
        those numbers follow from, the same everywhere (see `agree`), like the bytes of a row: else RunFailed on all
        ranks, before any row is read.
        """
        self.agree(name, [rows.shape[1], agreed])  # [all]
        assert len(rows) == sum(sent), "other rows than was agreed"
        if self.size == 1:
            return rows
        sent, received = list(sent), list(received)
        arrived = rows.new_empty(sum(received), rows.shape[1])
        with self.collective(f"{name}: rows", kind="wait"):  # [all]
            dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=self._rendezvous.host)
        return arrived

    def collective(
        self,
        name: str,
        kind: str = "compute",
        part: str = "",
        ranks: Sequence[int] | None = None,
        written: bool = True,
    ) -> AbstractContextManager[int]:
        """[all] Journal a meeting that happens inside a library (FSDP, checkpoints), so that a report can name it.

        kind: what most of the time inside is; see `Journal.kind`. part, ranks: the meeting is one of these ranks
        (indices, like `rank`) alone, which number theirs apart under this name. written: as in `subset`.
        """
        subset, members = self._subset, self._subset.ranks
        if ranks is not None:
            members = tuple(self.ranks[rank] for rank in ranks)
        where = "/".join(filter(None, (subset.name, part)))
        return self.journal.collective(name, kind, where, members, subset.written and written)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Charge the time inside to a phase; see `Journal.phase`."""
        return self.journal.phase(name)

    def progress(self, n: int = 1) -> None:
        """Something moved (an engine step, a micro-batch, bytes): this is no stall."""
        self.journal.progress += n


def _add_in_order() -> None:
    """Let several threads add the gradients of equal rows (`x[index]`) in one order: ours, libraries' and users' own.

    On the CPU this costs nothing; without it the order is whichever thread comes first, and no rerun is exact.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # would write all memory twice
