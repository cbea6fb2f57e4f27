"""Settings without effect under the others: warnings, not errors.

    for line in unused_settings(cfg, load("rlvr", RlvrConfig), chosen("rlvr", overrides)):
        print(f"warning: {line}")

Contradictions are errors: see `sections/` and `checks.py`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from spmd_rl.config.algorithm_targets import is_own, parameters
from spmd_rl.config.apply import apply
from spmd_rl.config.keys import flatten, to_dict
from spmd_rl.config.sections.algorithm import ADVANTAGES, CHOICES, LOSS_AGGS, LOSSES, AlgorithmConfig
from spmd_rl.config.sections.data import GENERATORS, DataConfig, RewardConfig, RewardsConfig, SourcesConfig
from spmd_rl.config.sections.env import EnvsConfig
from spmd_rl.config.sections.placement import PlacementConfig
from spmd_rl.config.sections.preference import LOSSES as LOSSES_OF_PREFERENCES
from spmd_rl.config.sections.preference import PreferenceConfig
from spmd_rl.config.sections.rollout import RolloutConfig
from spmd_rl.config.sections.teachers import TeachersConfig

OFF = (None, False, 0, "off", "defer", "adamw")
"""Values that turn a setting in `NEEDED` off"""

NEEDED = (
    ("algorithm.kl_coef", "algorithm.kl_estimator"),
    ("algorithm.kl_reward_coef", "algorithm.kl_reward_estimator"),
    ("algorithm.target_kl", "algorithm.kl_horizon"),
    ("algorithm.repetition_coef", "algorithm.repetition_ngram"),
    ("algorithm.overlong_coef", "algorithm.overlong_tokens"),
    ("algorithm.difficulty_mask", "algorithm.difficulty_low_threshold algorithm.difficulty_high_threshold"),
    ("algorithm.variance_top_p", "algorithm.variance_eps"),
    ("algorithm.error_max_len_clip", "algorithm.error_max_len_threshold"),
    ("algorithm.correction.level", "algorithm.correction.upper algorithm.correction.mask_low"),
    ("algorithm.correction.level", "algorithm.correction.mask_high"),
    ("rollout.tail", "rollout.accept"),
    ("rollout.over_sample", "rollout.tail"),
    ("eval.every", "eval.prompts eval.answers eval.temperature eval.top_p eval.top_k eval.min_p eval.rows"),
    ("teacher.coef", "teacher.loss teacher.top_k teacher.mix"),
    ("policy.optimizer", "policy.muon_momentum"),
    ("critic.optimizer", "critic.muon_momentum"),
    ("policy.lora.rank", "policy.lora"),
    ("critic.lora.rank", "critic.lora"),
    ("reference.sync_steps", "reference.mixup"),
)
"""Settings, with those that need them"""

Idle = list[tuple[Any, str, str]]
"""Condition for an effect, the reason without one, and keys or sections in one text"""


def unused_settings(cfg: Any, shipped: Any, chosen: Mapping[str, Any] = MappingProxyType({})) -> Iterator[str]:
    """Yield a line for each setting without effect that the user changed.

    Changed: unlike the schema's default, `shipped` (a command without overrides), and `chosen`, a tree of the user's
    experiment, recipe or data.
    """
    trees = [to_dict(shipped), to_dict(type(cfg)()), chosen, *apply((_bare_rewards,), cfg)]
    defaults = [dict(flatten(tree)) for tree in trees]
    values = dict(flatten(to_dict(cfg)))
    idle = [(values[key] not in OFF, f"{key} is {_shown(values[key])}", keys) for key, keys in NEEDED if key in values]
    idle += [row for rows in apply(IDLE, cfg) for row in rows]
    reasons = {key: reason for effect, reason, keys in idle for key in keys.split() if not effect}
    for key, value in values.items():
        names = key.split(".")
        reason = next(filter(None, (reasons.get(".".join(names[:n])) for n in range(1, len(names) + 1))), None)
        if reason and value is not None and all(value != known.get(key) for known in defaults):
            yield f"{key}: has no effect while {reason}"


def _shown(value: Any) -> str:
    return json.dumps(value).strip('"').removesuffix(".0")


def _bare_rewards(reward: RewardsConfig) -> dict[str, Any]:
    return {"reward": {domain: to_dict(RewardConfig(one.target)) for domain, one in reward.domains.items()}}


def _of_algorithm(algorithm: AlgorithmConfig) -> Idle:
    a = algorithm
    return [
        (a.uses_reference, "algorithm.kl_coef and algorithm.kl_reward_coef are 0", "reference"),
        (a.uses_critic, "algorithm.advantage is not gae or turn_gae", "critic"),
        *((False, reason, key) for key, reason in unread_algorithm_keys(a)),
    ]


def _of_generation(rollout: RolloutConfig, placement: PlacementConfig) -> Idle:
    generation = "engine publish sidecar rollout.over_sample rollout.claim rollout.accept rollout.tail"
    generation += " rollout.prompts_per_step rollout.partial_rollout rollout.filter rollout.answers_per_claim"
    generation += "".join(f" placement.{one.name}" for one in fields(placement) if one.name not in placement.frozen)
    return [(not rollout.replay, "rollout.replay is given", generation)]


def _of_teacher(teacher: TeachersConfig) -> Idle:
    keys = "teacher.train teacher.only teacher.coef teacher.loss teacher.top_k teacher.mix teacher.reward_coef"
    return [(teacher.by_domain, "teacher.model is null", keys)]


def _of_data(data: SourcesConfig) -> Idle:
    generated = GENERATORS in f"{data.train},{data.eval}"
    return [
        (generated, "problems come from files", "data.size data.seed data.args"),
        (data.eval is None, "data.eval is given", "data.holdout"),
    ]


def _of_evaluation(data: DataConfig, env: EnvsConfig) -> Idle:
    return [
        (False, "nothing is trained", "data.mix"),
        (not data.eval, "data.eval is given", "data.train"),
        (not env.tags, "environments are evaluated", "data"),
    ]


def _of_preference(preference: PreferenceConfig) -> Idle:
    keys = {key for read in LOSSES_OF_PREFERENCES.values() for key in read}
    reason = f"preference.loss is {preference.loss}"
    unread = [(False, reason, f"preference.{key}") for key in keys - set(LOSSES_OF_PREFERENCES[preference.loss])]
    return [*unread, (preference.uses_reference, "the loss has no reference", "reference")]


def _of_sidecar(reward: RewardsConfig, debug: bool) -> Idle:
    idle: Idle = [(not debug, "debug is true", "sidecar")]
    for domain, one in reward.domains.items():
        section = f"reward.{domain}"
        idle.append((not debug, "debug is true", f"{section}.workers {section}.cpus"))
        idle.append((one.devices, f"{section}.devices is null", f"{section}.server"))
    return idle


IDLE = (*(_of_algorithm, _of_generation, _of_teacher, _of_data, _of_evaluation, _of_preference, _of_sidecar),)
"""Functions of sections, for pipelines with these (`apply`)"""


def unread_algorithm_keys(algorithm: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    """Yield keys of `algorithm` that no chosen function reads, with the reason."""
    for choice, known in (("advantage", ADVANTAGES), ("loss", LOSSES), ("loss", CHOICES), ("loss_agg", LOSS_AGGS)):
        # `gamma` and `pass_score` are read by other functions too.
        for key in {key for keys in known.values() for key in keys} - {"gamma", "pass_score"}:
            readers = [name for name, keys in known.items() if key in keys]
            if choice != "loss_agg" and is_own(algorithm, choice) and key in parameters(algorithm, choice):
                continue
            if getattr(algorithm, choice) not in readers:
                yield f"algorithm.{key}", f"algorithm.{choice} is not {' or '.join(readers)}"
