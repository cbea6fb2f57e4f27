"""Generation engines as settings and tools know them: without torch or their code.

    facts_of(engine.name).check(engine, policy, {"rollout": rollout})

To add one: a folder in `engine/` whose package has an `ENGINE`, and a line in `ENGINES`.
"""

import importlib
import importlib.util
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_rl.base.errors import UserError
from spmd_rl.base.hub import model_folder
from spmd_rl.bundled import HOME
from spmd_rl.config.architectures import HYBRID, experts_in, has_windows, sees_pictures
from spmd_rl.config.packages import unsupported
from spmd_rl.config.sections.engine import ENGINES, SIMULATED, EngineConfig
from spmd_rl.config.sections.models import ServedModelConfig


@dataclass(frozen=True)
class EngineFacts:
    """Abilities of an engine; only `build` imports code."""

    build: Callable[..., Any]
    """[all] Function behind `engine.build`, with equal arguments"""
    title: str
    package: str = ""
    """Package name, also of its import and our extra; empty without one"""
    axes: tuple[str, ...] = ()
    """Axes (`tp`, `pp`) along which a replica spans ranks"""
    takes_args: bool = False
    """True if `engine.args` reaches the package"""
    quantizations: tuple[str, ...] = ()
    """Values of `engine.quantization` in which it computes, besides simulated ones"""
    drafts: bool = False
    """True if it verifies drafts, except under `top_k`, `top_p` or `min_p`"""
    adapters: bool = False
    """True if it computes with adapters on frozen weights"""
    adapters_of_mixtures: bool = False
    """True if it leaves a mixture's experts without adapters, as training does"""
    reports_experts: bool = False
    """True if completions name the router's experts"""
    temperatures: tuple[float, float] = (0, math.inf)
    """Range of sampling temperatures above 0"""
    sliding_windows: bool = False
    latent_attention: bool = False
    states: bool = False
    """True if it keeps the states of a hybrid model's layers"""
    no_states: str = ""
    pictures: bool = False
    picture_package: str = ""
    """Package that it imports for pictures"""

    def check(
        self, engine: EngineConfig, policy: ServedModelConfig, temperatures: Mapping[str, Any], truncated: list[str]
    ) -> None:
        """Raise UserError, naming the setting, for what this engine cannot serve.

        temperatures: by section. truncated: sections with `top_k`, `top_p` or `min_p`.
        """
        self.check_package()
        self.check_settings(engine)
        mixture = experts_in(model_folder(policy.model))
        able = engine.quantization in self.quantizations and engine.ranks == 1 and not engine.adapters and not mixture
        if engine.quantization not in (None, *SIMULATED) and not able:
            names = with_ability(lambda other: engine.quantization in other.quantizations)
            raise UserError(
                f"engine.quantization: {engine.quantization} needs engine={names} engine.tp=1, without "
                "engine.adapters, and not for mixtures of experts"
            )
        if policy.router_replay and not self.reports_experts:
            names = with_ability(lambda other: other.reports_experts)
            raise UserError(f"policy.router_replay: engine={engine.name} does not report router choices; set {names}")
        if policy.router_replay and mixture == 0:
            raise UserError("policy.router_replay: the model is not a mixture of experts; must be false")
        low, high = self.temperatures
        for section, value in temperatures.items():
            if value and not low <= value <= high:
                raise UserError(
                    f"{section}.temperature: {value:g} is out of the range of engine={engine.name}, {low:g} to {high:g}"
                )
        if engine.drafts and truncated:
            key = f"{truncated[0]}.top_k, top_p or min_p"
            raise UserError(f"engine.drafts: engine={engine.name} cannot verify drafts while {key} cuts tokens off")

    def check_settings(self, engine: EngineConfig) -> None:
        """Raise UserError for a key of `engine` that this engine lacks."""
        for axis in ("tp", "pp"):
            if getattr(engine, axis) != 1 and axis not in self.axes:
                raise UserError(f"engine.{axis}: not supported by engine={engine.name}; must be 1")
        if engine.drafts and not self.drafts:
            raise UserError(f"engine.drafts: not supported by engine={engine.name}; must be 0")
        if engine.args and not self.takes_args:
            names = with_ability(lambda other: other.takes_args)
            raise UserError(f"engine.args: engine={engine.name} has no arguments; they are for engine={names}")

    def check_package(self) -> None:
        """Raise UserError unless the package is installed in a supported version."""
        if not self.package:
            return
        missing, found = importlib.util.find_spec(self.package) is None, unsupported(self.package)
        if missing or found:
            wrong = f"{self.title} is not installed here" if missing else f"{self.title} {found[0]} is not {found[1]}"
            raise UserError(f"engine={self.package}: {wrong}; {self.installation}; or set engine=native")

    @property
    def installation(self) -> str:
        """Commands that install the package."""
        pins = HOME / "launch" / f"{self.package}-cpu.txt"
        return f"pip install --no-deps -r {pins} for the CPU, pip install 'spmd-rl[{self.package}]' for a GPU"

    def check_model(self, key: str, folder: Path, name: str) -> None:
        """Raise UserError if engine `name` cannot run the model in `folder`."""
        # From `config.json` alone, before the weights are fetched.
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        kind = config.get("model_type")
        if sees_pictures(folder) and not self.pictures:
            names = with_ability(lambda other: other.pictures)
            raise UserError(f"{key}: engine={name} does not support pictures, which {kind} takes; engine={names} does")
        if sees_pictures(folder) and self.picture_package and importlib.util.find_spec(self.picture_package) is None:
            raise UserError(
                f"{key}: engine={name} needs {self.picture_package} for {kind}, which takes pictures: "
                f"pip install {self.picture_package}; or set engine=native"
            )
        if has_windows(config) and not self.sliding_windows:
            raise UserError(
                f"{key}: engine={name} cannot run the sliding_attention layers of {kind}; "
                f"engine={with_ability(lambda other: other.sliding_windows)} can"
            )
        if config.get("kv_lora_rank") and not self.latent_attention:
            raise UserError(
                f"{key}: engine={name} cannot run the latent attention of {kind}; "
                f"engine={with_ability(lambda other: other.latent_attention)} can"
            )
        if kind in HYBRID and not self.states:
            raise UserError(
                f"{key}: engine={name} cannot run the layers of {kind} that carry a state{self.no_states}; "
                f"engine={with_ability(lambda other: other.states)} can"
            )


def facts_of(name: str) -> EngineFacts:
    """Return an engine's facts by its name."""
    return importlib.import_module(ENGINES[name]).ENGINE


def with_ability(able: Callable[[EngineFacts], bool]) -> str:
    """Return the names of engines with an ability, for messages."""
    return " or ".join(name for name in ENGINES if able(facts_of(name)))
