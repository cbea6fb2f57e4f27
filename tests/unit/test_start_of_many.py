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
