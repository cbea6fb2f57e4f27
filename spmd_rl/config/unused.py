"""Settings that a user gave and that have no effect under the other settings: each is a warning, none is an error.

    for line in unused_settings(cfg, load("rlvr", RlvrConfig)):
        print(f"warning: {line}")

Settings that contradict each other are errors: see `sections/` and `checks.py`.
"""

from collections.abc import Callable, Iterator
from typing import Any

from spmd_rl.config.keys import flatten, to_dict
from spmd_rl.config.sections.algorithm import ADVANTAGES, CHOICES, LOSS_AGGS, LOSSES
from spmd_rl.config.sections.data import RewardConfig

GENERATORS = ("reasoning_gym:",)
"""Prefixes of `data.train` that name a generator instead of a file"""


def files(source: str | None) -> list[str]:
    """Return the files among the comma-separated sources of `data.train` or `data.eval`."""
    parts = [part.strip() for part in source.split(",")] if source else []
    return [part for part in parts if not part.startswith(GENERATORS)]


def no_reference(cfg: Any) -> bool:
    """Return whether no frozen reference is loaded."""
    return not cfg.algorithm.uses_reference


def no_critic(cfg: Any) -> bool:
    """Return whether no critic is trained."""
    return not cfg.algorithm.uses_critic


def only_files(cfg: Any) -> bool:
    """Return whether all prompts come from files."""
    sources = (cfg.data.train, cfg.data.eval)
    return not any(part.strip().startswith(GENERATORS) for source in sources if source for part in source.split(","))


def never_evaluated(cfg: Any) -> bool:
    """Return whether held-out prompts are never used."""
    return cfg.eval.every == 0


def unread_algorithm_keys() -> Iterator[tuple[str, str, Callable[[Any], bool]]]:
    """Yield the entries of `UNUSED` for the keys of `algorithm` that only some of its functions read."""
    for choice, known in (("advantage", ADVANTAGES), ("loss", LOSSES), ("loss_agg", LOSS_AGGS)):
        for key in dict.fromkeys(key for keys in known.values() for key in keys):
            readers = [name for name, keys in known.items() if key in keys]
            if key not in ("gamma", "pass_score"):  # read elsewhere too
                yield f"algorithm.{key}", f"algorithm.{choice} is not {_join_or(readers)}", _is_none_of(choice, readers)
    for loss, keys in CHOICES.items():
        for key in keys:
            yield f"algorithm.{key}", f"algorithm.loss is not {loss}", _is_none_of("loss", [loss])
    for key, (switch, off) in SWITCHES.items():
        yield f"algorithm.{key}", f"algorithm.{switch} is {off}", _is_off(switch)
    for key in ("upper", "mask_low", "mask_high"):
        off = "algorithm.correction.level is off"
        yield f"algorithm.correction.{key}", off, lambda cfg: cfg.algorithm.correction.level == "off"


SWITCHES = {
    "kl_estimator": ("kl_coef", "0"),
    "kl_reward_estimator": ("kl_reward_coef", "0"),
    "kl_horizon": ("target_kl", "null"),
    "repetition_ngram": ("repetition_coef", "0"),
    "overlong_tokens": ("overlong_coef", "0"),
    "difficulty_low_threshold": ("difficulty_mask", "false"),
    "difficulty_high_threshold": ("difficulty_mask", "false"),
    "error_max_len_threshold": ("error_max_len_clip", "false"),
}
"""For a key of `algorithm`, the key that switches it off and the value with which it does"""


def _join_or(names: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _is_none_of(choice: str, names: list[str]) -> Callable[[Any], bool]:
    return lambda cfg: getattr(cfg.algorithm, choice) not in names


def _is_off(switch: str) -> Callable[[Any], bool]:
    return lambda cfg: not getattr(cfg.algorithm, switch)


UNUSED: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("reference", "algorithm.kl_coef and algorithm.kl_reward_coef are 0", no_reference),
    ("critic", "algorithm.advantage is not gae", no_critic),
    *unread_algorithm_keys(),
    ("rollout.accept", "rollout.tail is defer", lambda cfg: cfg.rollout.tail == "defer"),
    ("rollout.tail", "rollout.over_sample is 0", lambda cfg: cfg.rollout.over_sample == 0),
    ("data.size", "problems come from files", only_files),
    ("data.seed", "problems come from files", only_files),
    ("data.args", "problems come from files", only_files),
    ("data.holdout", "data.eval is given", lambda cfg: cfg.data.eval is not None),
    ("sidecar", "debug is true", lambda cfg: cfg.debug),
    *((f"eval.{key}", "eval.every is 0", never_evaluated) for key in ("prompts", "answers", "temperature")),
)
"""(key or section, reason, condition under which it has no effect)"""


def unused_settings(cfg: Any, shipped: Any) -> Iterator[str]:
    """Yield one line for each setting without effect that the user changed.

    A changed setting differs from the schema's default and from `shipped`, the settings of a command without overrides.
    """
    defaults = [dict(flatten(to_dict(settings))) for settings in (shipped, type(cfg)())]
    for domain, reward in cfg.reward.domains.items():
        if reward.devices is None and reward.server != RewardConfig.server:
            yield f"reward.{domain}.server: has no effect while reward.{domain}.devices is null"
    for key, value in flatten(to_dict(cfg)):
        if key.startswith("reward.") and key.endswith((".workers", ".cpus")) and cfg.debug and value not in (1, None):
            yield f"{key}: has no effect while debug is true"
        for unused, reason, applies in UNUSED:
            if f"{key}.".startswith(f"{unused}.") and applies(cfg) and all(value != d.get(key) for d in defaults):
                yield f"{key}: has no effect while {reason}"
