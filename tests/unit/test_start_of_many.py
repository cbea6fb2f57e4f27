"""What the start of thousands of ranks asks of the store, counted, and what their meetings pass on."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from spmd_rl.distributed import membership
from spmd_rl.distributed.membership import Membership


class Counting(dist.Store):
    """A rank's connection to a store, which counts what the rank asks for."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store, self.num_gets = store, 0

    def set(self, key, value):
        self.store.set(key, value)

    def get(self, key):
        self.num_gets += 1
        return self.store.get(key)

    def wait(self, *args):
        self.store.wait(*args)

    def has_extended_api(self):
        return False


def num_gets(size: int) -> tuple[int, int]:
    """Reads of the store by all ranks of a new gloo group, and after its first all-gather."""
    store, groups, counts = dist.HashStore(), {}, []
    connections = [Counting(store) for _ in range(size)]

    def everywhere(work) -> None:
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts.append(sum(connection.num_gets for connection in connections))

    def form(rank: int) -> None:
        prefixed = dist.PrefixStore("group", connections[rank])
        groups[rank] = dist.ProcessGroupGloo(prefixed, rank, size, timedelta(seconds=60))

    def gather(rank: int) -> None:
        groups[rank].allgather([[torch.zeros(1) for _ in range(size)]], [torch.ones(1)]).wait()

    everywhere(form)
    everywhere(gather)
    return counts[0], counts[1]


@pytest.fixture
def joined(monkeypatch):
    """What `join` leaves in the environment."""
    for name in ("TORCH_GLOO_LAZY_INIT", "GLOO_SOCKET_IFNAME", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert not dist.is_initialized(), "another test has left its default group"
    membership.join(Membership(0, 1, 0, 1, node="0", launched=False, device=torch.device("cpu")))
    dist.destroy_process_group()


def test_ranks_read_a_few_addresses_and_not_those_of_all_others(joined, monkeypatch):
    """At 4,096 ranks 8,192 reads a group in place of 16.8 million, for which a store needs four minutes or more."""
    assert [num_gets(size) for size in (4, 8, 16)] == [(0, 8), (0, 16), (0, 32)]
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    assert num_gets(8) == (64, 64)


@pytest.fixture
def many():
    dist.init_process_group("fake", store=FakeStore(), rank=77, world_size=4096)
    yield list(range(4096))
    dist.destroy_process_group()


def test_groups_of_many_ranks_have_short_names(many):
    lines = [many[:4096:2][:-1] + [77], many[64:128]]
    names = [membership.form_group("mesh fsdp 1", line, "fake").group_name for line in map(sorted, lines)]
    assert len(set(names)) == 2 and max(map(len, names)) < 80


def test_an_axis_of_a_device_has_no_group_for_the_host(many, monkeypatch):
    monkeypatch.setattr(dist, "get_default_backend_for_device", lambda device: "fake")
    axes = {"dp_replicate": 64, "fsdp": 8, "tp": 8}
    mesh = membership.mesh("mesh 1", many, 77, torch.device("cuda", 5), axes)
    configs = {axis: distributed_c10d._world.pg_backend_config[mesh.get_group(axis)] for axis in axes}
    assert configs == dict.fromkeys(axes, "cuda:fake")


def test_a_meeting_is_a_ring_of_nodes(many, monkeypatch):
    """Messages one after the other in an all-gather at 512 nodes of eight: 511 in place of 4,095."""
    formed = {}
    monkeypatch.setattr(membership, "form_group", lambda name, ranks, backend: formed.setdefault(name, list(ranks)))
    groups = membership.form_host_groups("host", many, [rank // 8 * 8 for rank in many])
    assert groups.leaders is None and formed["host near"] == list(range(72, 80))
    monkeypatch.setattr(dist, "get_rank", lambda: 72)
    groups = membership.form_host_groups("host", many, [rank // 8 * 8 for rank in many])
    assert groups.leaders == many[::8] and len(groups.leaders) - 1 == 511
