"""Offload on CPU tensors, which pretend to be on a device: what goes comes back, under the objects that were there."""

import torch

from spmd_rl.train import offload
from spmd_rl.train.offload import Offload


def test_tensors_come_back_as_the_objects_they_were() -> None:
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    part, half, nothing = whole[1:3], torch.randn(7).bfloat16(), torch.empty(0)
    expected = [t.clone() for t in (whole, part, half)]
    moved = Offload([part, whole, half, nothing])
    for _ in range(2):
        moved.to_host()
        moved.to_host()
        assert (
            whole.untyped_storage().nbytes() == part.untyped_storage().nbytes() == half.untyped_storage().nbytes() == 0
        )
        moved.to_device()
        moved.to_device()
        assert all(map(torch.equal, (whole, part, half), expected))
        assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        whole += 1
        moved.changed()
        expected = [t.clone() for t in (whole, part, half)]


def test_what_has_not_changed_is_not_copied_again(monkeypatch) -> None:
    monkeypatch.setattr(offload, "BLOCK_BYTES", 16)  # tensors begin and end within blocks
    tensors = [torch.zeros(5), torch.ones(3), torch.full((9,), 2.0)]
    moved = offload.Offload(tensors)
    for changed in (False, True):
        moved.to_host()
        moved.to_device()
        tensors[1] += 1
        if changed:
            moved.changed()
        moved.to_host()
        moved.to_device()
        assert tensors[1].eq(2 if changed else 1).all()
    assert tensors[0].eq(0).all() and tensors[2].eq(2).all()
