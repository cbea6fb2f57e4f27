"""A rank's identity and rendezvous: torchrun's environment, store, process groups.

Without torchrun it is a world of one over an in-process store.
"""

import hashlib
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from spmd_rl.base.errors import UserError
from spmd_rl.base.waits import waiting
from spmd_rl.distributed import shared_group
from spmd_rl.distributed.device_files import device_file, driver
from spmd_rl.distributed.host_groups import HostGroups

# The watchdog alone decides on stalls, never a library's timeout.
FOREVER = timedelta(days=365)
# Backend of host memory among ranks of one machine.
NEAR = shared_group.NAME if sys.platform == "linux" else "gloo"


@dataclass(frozen=True, slots=True)
class Membership:
    """One rank's place in the world."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: str
    """Name equal on ranks of one torchrun agent, which share a pid namespace"""
    launched: bool
    """True if torchrun, or a launcher with its variables, started this process"""
    device: torch.device


def membership() -> Membership:
    """Read torchrun's environment; without it, return a world of one."""
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
    """Return this rank's accelerator, made current, or the CPU without a visible one."""
    if not torch.accelerator.is_available():
        if fault := unusable_device():
            raise UserError(": ".join(fault))
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise UserError(f"--nproc-per-node: local rank {local_rank} has no device, this node shows {count}")
    torch.accelerator.set_device_index(local_rank)
    return torch.device(torch.accelerator.current_accelerator().type, local_rank)


def unusable_device() -> tuple[str, str] | None:
    """Return why torch cannot use this machine's accelerator, and the remedy; None if it can."""
    if (found := device_file()) is None:
        return None
    path, hiding = found
    built = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    build = next((f"{kind} {version}" for kind, version in built.items() if version), "no GPU")
    version = driver() if "nvidia" in path else ""
    given = "".join(f", {name}={os.environ[name]}" for name in hiding if name in os.environ)
    told = f"this machine has {path}{version}, but torch {torch.__version__}, built for {build}, finds no device{given}"
    cure = "install a torch for this driver, or a driver for this torch; docker: --gpus all; Slurm: --gpus-per-node"
    return told, f"{cure}; to run on the CPU, set {hiding[0]}= (empty)"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Store and groups that ranks share."""

    store: dist.Store
    nonce: str
    """random name that only this start's ranks know"""
    host: HostGroups | None
    """groups for metadata and samples in host memory; None at size 1"""
    # By rank, the first rank of its node.
    nodes: tuple[int, ...] = ()


def join(me: Membership) -> Rendezvous:
    """[all] Form the default group, for libraries, and the host group, for this package."""
    # With one group, a rank that skips a library's collective would feed it the bytes of our next one. With two it
    # hangs, and the watchdog names it.
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    same = "does the same command run on every node, and can they reach that address?"
    with waiting(f"waiting at {where} until all {me.size} ranks are there ({same})", me.local_rank == 0):
        return _join(me)


def _join(me: Membership) -> Rendezvous:
    if me.launched:
        store, _, _ = next(rendezvous("env://", timeout=FOREVER))
    else:
        store = dist.HashStore()
        # gloo opens a listening socket even for one rank; on `lo` it is not reachable from other machines.
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    nonce = _agree_on_nonce(store, me.rank, me.size)
    # Keys of an earlier start in the same store, addresses of the dead included, stay out of sight.
    store = dist.PrefixStore(nonce, store)
    backend = NEAR if me.local_size == me.size > 1 else "gloo"
    if me.device.type != "cpu":
        # Without gloo beside it, in which each rank reads the addresses of all others: 16.8 million reads at 4,096.
        # Not bound to its device (`device_id`): groups of a bound one are split from it, by all ranks together.
        backend = dist.get_default_backend_for_device(me.device)
    dist.init_process_group(backend, store=store, rank=me.rank, world_size=me.size, timeout=FOREVER)
    if me.size == 1:
        return Rendezvous(store, nonce, None)
    nodes = nodes_of(_said_by_all(store, me))  # [all]
    return Rendezvous(store, nonce, form_host_groups("host", range(me.size), nodes), nodes)


