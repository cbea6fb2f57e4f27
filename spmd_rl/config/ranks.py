"""Facts about this process from torchrun: its rank, its rank on its node, and the number of ranks."""

import os
from dataclasses import dataclass
from itertools import accumulate

from spmd_rl.base.errors import UserError


def rank() -> int:
    """Return the rank of this process that torchrun set; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return the rank of this process among those of its node; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Return the number of ranks; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True, slots=True)
class LayoutSizes:
    """Numbers of ranks along the axes of one role's model, see `distributed.Layout`."""

    pp: int
    """ranks among which the layers are divided (pipeline)"""
    dp_replicate: int
    """copies of the model, each on separate ranks"""
    dp_shard: int
    """data shards of a copy"""
    cp: int
    """ranks among which the tokens of a data shard are divided (context)"""
    tp: int
    """ranks among which each layer is divided (tensor)"""
    ep: int
    """ranks, of dp_shard x cp x tp, among which the experts of a mixture are divided"""

    @classmethod
    def of(
        cls, section: str, num_ranks: int, *, pp: int = 1, dp_replicate: int = 1, cp: int = 1, tp: int = 1, ep: int = 1
    ) -> "LayoutSizes":
        """Return the sizes; `dp_shard` is the quotient of the ranks and the others.

        section: the settings section that an error names, `train` or `reference.train`. UserError if they do not divide
        the ranks.
        """
        left, said = num_ranks, f"{num_ranks} ranks"
        for key, size in {"tp": tp, "cp": cp, "pp": pp, "dp_replicate": dp_replicate}.items():
            if left % size:
                of = said if left == num_ranks else f"{left}, which is {said}"
                raise UserError(f"{section}.{key}: {size} does not divide {of}")
            left //= size
            said += f" / {key} {size}" if size > 1 else ""
        if left * cp * tp % ep:
            raise UserError(
                f"{section}.ep: {ep} does not divide {left * cp * tp}, the ranks that can share the experts"
            )
        return cls(pp, dp_replicate, left, cp, tp, ep)

    @property
    def fsdp(self) -> int:
        """Number of ranks over which FSDP shards most weights."""
        return self.dp_shard * self.cp

    @property
    def expert_fsdp(self) -> int:
        """Number of ranks over which FSDP shards each expert."""
        return self.fsdp * self.tp // self.ep


def check_experts(section: str, count: int, model: str, ep: int) -> None:
    """Raise a UserError if `ep` does not divide `count` experts a layer, 0 for a model without a mixture.

    section: the settings section that the error names. model: its name of the model.
    """
    if ep > 1 and not count:
        raise UserError(f"{section}.ep: {model} has no experts; must be 1")
    fitting = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
    if ep > 1 and count % ep:
        raise UserError(
            f"{section}.ep: {ep} ranks cannot share the {count} experts of {model}; sizes that fit: {fitting}"
        )


def deal_layers(section: str, num_layers: int, num_stages: int, vpp: int = 1) -> list[range]:
    """Return the layers of each chunk of a pipeline, `vpp` for each stage: neighbours, of about equal work.

    The input and the output embedding count as one layer each. section: as in `LayoutSizes.of`. UserError if a chunk
    would have none, or if a single stage has several chunks.
    """
    if vpp > 1 and num_stages == 1:
        raise UserError(f"{section}.vpp: {vpp} chunks a stage need several stages, {section}.pp > 1; must be 1")
    if num_stages > num_layers:
        raise UserError(f"{section}.pp: {num_stages} stages cannot share {num_layers} layers; at most {num_layers}")
    num_chunks = num_stages * vpp
    if num_chunks > num_layers:
        most = num_layers // num_stages
        raise UserError(
            f"{section}.vpp: {num_chunks} chunks, {vpp} for each of {num_stages} stages, cannot share {num_layers} "
            f"layers; at most {most}"
        )
    counts, costs = [1] * num_chunks, [1] * num_chunks
    # The input embedding counts as a layer of the first chunk, the output embedding as one of the last.
    costs[0] += 1
    costs[-1] += 1
    for _ in range(num_layers - num_chunks):
        # Ties go to the last chunk, since later stages keep fewer micro-batches in memory.
        chunk = min(reversed(range(num_chunks)), key=costs.__getitem__)
        counts[chunk] += 1
        costs[chunk] += 1
    ends = list(accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]
