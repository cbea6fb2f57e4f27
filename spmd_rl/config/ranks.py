"""This process's rank, local rank, and number of ranks, from torchrun."""

import os
from dataclasses import dataclass
from itertools import accumulate

from spmd_rl.base.errors import UserError


def rank() -> int:
    """Return torchrun's rank of this process, or 0."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return this process's rank on its node, or 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Return torchrun's number of ranks, or 1."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True, slots=True)
class LayoutSizes:
    """Ranks along the axes of a role's model, see `distributed.Layout`."""

    pp: int
    """pipeline stages, which divide the layers"""
    dp_replicate: int
    """copies of the model, on separate ranks"""
    dp_shard: int
    cp: int
    """context-parallel ranks, which divide a shard's tokens"""
    tp: int
    """tensor-parallel ranks, which divide each layer"""
    ep: int
    """ranks, of dp_shard x cp x tp, that divide the experts"""

    @classmethod
    def of(
        cls, section: str, num_ranks: int, *, pp: int = 1, dp_replicate: int = 1, cp: int = 1, tp: int = 1, ep: int = 1
    ) -> "LayoutSizes":
        """Return the sizes; `dp_shard` is what other axes leave.

        section: settings section in errors, `train` or `reference.train`. UserError if the axes do not divide the
        ranks.
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
        """Number of ranks that shard most weights."""
        return self.dp_shard * self.cp

    @property
    def expert_fsdp(self) -> int:
        """Number of ranks that shard each expert."""
        return self.fsdp * self.tp // self.ep


def check_experts(section: str, count: int, model: str, ep: int) -> None:
    """Raise UserError if `ep` does not divide `count` experts a layer (0: no mixture).

    section, model: names in the error.
    """
    if ep > 1 and not count:
        raise UserError(f"{section}.ep: {model} has no experts; must be 1")
    fitting = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
    if ep > 1 and count % ep:
        raise UserError(
            f"{section}.ep: {ep} ranks cannot share the {count} experts of {model}; sizes that fit: {fitting}"
        )


def deal_layers(section: str, num_layers: int, num_stages: int, vpp: int = 1) -> list[range]:
    """Return the layers of each pipeline chunk, `vpp` per stage: neighbours, of about equal work.

    Input and output embedding count as a layer each. section: as in `LayoutSizes.of`. UserError if a chunk has no
    layer, or a single stage several chunks.
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