def _said_by_all(store: dist.Store, me: Membership) -> list[list[int]]:
    """[all] Return the argument of `nodes_of`."""
    store.set(f"node/{me.rank}", json.dumps([me.rank - me.local_rank, me.local_size]))
    if me.rank == 0:
        found = store.multi_get([f"node/{rank}" for rank in range(me.size)])
        store.set("nodes", f"[{b','.join(found).decode()}]")
    return json.loads(store.get("nodes"))


def nodes_of(said: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the first rank of each rank's node. said: by rank, that number and the node's ranks."""
    first = [begin for begin, _ in said]
    blocks = _by_node(range(len(said)), first)
    # torchrun counts node by node. Other launchers may not: then no rank is known to share another one's memory.
    if all(blocks[begin] == [*range(begin, begin + size)] for begin, size in said):
        return tuple(first)
    return tuple(range(len(said)))


def form_host_groups(name: str, ranks: Sequence[int], nodes: Sequence[int]) -> HostGroups:
    """[ranks] Form these ranks' host groups. nodes: see `Rendezvous`."""
    found, me = _by_node(ranks, nodes), dist.get_rank()
    ours = found[nodes[me]]
    near = form_group(f"{name} near", ours, NEAR) if len(ours) > 1 else None
    first = [block[0] for block in found.values()]
    leaders = form_group(f"{name} leaders", first, "gloo") if me in first and len(first) > 1 else None
    places = {rank: place for place, rank in enumerate(ranks)}
    blocks = tuple(tuple(places[rank] for rank in block) for block in found.values())
    return HostGroups(places[me], blocks, near, leaders)


def _by_node(ranks: Sequence[int], nodes: Sequence[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(nodes[rank], []).append(rank)
    return found


def form_group(name: str, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """[ranks] Form a process group of these ranks, which alone call this.

    name: unique to them in this start. backend: the default group's by default.
    """
    default = distributed_c10d._get_default_group()
    default_backend, store = distributed_c10d._world.pg_map[default]
    # `torch.distributed.new_group` numbers its groups, so that all ranks of the job must call it for every group.
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(default.rank()),
        list(ranks),
        dist.Backend(backend or default_backend),
        store,
        # The name is part of every key of the group in the store, so that it must not list thousands of ranks.
        f"{name} {hashlib.blake2b(str(list(ranks)).encode(), digest_size=16).hexdigest()}",
        timeout=FOREVER,
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def _agree_on_nonce(store: dist.Store, rank: int, size: int) -> str:
    """[all] Return a random name of this start alone."""
    # A restarting agent gives its ranks the store of the last attempt, addresses of the dead included, and not always a
    # new restart count. So each rank asks under a random name, which only a living rank 0 can answer.
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


def mesh(name: str, ranks: Sequence[int], rank: int, device: torch.device, axes: dict[str, int]) -> DeviceMesh:
    """[ranks] Form a mesh of these ranks, the last axis varying fastest. UserError if impossible.

    name: unique to them in this start. rank: this rank's index among them.
    """
    product = math.prod(axes.values())
    if not axes or min(axes.values()) < 1 or product != len(ranks):
        asked = " x ".join(f"{name}={size}" for name, size in axes.items())
        raise UserError(f"impossible mesh: {asked} needs {product} ranks, the world has {len(ranks)}")
    grid = torch.tensor(list(ranks), dtype=torch.int).view(*axes.values())
    place = (grid == ranks[rank]).nonzero()[0].tolist()
    groups = []
    for dim, axis in enumerate(axes):
        line = grid.movedim(dim, -1)[*place[:dim], *place[dim + 1 :]].tolist()
        # A line of all ranks reuses the default group, which saves a second set of connections and buffers.
        whole = line == list(range(dist.get_world_size()))
        groups.append(dist.group.WORLD if whole else form_group(f"{name} {axis}", line))  # [ranks]
    return DeviceMesh.from_group(groups, device.type, mesh=grid, mesh_dim_names=tuple(axes))
