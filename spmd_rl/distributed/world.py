"""`World`: one rank's view of all ranks: identity, collectives, and their common end.

    with World.open(Path(cfg.run.dir), cfg.journal.stall_seconds) as world:
        lengths = world.gather("plan: lengths", [len(x) for x in mine])  # [all]

Methods marked [all] meet other ranks: no rank-local condition around them.
"""

import faulthandler
import math
import os
import platform
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
from spmd_rl.distributed.membership import Membership, Rendezvous, form_group, form_host_groups, join, membership, mesh
from spmd_rl.distributed.stop import StopRequest
from spmd_rl.distributed.supervisor import Supervisor
from spmd_rl.types import Node

_JOIN_SECONDS, _JOIN_SECONDS_A_RANK = 600, 0.25
ExitCallback = Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], None]


@dataclass(frozen=True, slots=True)
class Subset:
    """Ranks of the job in a world."""

    name: str
    ranks: tuple[int, ...]
    written: bool


ALL = Subset("", (), True)


class World(Collectives):
    """A rank's identity and collectives, over all ranks of the job or a `subset`. Made by `World.open`, or `solo` in
    tests."""

    _num_formed: ClassVar[Counter[tuple[str, tuple[int, ...]]]] = Counter()

    def __init__(self, me: Membership, rendezvous: Rendezvous, journal: Journal, subset: Subset = ALL) -> None:
        super().__init__(rendezvous.host, partial(self.collective, kind="wait"))
        self._me, self._rendezvous, self._subset = me, rendezvous, subset
        self.ranks = subset.ranks or tuple(range(me.size))
        """Job's ranks in this world, indexed by `rank`"""
        self.rank, self.size = self.ranks.index(me.rank), len(self.ranks)
        self.local_rank, self.local_size = me.local_rank, me.local_size
        """Index on this machine, and number of the job's ranks there"""
        self.nodes = [(rendezvous.nodes or range(me.size))[rank] for rank in self.ranks]
        """Job's first rank on each rank's machine"""
        self.device = me.device
        self.store = dist.PrefixStore(f"world/{subset.name}", rendezvous.store)
        """Keys of this start, for the main thread; others take a `clone_store()`"""
        self.stop = StopRequest(dist.PrefixStore(f"world/{ALL.name}", rendezvous.store))
        """Signal that asked the job to save and end"""
        self.journal = journal
        sockets = Path(tempfile.gettempdir()) / f"spmd-rl-{rendezvous.nonce}-{me.node}"
        # torchrun numbers the ranks of a machine consecutively.
        first = me.rank - me.local_rank
        before = sum(first <= rank < me.rank for rank in self.ranks)
        self.node = Node(me.rank, before, f"ipc://{sockets}/host")
        self._callbacks: list[Callable[[], None]] = []
        self._failed: ExitCallback = lambda kind, error, traceback: None

    @classmethod
    @contextmanager
    def open(cls, run_dir: Path, stall_seconds: float, debug: bool = False) -> Iterator["World"]:
        """[all] Form the world; leave it in order, or, on an exception, without meeting other ranks.

        A stall, another rank's error, or a signal that `stop` does not accept ends the process without unwinding.
        UserError if this node has too few devices. debug: tolerate a debugger that stops this rank, and leave Ctrl-C to
        it.
        """
        me = membership()
        if me.launched:
            # torchrun's agent may be killed: its ranks must not survive and hold their devices.
            die_with_parent()
        if me.device.type == "cpu":
            _add_in_order()
        # A rendezvous waits for missing ranks without limit, and no watchdog runs yet.
        patience = _JOIN_SECONDS + _JOIN_SECONDS_A_RANK * me.size
        faulthandler.dump_traceback_later(max(patience, stall_seconds), exit=True)
        rendezvous = join(me)
        process = {"pid": os.getpid(), "host": platform.node()}
        journal = Journal(run_dir / "journal", me.rank, size=me.size, nonce=rendezvous.nonce, **process)
        world = cls(me, rendezvous, journal)
        stall_seconds = math.inf if debug else stall_seconds
        signals = [signal.SIGTERM, signal.SIGUSR1, *([] if debug else [signal.SIGINT])]
        supervisor = Supervisor(me, world.clone_store(), world, journal, run_dir, stall_seconds, signals)
        supervisor.shutdown.callbacks = world._callbacks
        world._failed = supervisor.on_exception
        faulthandler.cancel_dump_traceback_later()
        with ExitStack() as stack:
            if me.size == 1:
                # A world of one destroys its group even with an exception pending, since this meets no other rank.
                stack.callback(dist.destroy_process_group)
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
        """Yield an `ExitStack` that reports an exception to other ranks before it unwinds.

        Its contents may close slowly, within a few seconds after the other ranks' end.
        """
        with ExitStack() as stack, ExitStack() as first:
            first.push(self._failed)
            yield stack

    def on_exit(self, callback: Callable[[], None]) -> None:
        """Let rank 0 call `callback` when a signal, a stall or another rank's error ends the process.

        `with` blocks are not left then. It runs on a new thread, concurrently, has three seconds, and must not meet
        other ranks.
        """
        self._callbacks.append(callback)

    def mesh(self, **axes: int) -> DeviceMesh:
        """[all] Form a mesh over all ranks, last axis fastest: `mesh(dp=2, tp=2)`. UserError if impossible."""
        return mesh(self._unique(f"{self._subset.name} mesh", self.ranks), self.ranks, self.rank, self.device, axes)

    def process_group(
        self, name: str, backend: str | None = None, ranks: Sequence[int] | None = None
    ) -> dist.ProcessGroup | None:
        """[all] Form a torch process group for a library; None in a world without groups.

        backend: the default group's by default. ranks: its members' indices, like `rank`, which alone call this; all by
        default.
        """
        members = self.ranks if ranks is None else tuple(self.ranks[rank] for rank in ranks)
        return form_group(self._unique(name, members), members, backend) if dist.is_initialized() else None

    def subset(self, name: str, ranks: Sequence[int], written: bool = True) -> "World | None":
        """[ranks] Return a world of these ranks (indices, like `rank`) on them; None on others.

        The subset of all ranks is this world. name: for reports; subsets of one name must not share ranks. written:
        collectives go to the journal's file, which counts as progress; a hang report has them in any case.
        """
        members = tuple(self.ranks[rank] for rank in ranks)
        if written and members == self.ranks:
            return self
        if self._me.rank not in members:
            return None
        name = f"{self._subset.name}/{name}" if self._subset.name else name
        unique = self._unique(f"{name} host", members)
        host = form_host_groups(unique, members, self._rendezvous.nodes) if len(members) > 1 else None  # [ranks]
        rendezvous = replace(self._rendezvous, host=host)
        world = World(self._me, rendezvous, self.journal, Subset(name, members, written))
        world._callbacks = self._callbacks
        return world

    def _unique(self, what: str, ranks: tuple[int, ...]) -> str:
        self._num_formed[what, ranks] += 1
        return f"{what} {self._num_formed[what, ranks]}"

    def clone_store(self) -> dist.Store:
        """Return a new connection to the same keys."""
        # A store's `add` waits behind another thread's `wait` on the same connection.
        return self.store.clone()

    def exchange(
        self, name: str, rows: Tensor, sent: Sequence[int], received: Sequence[int], agreed: Any = None
    ) -> Tensor:
        """[all] Exchange rows, uint8 [n, bytes], sorted by destination, on the CPU; return them by rank.

        sent, received: rows to and from each rank, perhaps 0. agreed: data that determines them; RunFailed on all ranks
        if it, or the bytes of a row, differ.
        """
        # Messages of other sizes would hang or be taken for others.
        self.agree(name, [rows.shape[1], agreed])  # [all]
        assert len(rows) == sum(sent), "other rows than was agreed"
        if self.size == 1:
            return rows
        with self.collective(f"{name}: rows", kind="wait"):  # [all]
            return self._rendezvous.host.exchange(rows.contiguous(), sent, received)

    def collective(
        self,
        name: str,
        kind: str = "compute",
        part: str = "",
        ranks: Sequence[int] | None = None,
        written: bool = True,
    ) -> AbstractContextManager[int]:
        """[all] Journal a collective inside a library (FSDP, checkpoints), for reports.

        kind: see `Journal.kind`. part, ranks: for a collective of these ranks alone, with its own numbers. written: as
        in `subset`.
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
        """Count progress: an engine step, a micro-batch, bytes."""
        self.journal.progress += n


def _add_in_order() -> None:
    """Make gradients of equal rows (`x[index]`) sum in a fixed order, in libraries too."""
    # By default several threads add in the order of their timing, and no rerun is exact. On the CPU the fixed order
    # costs nothing.
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Deterministic mode also fills uninitialised memory by default, which would write all memory twice.
    torch.utils.deterministic.fill_uninitialized_memory = False
