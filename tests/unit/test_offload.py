"""Offload on CPU tensors, which pretend to be on a device: what goes comes back, under the objects that were there."""

import torch

from spmd_rl.train.fsdp2.offload import Offload


def test_tensors_come_back_as_the_objects_they_were() -> None:
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    part, half, nothing = whole[1:3], torch.randn(7).bfloat16(), torch.empty(0)
    expected = [t.clone() for t in (whole, part, half)]
    offload = Offload([part, whole, half, nothing])
    for _ in range(2):
        offload.to_host()
        offload.to_host()
        assert (
            whole.untyped_storage().nbytes() == part.untyped_storage().nbytes() == half.untyped_storage().nbytes() == 0
        )
        offload.to_device()
        offload.to_device()
        assert all(map(torch.equal, (whole, part, half), expected))
        assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        whole += 1
        expected = [t.clone() for t in (whole, part, half)]


def test_host_memory_is_reserved_once_and_what_is_constant_copied_once() -> None:
    for constant in (False, True):
        tensor = torch.zeros(5)
        offload = Offload([tensor], constant)
        offload.to_host()
        (copy,) = offload._copies
        offload.to_device()
        tensor += 1  # a constant one would not
        offload.to_host()
        assert offload._copies[0] is copy
        assert copy.view(torch.float32).eq(0 if constant else 1).all()
