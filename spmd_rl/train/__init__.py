"""The training wing: policy, reference and critic, each built from its own settings, behind the Protocols of `base`."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from spmd_rl.config.schema import RlvrConfig, TrainConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.model.build import build_model, build_on_meta, model_directory
from spmd_rl.model.load import WeightFiles, load_weights, mismatch
from spmd_rl.train.base import CriticBackend, Role, TrainBackend
from spmd_rl.train.packed_check import check_packing


class Roles(NamedTuple):
    """Who takes part in a run."""

    policy: TrainBackend
    reference: TrainBackend | None
    """Frozen; None where the algorithm has no KL penalty."""
    critic: CriticBackend | None
    """None where the algorithm reads no values."""

    @property
    def trained(self) -> dict[str, Role]:
        """By name, those whose weights a checkpoint must hold."""
        return {"policy": self.policy} | ({"critic": self.critic} if self.critic else {})


def build_roles(cfg: RlvrConfig, world: World) -> Roles:
    """[all] The policy, and what the algorithm wants beside it. UserError if a model does not load, fit, or pack."""
    updates = cfg.train.updates_per_step
    total = max(0, cfg.steps - cfg.algorithm.critic_warmup) * updates
    policy = build_role("policy", cfg, world, total)
    reference = build_role("reference", cfg, world) if cfg.algorithm.uses_reference else None
    critic = build_role("critic", cfg, world, cfg.steps * updates) if cfg.algorithm.uses_critic else None
    roles = Roles(policy, reference, critic)
    for name, role in roles._asdict().items():
        if role is not None:  # alike on all ranks
            own = getattr(cfg, name)
            dtype = getattr(torch, own.dtype or cfg.policy.dtype)
            check_packing(f"{name}.model: {own.model or cfg.policy.model}", role, dtype)  # [all]
    return roles


class Stored(NamedTuple):
    """A model before it is sharded."""

    model: torch.nn.Module
    load: Callable[..., None] | None
    """Fills this rank's shards; None of a model that is whole."""
    num_bytes: Callable[[], int]
    """What has been read so far."""


def stored_model(path: str, dtype: torch.dtype, remote_code: bool, on_progress: Callable[[], object]) -> Stored:
    """The model of a directory or a name of the hub; on the meta device, where its shards can be read one by one."""
    folder = model_directory(path)
    model, files = build_on_meta(folder, dtype, remote_code), WeightFiles(folder)
    load = partial(load_weights, files=files, on_progress=on_progress)
    if mismatch(model, files):  # transformers renames and merges some weights as it loads them: experts, for one
        model, load = build_model(folder, dtype, "cpu", remote_code), None
    return Stored(model, load, lambda: files.bytes_read)


def build_role(
    name: str, cfg: RlvrConfig, world: World, total_updates: int = 1, source: Callable[..., Stored] = stored_model
) -> Any:
    """[all] The role `policy`, `reference` or `critic` of its own section, over `world`.

    What the section leaves open (model, dtype, each setting of `train`) is the policy's. total_updates: where the
    learning rate's schedule ends. source: gives the model, called like `stored_model`. The journal's line `loaded`
    counts the bytes that this rank has read.
    """
    own, key = getattr(cfg, name), "train" if name == "policy" else f"{name}.train"
    train = cfg.train if name == "policy" else own.train.over(cfg.train)
    dtype = getattr(torch, own.dtype or cfg.policy.dtype)
    layout = Layout(world, **train.axes, key=key)  # [all]
    held_dtype = dtype if name == "reference" else torch.float32
    found = source(own.model or cfg.policy.model, held_dtype, cfg.policy.trust_remote_code, world.progress)
    build = BACKENDS[train.name]
    role = build(name, found.model, found.load, layout, train, dtype, own, total_updates)
    world.journal.note("loaded", role=name, bytes=found.num_bytes())
    return role


def _build_fsdp2(
    name: str,
    model: torch.nn.Module,
    load: Callable[..., None] | None,
    layout: Layout,
    train: TrainConfig,
    dtype: torch.dtype,
    own: Any,
    total_updates: int,
) -> Role:
    from spmd_rl.train.fsdp2 import FSDP2Backend, FSDP2Critic, with_value_head

    if name == "reference":
        return FSDP2Backend(model, layout, train, dtype, load=load)
    if name == "policy":
        return FSDP2Backend(model, layout, train, dtype, own, total_updates, load)
    head = with_value_head(model).get_output_embeddings()
    fresh = {key for key, p in model.named_parameters() if any(p is value for value in head.parameters())}
    return FSDP2Critic(model, layout, train, dtype, own, total_updates, load and partial(load, fresh=fresh))


BACKENDS = {"fsdp2": _build_fsdp2}
