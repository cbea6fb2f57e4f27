"""Algorithm functions and settings meet by name: a keyword-only parameter is a key of `algorithm`.

loss = bind(LOSSES["ppo_clip"], cfg.algorithm)   # clip_low and clip_high are filled in
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

R = TypeVar("R")


@cache
def keys(function: Callable[..., Any]) -> tuple[str, ...]:
    """The settings that `function` reads, in order."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)


def bind(function: Callable[..., R], settings: Any) -> Callable[..., R]:
    """`function` with every keyword-only parameter taken from the field of `settings` of that name."""
    return partial(function, **{name: getattr(settings, name) for name in keys(function)})
