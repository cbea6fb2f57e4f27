"""Trainer and generator ranks by number, computed from `placement`."""

import re
from dataclasses import dataclass, field

from spmd_rl.base.errors import UserError
from spmd_rl.config.ranks import world_size
from spmd_rl.config.sections.placement import PlacementConfig
from spmd_rl.config.values import numbers_in

_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]+)?)%")


@dataclass(frozen=True, slots=True)
class Placement:
    """Tasks of a job's ranks, by number."""

    train: tuple[int, ...]
    """numbers of trainer ranks, ascending order"""
    generate: tuple[int, ...]
    """generator ranks, ascending; colocated: the trainers; `lent`: all"""
    frozen: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """ranks that only hold reference or teachers, ascending"""

    @classmethod
    def of(cls, settings: PlacementConfig, num_ranks: int) -> "Placement":
        """Return the ranks. UserError unless each rank has one task, and each task a rank."""
        everyone = tuple(range(num_ranks))
        frozen = {key: _ranks(key, text, everyone) for key, text in settings.frozen.items()}
        left = tuple(rank for rank in everyone if not any(rank in ranks for ranks in frozen.values()))
        if not left:
            raise UserError(f"placement.{' and placement.'.join(frozen)}: no rank of {num_ranks} is left to train")
        if not settings.is_split:
            return cls(left, left, frozen)
        train, generate = _sides(settings, everyone, left)
        return cls(train, left if settings.is_lent else generate, frozen)

    def of_role(self, kind: str) -> tuple[int, ...]:
        """Return a role's ranks. kind: see `RoleConfig`."""
        return self.frozen.get(kind, self.train)

    @property
    def held(self) -> str:
        """Text on frozen roles' ranks, each with a semicolon."""
        return "".join(f"{ranks_do(ranks, 'hold')} the {key}; " for key, ranks in self.frozen.items())


def check_frozen(roles: list, placement: PlacementConfig) -> None:
    """Check that each role with dedicated ranks has a model, which does not need the policy's ranks."""
    for key in Placement.of(placement, world_size()).frozen:
        own = [role for role in roles if role.kind == key]
        if not own:
            why = {"reference": "algorithm.kl_coef and algorithm.kl_reward_coef are 0", "teacher": "no teacher.model"}
            raise UserError(f"placement.{key}: there is no {key} ({why[key]}); must be null")
        if any(role.sync_steps is not None for role in own):
            raise UserError(
                f"placement.{key}: must be null with {key}.sync_steps, whose reference follows the policy on its ranks"
            )
        if any(role.is_base_of(roles[0]) for role in own):
            raise UserError(f"placement.{key}: must be null, as it is the policy without its adapters (policy.lora)")


def _sides(
    settings: PlacementConfig, everyone: tuple[int, ...], left: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return trainer ranks and pure generator ranks. left: ranks without frozen roles."""
    if len(left) < 2:
        raise UserError("placement.mode: split needs at least two ranks: torchrun --nproc-per-node 2 ...")
    train = _ranks("train", settings.train, everyone, left)
    generate = _ranks("generate", settings.generate, everyone, left)
    if train is None and generate is None:
        train = left[: len(left) // 2]
    train = train or tuple(rank for rank in left if rank not in generate)
    generate = generate or tuple(rank for rank in left if rank not in train)
    if twice := set(train) & set(generate):
        raise UserError(f"placement: rank {min(twice)} cannot both train and generate with mode=split")
    if held := (set(train) | set(generate)) - set(left):
        raise UserError(f"placement: rank {min(held)} holds a frozen role, and can neither train nor generate")
    if idle := set(left) - set(train) - set(generate):
        raise UserError(f"placement: rank {min(idle)} of {len(everyone)} ranks neither trains nor generates")
    for key, ranks in (("train", train), ("generate", generate)):
        if not ranks:
            raise UserError(f"placement.{key}: no rank is left for it")
    return train, generate


def _ranks(
    key: str, text: str | None, everyone: tuple[int, ...], shared: tuple[int, ...] = ()
) -> tuple[int, ...] | None:
    """Return the ranks that a setting names, ascending; None without a text. shared: base of a share, as 25%."""
    if text is None:
        return None
    text = text.replace(" ", "")
    if share := _SHARE.fullmatch(text):
        among = shared or everyone
        count = round(float(share[1]) / 100 * len(among))
        if not 0 < count < len(among):
            raise UserError(f"placement.{key}: {text} of {len(among)} ranks is {count}; each side needs one")
        # From opposite ends, so that two shares do not overlap.
        return among[:count] if key == "train" else among[-count:]
    like = "ranks such as 0-3 or 0,2,4-7, or a share such as 25%"
    return tuple(numbers_in(f"placement.{key}", text, len(everyone), "rank", like))


def ranks_do(ranks: tuple[int, ...], what: str) -> str:
    """Return text such as `ranks 0-3 train` or `rank 4 generates`. what: the verb in the plural."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    named = ",".join("-".join(map(str, part)) for part in parts)
    return f"rank {named} {what}s" if len(ranks) == 1 else f"ranks {named} {what}"
