"""A user's loss or advantage estimator, `algorithm.loss=module:function`: imported, checked, bound.

    # my_loss.py, on PYTHONPATH
    def my_loss(tokens, *, clip_low, strength=1.0):  # algorithm.clip_low, algorithm.args.strength
        return -strength * tokens.logprobs * tokens.advantages, {}

First parameters are as in `algo`: `tokens` for a loss, `scored` for an advantage of answers, `rewards, values, samples`
for one of tokens. The others are settings.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from spmd_rl.base.errors import UserError
from spmd_rl.base.targets import guarded, import_target, source_digest
from spmd_rl.config.apply import apply
from spmd_rl.config.sections.algorithm import OWN, AlgorithmConfig
from spmd_rl.config.sections.rollout import SamplingConfig

CHOICES: Mapping[str, tuple[int, ...]] = {"loss": (1,), "advantage": (1, 3)}
"""Keys that may name a user's function, with its possible numbers of tensors"""


def check_algorithm(algorithm: AlgorithmConfig) -> None:
    """Check the user's functions, if any; UserError if not importable or callable."""
    own = [choice for choice in CHOICES if is_own(algorithm, choice)]
    taken = {name for choice in own for name in parameters(algorithm, choice)}
    for choice in own:
        own_function(algorithm, choice)
    if strange := sorted(set(algorithm.args) - taken):
        where = " and ".join(getattr(algorithm, choice) for choice in own)
        raise UserError(f"algorithm.args.{strange[0]}: {where} takes {', '.join(sorted(taken)) or 'no setting'}")


def is_own(algorithm: AlgorithmConfig, choice: str) -> bool:
    """Return True if `algorithm.<choice>` names a user's function."""
    return OWN.fullmatch(getattr(algorithm, choice)) is not None


def num_tensors(algorithm: AlgorithmConfig, choice: str) -> int:
    """Return the number of arguments before a function's settings."""
    function, known = _import(algorithm, choice), {**vars(algorithm), **algorithm.args}
    # Tensors come first: parameters without a default whose name is no setting.
    first = [p for p in _plain(function) if p.kind is not p.KEYWORD_ONLY and p.default is p.empty]
    return len([p for p in first if p.name not in known])


def parameters(algorithm: AlgorithmConfig, choice: str) -> list[str]:
    """Return the names of a user function's settings."""
    return [p.name for p in _plain(_import(algorithm, choice))[num_tensors(algorithm, choice) :]]


def own_function(algorithm: AlgorithmConfig, choice: str) -> Callable[..., Any]:
    """Return the user's function, bound to settings from `algorithm.args`, else `algorithm`.

    Its exceptions become UserErrors with file and line. UserError if not importable or callable.
    """
    key, target = f"algorithm.{choice}", getattr(algorithm, choice)
    function, count = _import(algorithm, choice), num_tensors(algorithm, choice)
    if count not in CHOICES[choice]:
        numbers = " or ".join(map(str, CHOICES[choice]))
        raise UserError(f"{key}: {target} takes {count} arguments by position, and must take {numbers}")
    fields = {name: value for name, value in vars(algorithm).items() if name not in ("args", "correction", "bounds")}
    given: dict[str, Any] = {}
    for parameter in _plain(function)[count:]:
        name = parameter.name
        if name in algorithm.args:
            if name in fields:
                raise UserError(f"algorithm.args.{name}: is a setting of its own; set algorithm.{name}")
            given[name] = algorithm.args[name]
        elif name in fields:
            given[name] = fields[name]
        elif parameter.default is parameter.empty:
            raise UserError(
                f"{key}: {target} needs `{name}`, which is not a setting of algorithm; set algorithm.args.{name}"
            )
    return guarded(function, f"{key}: {target}", given)


def sources(cfg: Any) -> dict[str, str]:
    """Return a digest of each user function's file that ranks run, by `module:function`."""
    named = [target for found in apply((_own_functions, _own_episode), cfg) for target in found]
    return {f"source of {target}": source_digest(target) for target in named}


def _own_functions(algorithm: AlgorithmConfig) -> list[str]:
    return [getattr(algorithm, choice) for choice in CHOICES if is_own(algorithm, choice)]


def _own_episode(rollout: SamplingConfig) -> list[str]:
    return [rollout.target] if rollout.target else []


def _import(algorithm: AlgorithmConfig, choice: str) -> Callable[..., Any]:
    return import_target(f"algorithm.{choice}", getattr(algorithm, choice))


def _plain(function: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
