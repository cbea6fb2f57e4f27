"""Checks before the process group forms: the layout of ranks, files, targets and the run directory.

They need no torch and no other rank: every rank checks for itself. Values are checked in `sections/`, the rows of a
dataset in `data`, settings without effect in `unused.py`.
"""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from spmd_rl.bundled import HOME
from spmd_rl.config.algorithm_targets import check_algorithm
from spmd_rl.config.architectures import check_architecture, experts_in
from spmd_rl.config.backends import backend
from spmd_rl.config.env_checks import check_envs
from spmd_rl.config.model_files import check_weights
from spmd_rl.config.packages import unsupported
from spmd_rl.config.placement import Placement
from spmd_rl.config.ranks import LayoutSizes, check_experts, deal_layers, local_rank, world_size
from spmd_rl.config.reward_checks import check_rewards
from spmd_rl.config.run_checks import check_run, check_wandb
from spmd_rl.config.sections.data import files, sources
from spmd_rl.curve_keys import ClientKeys, HostKeys, on_loopback
from spmd_rl.errors import UserError
from spmd_rl.hub import TOKENIZERS, fetch_config, fetch_weights, hub_dataset, hub_id, model_folder
from spmd_rl.targets import import_coroutine

SHAPES = HOME / "configs" / "shapes"
"""Directories with the `config.json` of a model alone"""
VOCABULARY_ROWS = 64
"""vLLM pads the vocabulary to a multiple of this before it shards it"""


NO_DATA = (
    "data.train: no dataset is given; to see a small model learn sums, say +experiment=demo; for math problems of "
    "your own, say data=jsonl_math data.train=rows.jsonl (docs/DATA.md)"
)
NO_TRAINING_DATA = "data.train: no training data is given; to evaluate data.eval and train nothing, say steps=0"
NO_ENVIRONMENT = (
    "env: no environment is given; say env.<tag>.target=module:Class, as env.lake.target=envs.frozen_lake:FrozenLake; "
    "to see a small model learn to walk, say +experiment=demo_frozen_lake (docs/ENVIRONMENTS.md)"
)


def check(cfg: Any) -> None:
    """Raise a `UserError` for the first thing that cannot work."""
    data, env = getattr(cfg, "data", None), getattr(cfg, "env", None)  # whichever the pipeline has
    if data and not data.train and (cfg.steps or not data.eval):
        raise UserError(NO_TRAINING_DATA if data.eval else NO_DATA)
    if env and not env.tags:
        raise UserError(NO_ENVIRONMENT)
    check_run(cfg)
    check_models(cfg)
    check_placement(cfg)
    check_mesh(cfg)
    check_engine(cfg)
    check_episode(cfg)
    if data:
        check_data(cfg)
    check_sidecar(cfg)
    check_wandb(cfg.track.wandb)
    if data or cfg.reward.domains:
        check_rewards(cfg)
    if env:
        check_envs(cfg)
    if not names_of_the_hub(cfg):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # or libraries would ask the hub about files of this machine
    check_algorithm(cfg.algorithm)  # last: a module of tensors imports torch


def check_plan(cfg: Any) -> None:
    """Raise a `UserError` for the first thing that a plan reads and that cannot work: shapes of models, layouts.

    `plan.shape` takes the place of `policy.model`, as a path.
    """
    if cfg.plan.shape:
        known = SHAPES / cfg.plan.shape
        cfg.policy.model = str(known if known.is_dir() else Path(cfg.plan.shape).expanduser())
    for role in loaded_roles(cfg):
        model = getattr(cfg, role)
        model.model = fetch_config(f"{role}.model", model.model, wait=local_rank() != 0)
        if not (model_folder(model.model) / "config.json").is_file():
            raise UserError(f"{role}.model: {model.model} has no config.json, by which to plan; or say plan.shape")
    if cfg.plan.rank is not None and cfg.plan.rank >= world_size():
        raise UserError(f"plan.rank: {cfg.plan.rank} is none of {world_size()} ranks")
    check_mesh(cfg)
    check_replicas(cfg)


def names_of_the_hub(cfg: Any) -> list[str]:
    """Return the models and datasets of the hub that settings name, those of judges and reward models included."""
    models = [getattr(cfg, role).model for role in loaded_roles(cfg)]
    models += [str(reward.args["model"]) for reward in cfg.reward.domains.values() if "model" in reward.args]
    data = getattr(cfg, "data", None)
    rows = [*sources(data.train), *sources(data.eval)] if data else []
    return [name for name in models if hub_id(name)] + [name for name in rows if hub_dataset(name)]


