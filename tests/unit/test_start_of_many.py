"""Groups of thousands of ranks, and what their meetings pass on."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from spmd_rl.distributed import membership


@pytest.fixture
def many():
    dist.init_process_group("fake", store=FakeStore(), rank=77, world_size=4096)
    yield list(range(4096))
    dist.destroy_process_group()


def test_groups_of_many_ranks_have_short_names(many):
    lines = [many[:4096:2][:-1] + [77], many[64:128]]
    names = [membership.form_group("mesh fsdp 1", line, "fake").group_name for line in map(sorted, lines)]
    assert len(set(names)) == 2 and max(map(len, names)) < 80


def test_an_axis_has_the_backend_of_the_default_group_alone(many):
    axes = {"dp_replicate": 64, "fsdp": 8, "tp": 8}
    mesh = membership.mesh("mesh 1", many, 77, torch.device("cuda", 5), axes)
    configs = {axis: distributed_c10d._world.pg_backend_config[mesh.get_group(axis)] for axis in axes}
    own = distributed_c10d._world.pg_backend_config[dist.group.WORLD]
    assert "gloo" not in own and configs == dict.fromkeys(axes, own)


class CountingStore(dist.Store):
    """A store in memory that counts what is read."""

    def __init__(self):
        super().__init__()
        self.values, self.num_reads = {}, 0

    def set(self, key, value):
        self.values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key):
        self.num_reads += 1
        return self.values[key]

    def multi_get(self, keys):
        return [self.get(key) for key in keys]


@pytest.mark.parametrize("rank", [0, 8, 77])
def test_a_start_on_devices_connects_first_ranks_of_nodes_alone(monkeypatch, rank):
    """At 512 nodes of eight: 512 x 512 reads of addresses, and two groups of eight in shared memory a node, where one
    gloo group of all ranks takes 4,096 x 4,096."""
    store, formed = CountingStore(), []
    places = [(peer // 8 * 8, 8) for peer in range(4096)]
    for peer, place in enumerate(places):
        store.set(f"/node/{peer}", str([*place]))
    store.set("/nodes", str([[*place] for place in places]))
    monkeypatch.setattr(membership, "rendezvous", lambda *_, **__: iter([(store, None, None)]))
    monkeypatch.setattr(membership, "_agree_on_nonce", lambda store, rank, size: "")
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: formed.append((backend, 4096)))
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(membership, "form_group", lambda name, ranks, backend: formed.append((backend, len(ranks))))
    me = membership.Membership(rank, 4096, rank % 8, 8, "0", True, torch.device("cuda", rank % 8))
    rendezvous = membership.join(me)
    assert formed == [("nccl", 4096), (membership.NEAR, 8)] + [("gloo", 512)] * (rank % 8 == 0)
    assert store.num_reads == 1 + 4096 * (rank == 0)
    assert rendezvous.host.size == 4096 and rendezvous.nodes[77] == 72


def test_a_meeting_is_a_ring_of_nodes(many, monkeypatch):
    """Messages one after the other in an all-gather at 512 nodes of eight: 511 in place of 4,095."""
    formed = {}
    monkeypatch.setattr(membership, "form_group", lambda name, ranks, backend: formed.setdefault(name, list(ranks)))
    groups = membership.form_host_groups("host", many, [rank // 8 * 8 for rank in many])
    assert groups.leaders is None and formed["host near"] == list(range(72, 80))
    monkeypatch.setattr(dist, "get_rank", lambda: 72)
    groups = membership.form_host_groups("host", many, [rank // 8 * 8 for rank in many])
    assert groups.leaders == many[::8] and len(groups.leaders) - 1 == 511
