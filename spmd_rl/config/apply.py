"""Functions of sections: each is called for the pipelines that have what its parameters name.

def check_wandb(track: TrackConfig): ...
apply((check_wandb, check_data), cfg)
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def apply(functions: Iterable[Callable[..., T]], cfg: Any) -> list[T]:
    """Call each function with the settings of `cfg` that its parameters name, in order, and return what they return.

    A function is left out where a parameter without a default names no setting, or one of another type: `data: Rows`
    of a user's own pipeline is none of `DataConfig`. `roles` names `PipelineConfig.roles`.
    """
    return [function(**given) for function in functions if (given := _given(function, cfg)) is not None]


def _given(function: Callable[..., Any], cfg: Any) -> dict[str, Any] | None:
    """The arguments of a function; None where `cfg` lacks one."""
    known, wanted = {**vars(cfg), "roles": cfg.roles}, inspect.signature(function).parameters.values()
    given = {p.name: known[p.name] for p in wanted if p.name in known and isinstance(known[p.name], p.annotation)}
    return given if all(p.name in given or p.default is not p.empty for p in wanted) else None
