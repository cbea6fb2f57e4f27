"""Process groups of a layout in Megatron's form, so that Megatron keeps no global state of ranks."""

from collections.abc import Sequence

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from spmd_rl.distributed import Layout
from spmd_rl.distributed.layout import AXES, EXPERTS

ALONG = {
    "tp": ("tp",),
    "cp": ("cp",),
    "pp": ("pp",),
    "dp": ("dp_shard",),
    "dp_cp": ("dp_shard", "cp"),
    "mp": ("pp", "tp"),
    "tp_cp": ("cp", "tp"),
    "tp_dp_cp": ("dp_shard", "cp", "tp"),
}
"""Axes of the layout along which the ranks of a Megatron group differ, by the group's name"""
ALONG_EXPERTS = {"ep": ("ep",), "expt_dp": ("expert_fsdp",), "tp_ep": ("ep",), "tp_ep_pp": ("pp", "ep"), "expt_tp": ()}
"""Axes of groups for experts, each of which is whole on a rank"""


def groups_of(layout: Layout) -> ProcessGroupCollection:
    """[all] Form Megatron's groups. Groups of the same ranks are one."""
    formed: dict[tuple[int, ...], dist.ProcessGroup] = {}
    # Messages between stages have two ends alone, which groups over shared memory have not.
    backend = "gloo" if layout.world.device.type == "cpu" else None

    def group(ranks: Sequence[int]) -> dist.ProcessGroup:
        key = tuple(ranks)
        if key not in formed:
            formed[key] = layout.world.process_group("megatron", backend, key)  # [all]
        return formed[key]

    found = {name: group(_ranks(layout, AXES, along)) for name, along in ALONG.items()}
    found |= {name: group(_ranks(layout, EXPERTS, along)) for name, along in ALONG_EXPERTS.items()}
    line = _ranks(layout, AXES, ("pp",))
    ends = [line[0], line[-1]] if len(line) > 1 else line
    found["embd"] = group(ends) if layout.world.rank in ends else None
    found["intra_dp_cp"], found["intra_expt_dp"] = found["dp_cp"], found["expt_dp"]
    nothing = dict.fromkeys(("pos_embd", "hcp", "inter_dist_opt"))
    return ProcessGroupCollection(**found, **nothing, intra_dist_opt=group(range(layout.world.size)))


def _ranks(layout: Layout, axes: Sequence[str], along: Sequence[str]) -> list[int]:
    """Return the ranks that differ from this one only along some of `axes`, in order."""
    ranks = [0]
    for axis in axes:
        places = range(layout.size(axis)) if axis in along else [layout.rank(axis)]
        ranks = [rank * layout.size(axis) + place for rank in ranks for place in places]
    return ranks