def check_placement(cfg: Any) -> None:
    """Check that the ranks can be split as `placement` says, and that the other settings go with it."""
    placement = cfg.placement
    Placement.of(placement, world_size())
    if placement.is_overlapped and cfg.rollout.partial_rollout:
        raise UserError("rollout.partial_rollout: its tokens could be older than placement.max_staleness allows")
    if not placement.is_split:
        return
    _check_carried(cfg)
    if placement.swap == "keep" and cfg.engine.name != "native":
        raise UserError("placement.swap=keep: only with engine.name=native; recompute works with every engine")
    if placement.is_attached:
        _check_attached(cfg)
    several = int(os.environ.get("LOCAL_WORLD_SIZE", world_size())) < world_size() and placement.attach is None
    if several and placement.bind == "ipc":
        raise UserError(
            "placement.bind: ipc reaches the ranks of one machine; say placement.bind=tcp://* sidecar.keys=DIR "
            "(python -m spmd_rl sidecar_keys DIR makes the keys)"
        )
    if placement.bind != "ipc" and not cfg.sidecar.keys and not on_loopback(f"{placement.bind}:1"):
        raise UserError(
            f"placement.bind: {placement.bind} beyond this machine needs sidecar.keys, a directory of CURVE keys with "
            "an allow-list; python -m spmd_rl sidecar_keys DIR makes one"
        )


def _check_attached(cfg: Any) -> None:
    """Check that nothing is asked for that ranks which may be gone tomorrow cannot do."""
    refused = {
        "rollout.claim": (cfg.rollout.claim != "store", "must be store"),
        "rollout.partial_rollout": (cfg.rollout.partial_rollout, "must be false"),
        "debug": (cfg.debug, "must be false"),
    }
    for key, (wrong, remedy) in refused.items():
        if wrong:
            raise UserError(f"{key}: {remedy} with placement.generate=attached, whose ranks come and go")


def _check_carried(cfg: Any) -> None:
    """Check that no answer that is carried from step to step can become older than `placement.max_staleness`."""
    rollout, most = cfg.rollout, cfg.placement.max_staleness
    if not rollout.partial_rollout:
        return
    key = "rollout.partial_rollout with placement.mode=" + cfg.placement.mode
    if rollout.accept != "in_order" or rollout.claim != "store":
        raise UserError(
            f"{key}: only with rollout.accept=in_order and rollout.claim=store, else tokens could be too old"
        )
    if rollout.over_sample > most * rollout.prompts_per_step:
        raise UserError(
            f"{key}: rollout.over_sample={rollout.over_sample} runs ahead by more than placement.max_staleness={most} "
            f"steps of rollout.prompts_per_step={rollout.prompts_per_step} prompts"
        )


def check_mesh(cfg: Any) -> None:
    """Check that each role's layout divides the world size, its tensor parallelism the heads, `ep` the experts."""
    num_train = len(Placement.of(cfg.placement, world_size()).train)
    if not num_train:
        return  # the training job checks its own
    for role in cfg.roles:
        section, train, folder = role.key, role.train, model_folder(role.model)
        LayoutSizes.of(section, num_train, **train.axes)
        backend(train.name).check(role, folder)
        if (count := experts_in(folder)) is not None:
            check_experts(section, count, str(folder), train.ep)
        if train.pp > 1 or train.vpp > 1:
            check_layers(section, train.pp, train.vpp, folder / "config.json")
        if train.tp > 1:
            check_heads(f"{section}.tp", train.tp, folder / "config.json", with_units=not count)


def check_layers(section: str, pp: int, vpp: int, path: Path) -> None:
    """Check that each chunk of each pipeline stage gets a layer of a model; `path` is its `config.json`."""
    try:
        model = json.loads(path.read_text())
    except (OSError, ValueError):
        return  # `check_model` reports this
    deal_layers(section, (model.get("text_config") or model).get("num_hidden_layers", pp * vpp), pp, vpp)


