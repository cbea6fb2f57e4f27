"""Checks before the process group forms: layouts, files, targets and the run directory.

Each rank checks for itself, without torch. `sections/` checks values, `data` the rows, `unused.py` settings without
effect.
"""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from spmd_rl.base.curve_keys import ClientKeys, HostKeys
from spmd_rl.base.errors import UserError
from spmd_rl.base.hub import TOKENIZERS, fetch_config, fetch_weights, hub_dataset, hub_id, model_folder
from spmd_rl.base.targets import import_coroutine
from spmd_rl.base.waits import phase
from spmd_rl.bundled import HOME
from spmd_rl.config.algorithm_targets import check_algorithm
from spmd_rl.config.apply import apply
from spmd_rl.config.architectures import check_architecture, experts_in
from spmd_rl.config.backends import backend, check_following
from spmd_rl.config.batch_arithmetic import tokens_per_turn
from spmd_rl.config.diffusion import check_diffusion
from spmd_rl.config.engines import facts_of, with_ability
from spmd_rl.config.model_files import check_weights
from spmd_rl.config.packages import unsupported
from spmd_rl.config.placement import Placement, check_frozen
from spmd_rl.config.plugin_checks import check_envs, check_reward_weights, check_rewards
from spmd_rl.config.ranks import LayoutSizes, check_experts, deal_layers, local_rank, world_size
from spmd_rl.config.replay import check_replay
from spmd_rl.config.run_checks import check_resume, check_run, check_wandb
from spmd_rl.config.schema import EVALUATE, JobConfig
from spmd_rl.config.sections.data import DataConfig, RewardsConfig, SourcesConfig, files, sources
from spmd_rl.config.sections.engine import EngineConfig
from spmd_rl.config.sections.env import EnvsConfig, WarmupConfig
from spmd_rl.config.sections.models import PolicyConfig, RoleConfig, ServedModelConfig
from spmd_rl.config.sections.placement import PlacementConfig
from spmd_rl.config.sections.rollout import EvaluationConfig, RolloutConfig, SamplingConfig
from spmd_rl.config.sections.run import PlanConfig, SidecarConfig
from spmd_rl.config.sections.teachers import TeachersConfig
from spmd_rl.config.vocabulary import difference

SHAPES = HOME / "configs" / "shapes"
"""Directories with only a model's `config.json`"""
VOCABULARY_ROWS = 64
"""Multiple to which engines pad the vocabulary before they shard it"""


NO_TRAINING_DATA = (
    f"data.train: no training data is given; set it, or {EVALUATE} evaluates data.eval and trains nothing"
)
NO_ROWS = (
    "data.eval: nothing to evaluate is given; set data.eval=test.jsonl with a reward (data=jsonl_math has one), or "
    "env.<tag>.target=module:Class, or the experiment of a run, such as +experiment=demo"
)
NO_ENVIRONMENT = (
    "env: no environment is given; set env.<tag>.target=module:Class, such as "
    "env.lake.target=envs.frozen_lake:FrozenLake; for a small model that learns to walk, set "
    "+experiment=demo_frozen_lake (docs/ENVIRONMENTS.md)"
)


def check(cfg: JobConfig) -> None:
    """Raise a `UserError` for the first setting that cannot work."""
    apply(CHECKS, cfg)


def check_given_data(data: SourcesConfig, steps: int) -> None:
    """Check that there is training data."""
    if not data.train:
        raise UserError(NO_TRAINING_DATA if data.eval else data.no_data)


def check_given_envs(env: EnvsConfig, steps: int) -> None:
    """Check that there is an environment."""
    if not env.tags:
        raise UserError(NO_ENVIRONMENT)


def check_given_any(data: DataConfig, env: EnvsConfig) -> None:
    """Check that rows or environments can be evaluated."""
    if not (data.train or data.eval or env.tags):
        raise UserError(NO_ROWS)


def check_plan(cfg: JobConfig) -> None:
    """Raise a `UserError` for the first setting of a plan that cannot work."""
    apply((take_shape, check_shapes, check_mesh, check_replicas), cfg)


def take_shape(plan: PlanConfig, policy: ServedModelConfig) -> None:
    """Replace `policy.model` by `plan.shape`'s path."""
    if plan.shape:
        known = SHAPES / plan.shape
        policy.model = str(known if known.is_dir() else Path(plan.shape).expanduser())


