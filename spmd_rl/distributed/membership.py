"""Who this rank is and how the ranks find each other: torchrun's environment, the store, the process groups.

Without torchrun it is a world of one over an in-process store. Nothing here watches or ends anything.
"""

import math
import os
import secrets
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from spmd_rl.distributed import star
from spmd_rl.distributed.star import Meet
from spmd_rl.errors import UserError

FOREVER = timedelta(days=365)
"""Timeout of stores and groups: what is a stall is the journal's word, never that of a library's clock."""


@dataclass(frozen=True, slots=True)
class Membership:
    """One rank's place in the world."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: str
    """Equal on the ranks that one agent started, hence share a pid namespace."""
    launched: bool
    """Whether torchrun (or anything that sets its variables) started us."""
    device: torch.device


def membership() -> Membership:
    """Read torchrun's environment; without it, a world of one."""
    env = os.environ
    launched = "LOCAL_RANK" in env
    local_rank = int(env["LOCAL_RANK"]) if launched else 0
    return Membership(
        rank=int(env["RANK"]) if launched else 0,
        size=int(env["WORLD_SIZE"]) if launched else 1,
        local_rank=local_rank,
        local_size=int(env["LOCAL_WORLD_SIZE"]) if launched else 1,
        node=env.get("GROUP_RANK", "0"),
        launched=launched,
        device=_device(local_rank),
    )


def _device(local_rank: int) -> torch.device:
    """This rank's accelerator, made current, or the CPU."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise UserError(f"--nproc-per-node: local rank {local_rank} has no device, this node shows {count}")
    torch.accelerator.set_device_index(local_rank)
    return torch.device(torch.accelerator.current_accelerator().type, local_rank)


@dataclass(frozen=True, slots=True)
class Joined:
    """What a rank shares with the others."""

    store: dist.Store
    """of this start alone"""
    nonce: str
    """a random word that only this start's ranks know"""
    machines: tuple[range, ...]
    """the ranks of each machine, in order"""
    rows: dist.ProcessGroup | None
    """gloo over all ranks, for samples; None at size 1"""


def join(me: Membership) -> Joined:
    """[all] Form the groups.

    That for samples is apart from the library's, so that a rank that skips one of those hangs where the watchdog can
    name it, instead of feeding its bytes into the library's.
    """
    if me.launched:
        store, _, _ = next(rendezvous("env://", timeout=FOREVER))
    else:
        store = dist.HashStore()
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo listens even alone: not beyond this machine
    nonce = _agree_on_nonce(store, me.rank, me.size)
    store = dist.PrefixStore(nonce, store)
    backend, device_id = "gloo", None
    if me.device.type != "cpu":
        # FSDP's CPU offload and checkpoints reduce CPU tensors too
        backend = f"cpu:gloo,{me.device.type}:{dist.get_default_backend_for_device(me.device)}"
        device_id = me.device
    dist.init_process_group(
        backend, store=store, rank=me.rank, world_size=me.size, timeout=FOREVER, device_id=device_id
    )
    rows = dist.new_group(backend="gloo", timeout=FOREVER) if me.size > 1 else None
    return Joined(store, nonce, _machines(me, rows), rows)


def _machines(me: Membership, group: dist.ProcessGroup | None) -> tuple[range, ...]:
    """[all] The ranks of each machine: neighbours, as torchrun numbers them."""
    if me.local_size == me.size:
        return (range(me.size),)
    mine = me.rank - me.local_rank
    begins = [torch.zeros(1, dtype=torch.int64) for _ in range(me.size)]
    dist.all_gather(begins, torch.tensor([mine]), group=group)
    firsts = sorted({int(begin) for begin in begins})
    return tuple(range(begin, end) for begin, end in pairwise([*firsts, me.size]))


def meet(me: Membership, joined: Joined, name: str, size: int) -> Meet | None:
    """[all] How each block of `size` neighbouring ranks meets, and this rank in its own; None at size 1."""
    assert me.size % size == 0
    if size == 1:
        return None
    leaders, (mine,) = None, (ranks for ranks in joined.machines if me.rank in ranks)
    for begin in range(0, me.size, size):  # groups are formed by all ranks, members or not
        firsts = [
            max(begin, ranks.start) for ranks in joined.machines if begin < ranks.stop and ranks.start < begin + size
        ]
        if len(firsts) > 1:
            group = dist.new_group(firsts, timeout=FOREVER, backend="gloo")
            leaders = group if me.rank in firsts else leaders
    block = me.rank // size * size
    return star.connect(joined.store, name, me.rank, range(block, block + size), mine, leaders)


def _agree_on_nonce(store: dist.Store, rank: int, size: int) -> str:
    """[all] A random word that all ranks of this start share, and no other start.

    An agent that restarts its ranks hands them the store of the last attempt, addresses of the dead included, and not
    always a new restart count. So each rank asks under a word of its own, which only a living rank 0 can answer.
    """
    word = secrets.token_hex(8)
    if rank > 0:
        store.set(f"asks/{rank}", word)
        nonce = store.get(f"answer/{word}").decode()
        store.add(f"met/{nonce}", 1)
        return nonce
    answered: set[bytes] = set()
    while store.add(f"met/{word}", 0) < size - 1:
        for key in filter(lambda key: store.check([key]), (f"asks/{peer}" for peer in range(1, size))):
            if (asked := store.get(key)) not in answered:
                store.set(f"answer/{asked.decode()}", word)
                answered.add(asked)
        time.sleep(0.01)
    return word


def mesh(me: Membership, axes: dict[str, int]) -> DeviceMesh:
    """[all] A mesh over the whole world, the last axis varying fastest. UserError if it cannot be laid out."""
    product = math.prod(axes.values())
    if not axes or min(axes.values()) < 1 or product != me.size:
        told = " x ".join(f"{name}={size}" for name, size in axes.items())
        raise UserError(f"impossible mesh: {told} needs {product} ranks, the world has {me.size}")
    made = init_device_mesh(me.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    for group in made.get_all_groups():
        _set_pg_timeout(FOREVER, group)  # a subgroup starts with the library's own default
    return made
