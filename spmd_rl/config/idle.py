"""Settings that were set and mean nothing under the others: each is worth a warning, none is an error.

    for line in idle_settings(cfg, load("rlvr", RlvrConfig)):
        print(f"warning: {line}")

A line of `IDLE` says which, why and when. Left out: settings that contradict each other (`sections/`, `checks.py`).
"""

from collections.abc import Callable, Iterator
from typing import Any

from spmd_rl.config.keys import flatten, plain

GENERATORS = ("reasoning_gym:",)
"""Prefixes of `data.train` that name a generator, not files."""


def files(source: str | None) -> list[str]:
    """The files among the sources that `data.train` or `data.eval` names."""
    parts = [part.strip() for part in source.split(",")] if source else []
    return [part for part in parts if not part.startswith(GENERATORS)]


def no_reference(cfg: Any) -> bool:
    """Whether no frozen reference is loaded."""
    return cfg.algorithm.kl_coef == 0


def only_files(cfg: Any) -> bool:
    """Whether no problem is generated."""
    sources = (cfg.data.train, cfg.data.eval)
    return not any(part.strip().startswith(GENERATORS) for source in sources if source for part in source.split(","))


def never_evaluated(cfg: Any) -> bool:
    """Whether held-out prompts are left alone."""
    return cfg.eval.every == 0


IDLE: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("reference", "algorithm.kl_coef is 0", no_reference),
    ("algorithm.kl_estimator", "algorithm.kl_coef is 0", no_reference),
    ("algorithm.norm_std", "algorithm.advantage is not grpo", lambda cfg: cfg.algorithm.advantage != "grpo"),
    ("data.size", "problems come from files", only_files),
    ("data.seed", "problems come from files", only_files),
    ("data.args", "problems come from files", only_files),
    ("data.holdout", "data.eval is given", lambda cfg: cfg.data.eval is not None),
    *((f"eval.{key}", "eval.every is 0", never_evaluated) for key in ("prompts", "answers", "temperature")),
)
"""(key or section, why, when)"""


def idle_settings(cfg: Any, usual: Any) -> Iterator[str]:
    """One line for each setting without effect that somebody asked for: it is neither the schema's default nor as in
    `usual`, the settings of a line that says nothing."""
    unasked = [dict(flatten(plain(settings))) for settings in (usual, type(cfg)())]
    for key, value in flatten(plain(cfg)):
        if key.startswith("reward.") and key.endswith(".workers") and cfg.debug and value != 1:
            yield f"{key}: has no effect while debug is true"
        for idle, reason, when in IDLE:
            if f"{key}.".startswith(f"{idle}.") and when(cfg) and all(value != d.get(key) for d in unasked):
                yield f"{key}: has no effect while {reason}"
