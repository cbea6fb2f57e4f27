"""`World`: one rank's view of all ranks. Who it is, where it meets the others, and how it ends with them.

    with World.open(cfg) as world:
        lengths = world.gather("plan: lengths", [len(x) for x in mine])  # [all]

It knows no model, batch or algorithm. Methods marked [all] meet the other ranks: no rank-local condition around them.
"""

import faulthandler
import math
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spmd_rl.dist.collectives import Collectives, Reduction
from spmd_rl.dist.ending import End, Ending
from spmd_rl.dist.heartbeat import Heartbeats
from spmd_rl.dist.journal import Journal
from spmd_rl.dist.membership import Membership, join, membership, mesh
from spmd_rl.dist.report import Peer
from spmd_rl.dist.signals import SignalThread
from spmd_rl.dist.watchdog import Watchdog
from spmd_rl.errors import RunFailed, UserError
from spmd_rl.process import die_with_parent
from spmd_rl.types import Node

_JOIN_SECONDS = 120
_UNWIND_SECONDS = 5


class Settings(Protocol):
    """What `World.open` reads of a pipeline's settings: `run.dir` (resolved), `journal.stall_seconds`, `debug`."""

    run: Any
    journal: Any
    debug: bool


class World:
    """Where this rank stands, and how it meets the others. Made by `World.open`, or by `solo` in tests."""

    def __init__(self, me: Membership, store: dist.Store, nonce: str, collectives: Collectives, journal: Journal) -> None:
        self._me, self._collectives = me, collectives
        self.rank, self.size = me.rank, me.size
        self.local_rank, self.local_size = me.local_rank, me.local_size
        self.device = me.device
        self.store = dist.PrefixStore(nonce, store)
        """Keys of this start. For the main thread; another thread takes a `clone_store()`."""
        self.journal = journal
        sockets = Path(tempfile.gettempdir()) / f"spmd-rl-{nonce}-{me.node}"
        self.node = Node(me.rank, me.local_rank, f"ipc://{sockets}/host")
        self._callbacks: list[Callable[[], None]] = []

    @classmethod
    @contextmanager
    def open(cls, cfg: Settings) -> Iterator["World"]:
        """[all] Form the world; leave it in order, or, with an exception pending, without meeting anyone.

        A stall, a signal or another rank's error ends the process from within, without unwinding. UserError if this
        node has too few devices.
        """
        me = membership()
        if me.launched:
            die_with_parent()
        stall_seconds = math.inf if cfg.debug else cfg.journal.stall_seconds
        faulthandler.dump_traceback_later(max(_JOIN_SECONDS, cfg.journal.stall_seconds), exit=True)
        store, nonce, group = join(me)
        run_dir = Path(cfg.run.dir)
        journal = Journal(run_dir / "journal", me.rank, rank=me.rank, size=me.size, pid=os.getpid(), nonce=nonce)
        world = cls(me, store, nonce, Collectives(me.rank, me.size, group, journal), journal)
        with ExitStack() as stack:
            watch = _Watch(world, run_dir, stall_seconds, [signal.SIGTERM] if cfg.debug else [signal.SIGTERM, signal.SIGINT])
            faulthandler.cancel_dump_traceback_later()
            stack.push(watch.failed)
            yield world
            world.barrier("end of run")
            watch.close()