def check_shapes(plan: PlanConfig, roles: list, placement: PlacementConfig | None = None) -> None:
    """Check that each model has a `config.json`, and that `plan.rank` exists."""
    if placement and placement.frozen:
        raise UserError(f"placement.{next(iter(placement.frozen))}: not supported by --plan yet; must be null")
    for role in loaded_roles(roles):
        key, model = role.model_key, role.own
        model.model = fetch_config(key, _shipped_shape(model.model), wait=local_rank() != 0)
        if not (model_folder(model.model) / "config.json").is_file():
            raise UserError(f"{key}: {model.model} has no config.json, which --plan reads; set plan.shape")
    if plan.rank is not None and plan.rank >= world_size():
        raise UserError(f"plan.rank: must be below {world_size()}, the number of ranks, not {plan.rank}")


def _shipped_shape(model: str) -> str:
    # A plan of a model of the hub, if we ship its shape, needs no network.
    hub = hub_id(model)
    shape = SHAPES / (hub[0].rpartition("/")[2].lower().removesuffix("-instruct") if hub else model)
    return str(shape) if shape.is_dir() and not Path(model).exists() else model


def stay_offline(roles: list, reward: RewardsConfig, data: DataConfig | None = None) -> None:
    """Keep libraries from asking the hub about local files, unless a setting names a model or dataset of it."""
    # Models of judges and reward models count. A pipeline without rewards may load models that no setting names.
    models = [role.own.model for role in loaded_roles(roles)]
    models += [str(one.args["model"]) for one in reward.domains.values() if "model" in one.args]
    rows = [*sources(data.train), *sources(data.eval)] if data else []
    if not any(map(hub_id, models)) and not any(map(hub_dataset, rows)):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def check_placement(placement: PlacementConfig, rollout: RolloutConfig) -> None:
    """Check that ranks can be split by `placement`, and that other settings fit."""
    Placement.of(placement, world_size())
    if placement.is_overlapped and rollout.partial_rollout:
        raise UserError("rollout.partial_rollout: its tokens could be older than placement.max_staleness allows")
    if not placement.is_split:
        return
    _check_carried(rollout, placement)


def _check_carried(rollout: RolloutConfig, placement: PlacementConfig) -> None:
    most = placement.max_staleness
    if not rollout.partial_rollout:
        return
    key = "rollout.partial_rollout with placement.mode=" + placement.mode
    if rollout.accept != "in_order" or rollout.claim != "store":
        raise UserError(f"{key}: only with rollout.accept=in_order and rollout.claim=store, or tokens could be too old")
    if rollout.over_sample > most * rollout.prompts_per_step:
        raise UserError(
            f"{key}: rollout.over_sample={rollout.over_sample} runs ahead by more than placement.max_staleness={most} "
            f"steps of rollout.prompts_per_step={rollout.prompts_per_step} prompts"
        )


def check_mesh(roles: list, placement: PlacementConfig | None = None) -> None:
    """Check that each role's layout divides the world size, its `tp` the heads, `ep` the experts."""
    ranks = Placement.of(placement or PlacementConfig(), world_size())
    if not ranks.train:
        return  # the training job checks its own
    for role in roles:
        section, train, folder = role.key, role.train, model_folder(role.model)
        LayoutSizes.of(section, len(ranks.of_role(role.kind)), **train.axes)
        backend(train.name).check(role, folder)
        if (count := experts_in(folder)) is not None:
            check_experts(section, count, str(folder), train.ep)
        if train.pp > 1 or train.vpp > 1:
            check_layers(section, train.pp, train.vpp, folder / "config.json")
        if train.tp > 1:
            check_heads(f"{section}.tp", train.tp, folder / "config.json", with_units=not count)


def check_layers(section: str, pp: int, vpp: int, path: Path) -> None:
    """Check that each pipeline chunk gets a layer. path: the model's `config.json`."""
    try:
        model = json.loads(path.read_text())
    except (OSError, ValueError):
        return  # `check_model` reports this
    deal_layers(section, (model.get("text_config") or model).get("num_hidden_layers", pp * vpp), pp, vpp)


def check_engine(
    engine: EngineConfig,
    placement: PlacementConfig,
    policy: ServedModelConfig,
    rollout: SamplingConfig,
    eval: EvaluationConfig | None = None,
) -> None:
    """Check the engine's installation, sampling and replicas."""
    temperatures = {"rollout": rollout.temperature, "eval": eval and eval.temperature}
    truncates = {"rollout": rollout.truncates, "eval": eval and eval.truncation(rollout)["top_k"]}
    facts_of(engine.name).check(engine, policy, temperatures, [section for section, cuts in truncates.items() if cuts])
    check_replicas(engine, placement, policy)


