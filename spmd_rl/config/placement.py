"""Which ranks train and which generate, as numbers: what `placement` says of a job of so many ranks."""

import re
from dataclasses import dataclass

from spmd_rl.config.sections.placement import PlacementConfig
from spmd_rl.config.values import numbers_in
from spmd_rl.errors import UserError

_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]+)?)%")


@dataclass(frozen=True, slots=True)
class Placement:
    """Which ranks of a job do what."""

    train: tuple[int, ...]
    """ascending"""
    generate: tuple[int, ...]
    """ascending; the same ranks where placement is colocated, all with `lent`. One of the two is empty where another
    job does that."""

    @classmethod
    def of(cls, settings: PlacementConfig, num_ranks: int) -> "Placement":
        """Return the ranks. UserError unless each rank has one task, and each task a rank."""
        everyone = tuple(range(num_ranks))
        if not settings.is_split:
            return cls(everyone, everyone)
        if settings.is_attached:
            return cls(everyone, ()) if settings.attach is None else cls((), everyone)
        if num_ranks < 2:
            raise UserError("placement.mode: split needs two ranks at least: torchrun --nproc-per-node 2 ...")
        train, generate = _ranks("train", settings.train, num_ranks), _ranks("generate", settings.generate, num_ranks)
        if train is None and generate is None:
            train = everyone[: num_ranks // 2]
        train = train or tuple(rank for rank in everyone if rank not in generate)
        generate = generate or tuple(rank for rank in everyone if rank not in train)
        if twice := set(train) & set(generate):
            raise UserError(f"placement: rank {min(twice)} cannot both train and generate with mode=split")
        if idle := set(everyone) - set(train) - set(generate):
            raise UserError(f"placement: rank {min(idle)} of {num_ranks} ranks neither trains nor generates")
        for key, ranks in (("train", train), ("generate", generate)):
            if not ranks:
                raise UserError(f"placement.{key}: no rank is left for it")
        return cls(train, everyone if settings.is_lent else generate)


def _ranks(key: str, text: str | None, num_ranks: int) -> tuple[int, ...] | None:
    """The ranks that a setting names, ascending; None where it is not given."""
    if text is None:
        return None
    text = text.replace(" ", "")
    if share := _SHARE.fullmatch(text):
        count = round(float(share[1]) / 100 * num_ranks)
        if not 0 < count < num_ranks:
            raise UserError(f"placement.{key}: {text} of {num_ranks} ranks is {count}; each side needs one")
        return tuple(range(count) if key == "train" else range(num_ranks - count, num_ranks))
    like = "ranks as 0-3 or 0,2,4-7, or a share as 25%"
    return tuple(numbers_in(f"placement.{key}", text, num_ranks, "rank", like))


def ranks_do(ranks: tuple[int, ...], what: str) -> str:
    """Return `ranks 0-3 train` or `rank 4 generates`, for a verb in the plural."""
    if not ranks:
        return f"attached jobs {what}"
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    named = ",".join("-".join(map(str, part)) for part in parts)
    return f"rank {named} {what}s" if len(ranks) == 1 else f"ranks {named} {what}"
