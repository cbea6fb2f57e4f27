"""Expert parallelism: each rank along `ep` holds some experts of every layer, sharded by FSDP over other ranks.

    spread_experts(model, layout)  # [all] before FSDP shards the model

An expert's gradient includes all `ep` ranks' tokens, so it is summed only over `expert_fsdp` and copies.
Tensor-parallel ranks, with different tokens outside attention, count as any others.
"""

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from spmd_rl.base.errors import UserError
from spmd_rl.config.ranks import check_experts
from spmd_rl.distributed import Layout
from spmd_rl.model.moe import is_supported, num_experts, spread, stacked_experts


@torch.no_grad()
def spread_experts(model: nn.Module, layout: Layout) -> None:
    """[all] Keep this rank's experts, in place, and exchange tokens in each layer's forward.

    UserError, naming the setting, if the layout does not fit the experts, or there are none.
    """
    ep, name = layout.size("ep"), model.config.name_or_path or type(model).__name__
    count = num_experts(model.config.get_text_config())
    check_experts(layout.key, count, name, ep)
    if count:
        layout.share_experts()  # [all]
    if ep == 1:
        return
    found = stacked_experts(model)
    if not all(map(is_supported, found.values())):
        raise UserError(f"{layout.key}.ep: the experts of {name} are of a kind that is not supported; must be 1")
    for experts in found.values():
        for key, p in list(experts.named_parameters(recurse=False)):
            # Without a source rank nothing travels: each rank keeps its own part of what it holds.
            part = distribute_tensor(p.detach(), layout.expert_mesh["ep"], [Shard(0)], src_data_rank=None)
            experts.register_parameter(key, nn.Parameter(part, requires_grad=p.requires_grad))
        spread(experts, layout.group("ep"))