def check_replicas(engine: EngineConfig, placement: PlacementConfig, policy: ServedModelConfig) -> None:
    """Check that `engine.tp` and `engine.pp` divide ranks and model."""
    facts_of(engine.name).check_settings(engine)
    ranks = Placement.of(placement, world_size())
    key = "engine.tp" if engine.pp == 1 else "engine.tp x engine.pp"
    if (num_ranks := len(ranks.generate)) % engine.ranks:
        raise UserError(f"{key}: {engine.ranks} does not divide {num_ranks} ranks")
    train = set(ranks.train)
    for replica in zip(*[iter(ranks.generate)] * engine.ranks, strict=True):
        if 0 < len(train.intersection(replica)) < engine.ranks:
            raise UserError(f"placement.train: of the replica on ranks {replica} ({key}) all must train, or none")
    if engine.pp > 1:
        check_layers("engine", engine.pp, 1, model_folder(policy.model) / "config.json")
    if engine.tp > 1:
        check_heads("engine.tp", engine.tp, model_folder(policy.model) / "config.json", engine=True)


def check_episode(rollout: SamplingConfig, env: EnvsConfig | None = None) -> None:
    """Check that `rollout.target` is a coroutine function of one context, and fits `env`."""
    if env is not None and env.tags and rollout.thinking_budget:
        raise UserError("rollout.thinking_budget: not supported for agents, only for answers to prompts")
    if rollout.target is not None:
        import_coroutine("rollout.target", rollout.target)


