"""Functions of sections, each called for pipelines with the sections that its parameters name.

def check_wandb(track: TrackConfig): ... apply((check_wandb, check_data), cfg)
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def apply(functions: Iterable[Callable[..., T]], cfg: Any) -> list[T]:
    """Call each function with the settings that its parameters name, in order; return the results.

    It is skipped if a required parameter names no setting, or one of another type: a user's `data: Rows` is no
    `DataConfig`. `roles` is `PipelineConfig.roles`.
    """
    return [function(**given) for function in functions if (given := _given(function, cfg)) is not None]


def _given(function: Callable[..., Any], cfg: Any) -> dict[str, Any] | None:
    known, wanted = {**vars(cfg), "roles": cfg.roles}, inspect.signature(function).parameters.values()
    # By type as well as by name: a user's pipeline may have another section of the same name.
    given = {p.name: known[p.name] for p in wanted if p.name in known and isinstance(known[p.name], p.annotation)}
    return given if all(p.name in given or p.default is not p.empty for p in wanted) else None
