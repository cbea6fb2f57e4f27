"""A reference that follows the policy: its shards move towards a stream of whole weights, in any two layouts."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from spmd_rl.base.errors import UserError
from spmd_rl.train.state import MODEL, Shard


@torch.no_grad()
def move(state: Sequence[Shard], weights: Iterable[tuple[str, Tensor]], share: float, key: str) -> None:
    """[all] Set the weights in `state` to share * `weights` + (1 - share) * present values, in place.

    weights: whole, by stored name; buffers that `state` lacks are skipped. A share of 1 copies exactly in equal dtypes.
    UserError, on every rank, naming the setting `key`, if names or shapes differ.
    """
    shards = defaultdict[str, list[Shard]](list)
    for one in state:
        shards[one.name.removeprefix(MODEL)].append(one)
    for name, whole in weights:  # [all]
        for one in shards.pop(name, ()):
            if tuple(one.shape) != tuple(whole.shape):
                raise UserError(f"{key}: {name} is {tuple(one.shape)} there, and {tuple(whole.shape)} in the policy")
            if one.tensor is None:
                continue
            region = tuple(slice(at, at + n) for at, n in zip(one.begin, one.tensor.shape, strict=True))
            part = whole[region].to(one.tensor)
            one.tensor.copy_(part) if share == 1 else one.tensor.lerp_(part, share)
    if shards:
        raise UserError(f"{key}: the policy has no {min(shards)}; a reference that follows it is of its architecture")