def check_heads(key: str, tp: int, path: Path, engine: bool = False, with_units: bool = True) -> None:
    """Check that `tp` divides a model's heads and feed-forward units. path: its `config.json`.

    Ranks may share a key-value head. engine: shards a padded vocabulary too. with_units: False for a mixture, whose
    layers may all have experts instead.
    """
    try:
        model = json.loads(path.read_text())
    except (OSError, ValueError):
        return  # `check_model` reports this
    heads = model.get("num_attention_heads", tp)
    kv_heads = model.get("num_key_value_heads") or heads
    fit = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if tp not in fit:
        raise UserError(
            f"{key}: {tp} ranks cannot share the {heads} heads and {kv_heads} key-value heads of {path.parent}; "
            f"they allow {', '.join(map(str, fit))}"
        )
    rows = -(-model.get("vocab_size", 0) // VOCABULARY_ROWS) * VOCABULARY_ROWS
    units = (model.get("intermediate_size") if with_units else None) or tp
    sizes = {"intermediate_size": units, "padded vocabulary": rows if engine else tp}
    for what, size in sizes.items():
        if size % tp:
            raise UserError(f"{key}: {tp} does not divide the {what} {size} of {path.parent}")


def check_models(roles: list, engine: EngineConfig | None = None, rollout: SamplingConfig | None = None) -> None:
    """Check the models to load: the policy's, and other roles' separate ones. Hub names get their commit."""
    # All ranks, and a resumed run, must load the same weights.
    longest = tokens_per_turn(rollout, rollout.max_prompt_tokens) if rollout else 0
    for role in loaded_roles(roles):
        key = role.model_key
        role.own.model = check_model(key, role.own.model)
        check_architecture(key, folder := model_folder(role.own.model), longest, role.name == "critic")
        if engine and role.name == "policy":
            facts_of(engine.name).check_model(key, folder, engine.name)


def loaded_roles(roles: list[RoleConfig]) -> list[RoleConfig]:
    """Return the roles with a separate model."""
    return [role for role in roles if role.own.model]


def check_model(key: str, name: str) -> str:
    """Check that a model is a Hugging Face directory with config, safetensors and tokenizer, or on the hub.

    Downloads the small files of a hub model. Returns the name, with the commit of a hub model.
    """
    remedy = "or `python -m spmd_rl smollm2` makes the default one; a model of the hub is ORG/NAME"
    hub, name = hub_id(name), fetch_config(key, name, wait=local_rank() != 0)
    folder = model_folder(name)
    if not folder.is_dir():
        raise UserError(f"{key}: no directory {name}; give a Hugging Face model directory, {remedy}")
    wanted = {"config.json": ("config.json",), "safetensors": ("*.safetensors",), "tokenizer": TOKENIZERS}
    for what, patterns in wanted.items():
        later = hub and what == "safetensors"
        if not later and not any(any(folder.glob(pattern)) for pattern in patterns):
            raise UserError(f"{key}: {name} has no {what}; give a Hugging Face model directory, {remedy}")
    check_weights(key, folder)
    return name


def check_vocabularies(roles: list) -> None:
    """Check that all models share token ids, since some judge others' answers."""
    for role in roles[1:]:
        if problem := difference(model_folder(roles[0].model), model_folder(role.model)):
            raise UserError(f"{role.model_key}: {role.model} has a different vocabulary from policy.model's: {problem}")


def fetch_models(roles: list[RoleConfig]) -> None:
    """Download hub models' weights, on local rank 0. Other ranks have waited for them before."""
    for role in loaded_roles(roles):
        model = role.own.model
        with phase(f"{role.model_key}: fetching {model}", speaks=bool(hub_id(model)) and local_rank() == 0):
            fetch_weights(role.model_key, model)


def check_data(data: SourcesConfig) -> None:
    """Check that data files exist."""
    for key, text in (("train", data.train), ("eval", data.eval)):
        for path in files(text):
            if not Path(path).is_file():
                raise UserError(
                    f"data.{key}: no file {path}; give JSONL or parquet files, a dataset of the hub (ORG/NAME:CONFIG), "
                    "or reasoning_gym:<task>"
                )


def check_sidecar(sidecar: SidecarConfig, debug: bool) -> None:
    """Check that CURVE keys exist and are private; the host's on local rank 0."""
    if sidecar.keys is not None and not debug:
        ClientKeys.load(sidecar.keys)
        if local_rank() == 0:
            HostKeys.load(sidecar.keys)


MAX_RANK = 512


def check_adapters(engine: EngineConfig, policy: ServedModelConfig, placement: PlacementConfig | None = None) -> None:
    """Check that adapters can be published alone."""
    if not engine.adapters:
        return
    lora, facts = policy.lora if isinstance(policy, PolicyConfig) else None, facts_of(engine.name)
    able = with_ability(lambda other: other.adapters)
    wrong = {
        "needs policy.lora.rank above 0": lora is None or not lora.rank,
        f"only with engine={able}; engine={engine.name} gets merged weights": not facts.adapters,
        "only with engine.tp=1 and engine.pp=1, where the engine's weights can be compared": engine.ranks != 1,
        "only with placement.mode=colocated or overlapped": placement is not None and placement.is_split,
        "not with policy.lora.dora, which engines do not support": lora is not None and lora.dora,
        f"policy.lora.rank must be at most {MAX_RANK}": lora is not None and lora.rank > MAX_RANK,
        f"not with a mixture of experts on {facts.title}, which would get adapters on its experts too": (
            not facts.adapters_of_mixtures and experts_in(model_folder(policy.model)) != 0
        ),
    }
    for remedy, applies in wrong.items():
        if applies:
            raise UserError(f"engine.adapters: {remedy}")


def check_constraint(
    rollout: SamplingConfig,
    engine: EngineConfig,
    teacher: TeachersConfig | None = None,
    warmup: WarmupConfig | None = None,
) -> None:
    """Check that answers can follow their grammar."""
    if rollout.constraint.given is None:
        return
    key = f"rollout.constraint.{rollout.constraint.given[0]}"
    if importlib.util.find_spec("xgrammar") is None:
        raise UserError(f"{key}: xgrammar is not installed here; pip install 'spmd-rl[constraint]'")
    if found := unsupported("xgrammar"):
        raise UserError(f"{key}: xgrammar {found[0]} is not {found[1]}; pip install 'spmd-rl[constraint]'")
    refused: dict[str, Any] = {
        "engine.drafts": engine.drafts,
        "engine.pp above 1": engine.pp > 1,
        "engine.args.async_scheduling": engine.args.get("async_scheduling"),
        "engine.args.speculative_config": "speculative_config" in engine.args,
        "rollout.stop, which would cut answers short": rollout.stop,
        "rollout.thinking_budget, whose text the constraint does not cover": rollout.thinking_budget,
        "rollout.target, whose turns may go on within an answer": rollout.target,
        "teacher.model, whose answers are not constrained": teacher and teacher.by_domain,
        "warmup.steps, whose demonstrations are not constrained": warmup and warmup.steps,
    }
    for what, applies in refused.items():
        if applies:
            raise UserError(f"{key}: not with {what}")


CHECKS = (
    *(check_given_data, check_given_envs, check_given_any, check_run, check_resume, check_models, check_vocabularies),
    *(check_placement, check_replay, check_frozen, check_mesh, check_following, check_engine, check_adapters),
    check_constraint,
    *(check_episode, check_data, check_sidecar, check_wandb, check_reward_weights, check_rewards, check_envs),
    stay_offline,
    # Last, since a module with tensors imports torch, which takes seconds that other mistakes need not cost.
    check_algorithm,
    check_diffusion,
)
"""Checks in order, each for pipelines with its sections (`apply`)"""
