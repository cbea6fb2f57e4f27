"""Training backends as settings, `--plan` and `doctor` know them: without torch or their code.

    backend(train.name).check(role, folder)

To add one: a folder in `train/` whose package has a `BACKEND`, and a line in `BACKENDS`.
"""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from packaging.version import Version

from spmd_rl.base.errors import UserError
from spmd_rl.base.hub import model_folder
from spmd_rl.config.packages import installed
from spmd_rl.config.sections.models import BACKENDS, RoleConfig, TrainConfig

OWN = (
    "activation_checkpointing",
    "reshard_after_forward",
    "compile",
    "deterministic",
    "offload",
    "stage",
    "offload_optimizer",
    "offload_param",
)
"""Settings of `train` that a backend may lack; axes apart, all have the others"""
SHARDS_BYTES = Version("2.13")
"""First torch whose FSDP2 shards parameters of bytes"""
AXES = ("tp", "cp", "ep", "pp", "vpp", "dp_replicate")


@dataclass(frozen=True)
class Backend:
    """Abilities of a backend; only `build` imports code."""

    build: Callable[[RoleConfig, Any, Any], Any]
    """[all] Constructor of the `train.base.Role`, from the role's settings (`role.model` is a folder), its `Layout`
    and a `stored_model.Source` for a module of transformers"""
    axes: tuple[str, ...] = ()
    """Supported axes, some of `AXES`"""
    settings: tuple[str, ...] = ()
    """Supported settings, some of `OWN`"""
    optimizers: tuple[str, ...] = ("adamw",)
    adapters: bool = False
    """True if it trains adapters of `policy.lora`"""
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    """Dtypes of training; `float16` needs a loss scale"""
    package: str = ""
    """Package that it needs, if any"""
    quantized_base: bool = False
    """True if frozen weights below adapters may have few bits (`lora.base`)"""
    unplanned: tuple[str, ...] = ()
    """Settings, some of `OWN`, that `--plan` cannot trace"""
    follows: bool = False
    """True if a reference can follow the policy: a frozen model's `state` has its weights"""
    refuse: Callable[[RoleConfig, dict[str, Any]], None] = lambda role, model: None
    """Check of a role and its model's `config.json` against further limits; raises UserError"""

    def check(self, role: RoleConfig, folder: Path) -> None:
        """Raise UserError, naming the setting, if the backend cannot do what a role asks for."""
        train, default = role.train, {one.name: one.default for one in fields(TrainConfig)}
        for key in (key for key in (*AXES, *OWN) if key not in (*self.axes, *self.settings)):
            if getattr(train, key) != default[key]:
                raise UserError(f"{role.key}.{key}: not supported by train={train.name}; must be {default[key]}")
        optimizer = getattr(role.own, "optimizer", self.optimizers[0])
        if optimizer not in self.optimizers:
            known = ", ".join(self.optimizers)
            raise UserError(f"{role.name}.optimizer: train={train.name} has no optimizer {optimizer}; known: {known}")
        if role.sync_steps is not None and not self.follows:
            raise UserError(f"{role.name}.sync_steps: train={train.name} cannot update a reference; set "
                            f"{role.name}.train.name=fsdp2")  # fmt: skip
        if role.dtype not in (*self.dtypes, "auto"):
            raise UserError(f"{role.section or role.name}.dtype: train={train.name} does not support {role.dtype}")
        if role.lora.rank and not self.adapters:
            raise UserError(f"{role.section or role.name}.lora.rank: train={train.name} trains no adapters; must be 0")
        if role.lora.base and not (self.quantized_base and max(train.tp, train.pp, train.ep) == 1):
            able = " or ".join(name for name in BACKENDS if backend(name).quantized_base)
            raise UserError(
                f"{role.section or role.name}.lora.base: {role.lora.base} needs train={able}, without tp, pp and ep"
            )
        if role.lora.base and Version(installed("torch") or "0") < SHARDS_BYTES:
            raise UserError(f"{role.section or role.name}.lora.base: needs torch {SHARDS_BYTES} or newer; must be null")
        # `find_spec` does not import: peft would import torch.
        if role.lora.rank and importlib.util.find_spec("peft") is None:
            raise UserError(
                f"{role.section or role.name}.lora.rank: peft is not installed here; pip install 'spmd-rl[lora]'"
            )
        try:
            model = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError):
            model = {}  # `check_model` reports this
        self.refuse(role, model)


def backend(name: str) -> Backend:
    """Return a backend's facts by its name."""
    return importlib.import_module(BACKENDS[name]).BACKEND


def check_following(roles: list) -> None:
    """Check that a reference can follow all trained parts of the policy."""
    reference = next((role for role in roles if role.sync_steps is not None), None)
    if reference is None:
        return
    policy = roles[0]
    if getattr(policy.own, "router_bias_update_speed", 0):
        raise UserError(
            "reference.sync_steps: a reference cannot follow router biases; policy.router_bias_update_speed must be 0"
        )
    ours, theirs = (_architecture(role.model) for role in (policy, reference))
    if ours != theirs:
        raise UserError(
            f"{reference.model_key}: its {next(key for key in ours if ours[key] != theirs[key])} is not the policy's; "
            "a reference that follows the policy must have its architecture"
        )


def _architecture(model: str) -> dict[str, Any]:
    config = json.loads((model_folder(model) / "config.json").read_text())
    return {key: config.get(key) for key in ("model_type", "attention_bias", "mlp_bias", "tie_word_embeddings")}