def check_engine(cfg: Any) -> None:
    """Check that the engine is installed, that it can sample as asked, and its replicas."""
    engine = cfg.engine
    if engine.name == "vllm":
        missing, found = importlib.util.find_spec("vllm") is None, unsupported("vllm")
        if missing or found:
            raise UserError(
                f"engine=vllm: {'vLLM is not installed here' if missing else f'vLLM {found[0]} is not {found[1]}'}; "
                "`make setup` installs it for the CPU, pip install 'spmd-rl[vllm]' for a GPU; or say engine=native"
            )
    if cfg.policy.router_replay:
        if engine.name != "native":
            raise UserError(
                f"policy.router_replay: engine={engine.name} does not tell whom it chose; say engine=native"
            )
        if experts_in(model_folder(cfg.policy.model)) == 0:
            raise UserError("policy.router_replay: the model is no mixture of experts; must be false")
    for key, temperature in (("rollout", cfg.rollout.temperature), ("eval", cfg.eval.temperature)):
        if engine.name == "vllm" and temperature and not 0.01 <= temperature <= 2:
            raise UserError(f"{key}.temperature: {temperature:g} is out of the range of engine=vllm, 0.01 to 2")
    check_replicas(cfg)


def check_replicas(cfg: Any) -> None:
    """Check that `engine.tp` divides the ranks and the model's dimensions."""
    engine = cfg.engine
    if engine.name == "native" and engine.tp != 1:
        raise UserError(f"engine.tp: {engine.tp} is impossible, engine=native holds a whole model per rank: must be 1")
    placement = Placement.of(cfg.placement, world_size())
    if (num_ranks := len(placement.generate)) % engine.tp:
        raise UserError(f"engine.tp: {engine.tp} does not divide {num_ranks} ranks")
    train = set(placement.train)
    for replica in zip(*[iter(placement.generate)] * engine.tp, strict=True):
        if 0 < len(train.intersection(replica)) < engine.tp:
            raise UserError(f"placement.train: of the replica on ranks {replica} (engine.tp) all must train, or none")
    if engine.tp > 1:
        check_heads("engine.tp", engine.tp, model_folder(cfg.policy.model) / "config.json", engine=True)


def check_episode(cfg: Any) -> None:
    """Whether `rollout.target` names a coroutine function that takes a context."""
    if cfg.rollout.target is not None:
        import_coroutine("rollout.target", cfg.rollout.target)


def check_heads(key: str, tp: int, path: Path, engine: bool = False, with_units: bool = True) -> None:
    """Check that `tp` divides a model's heads and feed-forward units; `path` is its `config.json`.

    Several ranks may have a copy of the same key-value head. engine: it shares out a padded vocabulary too.
    with_units: not of a mixture, whose layers may all have experts instead, which are shared out in another way.
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


def check_models(cfg: Any) -> None:
    """Check the models of the policy, and of the reference and the critic where they are loaded.

    A name of the hub gets the commit that it stands for, so that all ranks, and a resumed run, load the same weights.
    """
    longest = cfg.rollout.max_context_tokens or cfg.rollout.max_prompt_tokens + cfg.rollout.max_new_tokens
    for role in loaded_roles(cfg):
        model, engine = getattr(cfg, role), cfg.engine.name if role == "policy" else ""
        model.model = check_model(f"{role}.model", model.model)
        check_architecture(f"{role}.model", model_folder(model.model), engine, longest)


def loaded_roles(cfg: Any) -> list[str]:
    """Return the names of the roles that load a model of their own."""
    return [role.name for role in cfg.roles if role.own.model]


def check_model(key: str, name: str) -> str:
    """Check that a model is a Hugging Face directory with config, safetensors and tokenizer, or one of the hub.

    Of a model of the hub the small files are downloaded. Returns the name, with its commit if it is one of the hub.
    """
    remedy = "or `make model` (python -m spmd_rl.model.smollm2) makes the default one; a model of the hub is ORG/NAME"
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


def fetch_models(cfg: Any) -> None:
    """Download the weights of the models of the hub, on local rank 0. The other ranks have waited for them before."""
    for role in loaded_roles(cfg):
        fetch_weights(f"{role}.model", getattr(cfg, role).model)


def check_data(cfg: Any) -> None:
    """Check that data files exist. Their rows are read later, still before the process group forms."""
    for key in ("train", "eval"):
        for path in files(getattr(cfg.data, key)):
            if not Path(path).is_file():
                raise UserError(
                    f"data.{key}: no file {path}; give JSONL or parquet files, a dataset of the hub (ORG/NAME:CONFIG), "
                    "or reasoning_gym:<task>"
                )


def check_sidecar(cfg: Any) -> None:
    """Check that the CURVE keys exist and are private; those of the host once per node, where it will start."""
    if cfg.sidecar.keys is not None and not cfg.debug:
        ClientKeys.load(cfg.sidecar.keys)
        if local_rank() == 0:
            HostKeys.load(cfg.sidecar.keys)
