"""Buckets on a device whose bytes no host can read: what is sent by whom, and how much a rank holds."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from spmd_rl.weights import Buckets, collective

MIB = 2**20
DEVICE = torch.device("meta")
"""A tensor there has no bytes: a copy to the host raises."""


class FakeWorld:
    """One rank; it writes down what is broadcast, and answers with what the test says was."""

    device, size = DEVICE, 3
    ranks = (4, 5, 6)

    def __init__(self, rank: int, heads: list | None = None) -> None:
        self.rank, self.heads, self.sent = rank, iter(heads or ()), []

    def process_group(self, name):
        return name

    def broadcast(self, name, record, src):
        assert (name, src) == (collective.HEADERS, 0)
        self.sent.append(record)
        return next(self.heads, [])

    def collective(self, name, kind):
        return nullcontext()

    def progress(self) -> None:
        pass


@pytest.fixture
def wire(monkeypatch) -> SimpleNamespace:
    """What goes over the group: (bytes, rank of the job that sends); and the bytes of every buffer that is made."""
    found, empty = SimpleNamespace(sent=[], made=[]), torch.empty

    def broadcast(flat: torch.Tensor, source: int, group: str) -> None:
        assert flat.device == DEVICE and flat.is_contiguous() and group == "weights"
        found.sent.append((flat.nbytes, source))

    def made(size: int | list[int], **how) -> torch.Tensor:
        found.made += [size] if isinstance(size, int) else []
        return empty(size, **how)

    monkeypatch.setattr(dist, "broadcast", broadcast)
    monkeypatch.setattr(collective.torch, "empty", made)
    return found


def weights() -> list:
    sizes = [100, 300, 200, 5, 700, 1, 512]
    return [(f"weight.{n}", torch.zeros(size, MIB, dtype=torch.int8, device=DEVICE)) for n, size in enumerate(sizes)]


def test_buckets_are_full_and_trainers_send_in_turn_and_no_byte_comes_to_the_host(wire) -> None:
    world = FakeWorld(rank=1)
    buckets = Buckets(world, trainers=[0, 1])
    wire.sent.clear(), wire.made.clear()
    assert len(list(buckets.send(weights()))) == 7
    assert [size // MIB for size, _ in wire.sent] == [400, 205, 700, 1, 512]
    assert [source for _, source in wire.sent] == [4, 5, 4, 5, 4]
    assert max(wire.made) <= 700 * MIB and sum(size > 0 for size in wire.made) == 2, "a bucket, then the largest tensor"
    heads = [record for record in world.sent if record]
    assert [name for part in heads for name, _, _ in part] == [name for name, _ in weights()] and world.sent[-1] == []


def test_who_generates_holds_a_bucket_or_the_largest_tensor(wire) -> None:
    sender = FakeWorld(rank=0)
    list(Buckets(sender, trainers=[0]).send(weights()))
    world = FakeWorld(rank=2, heads=[record for record in sender.sent if record])
    buckets = Buckets(world, trainers=[0])
    wire.made.clear()
    shapes = [(name, tuple(tensor.shape), tensor.device) for name, tensor in buckets.receive()]
    assert shapes == [(name, tuple(tensor.shape), DEVICE) for name, tensor in weights()]
    assert max(wire.made) <= 700 * MIB and sum(size > 0 for size in wire.made) == 2


def test_a_tensor_begins_where_any_dtype_may(wire) -> None:
    world = FakeWorld(rank=0)
    some = [("a", torch.zeros(3, dtype=torch.int8, device=DEVICE)), ("b", torch.zeros(2, device=DEVICE))]
    list(Buckets(world, trainers=[0]).send(some))
    assert wire.sent[-1] == (32, 4)
