"""What can be known before the process group forms: the mesh, files, targets, the run's directory.

Torch-free, and without a word to other ranks: every rank checks for itself, and finds the same. Left out: values
(`schema.py`), rows of a dataset (`data`), settings without effect (`idle.py`).
"""

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmd_rl.config.identity import saved_config
from spmd_rl.config.idle import files, no_critic, no_reference
from spmd_rl.curve_keys import ClientKeys, HostKeys
from spmd_rl.errors import UserError
from spmd_rl.targets import UNPROVIDED, build_target, import_coroutine

ONLY_DATA_PARALLEL = ("fsdp2",)
"""Backends without tensor, pipeline, context or expert parallelism."""

VOCABULARY_ROWS = 64
"""vLLM fills the vocabulary up to a multiple of this before it shares it out."""

WEIGHTS = ("*.safetensors",)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def rank() -> int:
    """This process's rank, as torchrun tells it; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """The same among the ranks of this node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Number of ranks."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check(cfg: Any) -> None:
    """A `UserError` for the first thing that cannot work. Sections that a pipeline does not have are passed over."""
    for section, test in CHECKS.items():
        if hasattr(cfg, section):
            test(cfg)


def check_mesh(cfg: Any) -> None:
    """The parallel dimensions of the backend, and the world size."""
    axes = {axis: getattr(cfg.train, axis) for axis in ("tp", "pp", "cp", "ep")}
    for axis, size in axes.items():
        if cfg.train.name in ONLY_DATA_PARALLEL and size != 1:
            raise UserError(
                f"train.{axis}: {size} is impossible, train={cfg.train.name} shards data-parallel only: "
                "tp, pp, cp and ep must be 1"
            )
    copy = axes["tp"] * axes["pp"] * axes["cp"]
    if world_size() % copy:
        raise UserError(f"train.tp: tp x pp x cp = {copy} ranks a model copy do not divide {world_size()} ranks")


def check_engine(cfg: Any) -> None:
    """The engine is installed, replicas come out even, and so do the model's heads in each."""
    engine = cfg.engine
    if engine.name == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UserError(
            "engine=vllm: vLLM is not installed here; `make setup` installs it for the CPU, "
            "pip install 'spmd-rl[vllm]' for a GPU; or say engine=native"
        )
    for key, temperature in (("rollout", cfg.rollout.temperature), ("eval", cfg.eval.temperature)):
        if engine.name == "vllm" and temperature and not 0.01 <= temperature <= 2:
            raise UserError(f"{key}.temperature: {temperature:g} is not what engine=vllm draws at, 0.01 to 2")
    if engine.name == "native" and engine.tp != 1:
        raise UserError(f"engine.tp: {engine.tp} is impossible, engine=native holds a whole model per rank: must be 1")
    if world_size() % engine.tp:
        raise UserError(f"engine.tp: {engine.tp} does not divide {world_size()} ranks")
    if engine.tp > 1:
        check_heads(engine.tp, Path(cfg.policy.model) / "config.json")


def check_episode(cfg: Any) -> None:
    """Whether `rollout.target` names a coroutine function that takes a context."""
    if cfg.rollout.target is not None:
        import_coroutine("rollout.target", cfg.rollout.target)


def check_heads(tp: int, path: Path) -> None:
    """Whether `tp` ranks can share a model's heads, hidden units and vocabulary, as far as its config tells."""
    try:
        model = json.loads(path.read_text())
    except (OSError, ValueError):
        return  # told by the checks of the model itself
    heads = model.get("num_attention_heads", tp)
    kv_heads = model.get("num_key_value_heads") or heads
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        fit = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        raise UserError(
            f"engine.tp: {tp} ranks cannot share the {heads} heads and {kv_heads} key-value heads of {path.parent}; "
            f"they allow {', '.join(map(str, fit))}"
        )
    rows = -(-model.get("vocab_size", 0) // VOCABULARY_ROWS) * VOCABULARY_ROWS
    for what, size in (("intermediate_size", model.get("intermediate_size") or tp), ("padded vocabulary", rows)):
        if size % tp:
            raise UserError(f"engine.tp: {tp} does not divide the {what} {size} of {path.parent}")


def check_models(cfg: Any) -> None:
    """The policy's directory, and the reference's where one is loaded."""
    check_model("policy.model", cfg.policy.model)
    if hasattr(cfg, "reference") and cfg.reference.model and not no_reference(cfg):
        check_model("reference.model", cfg.reference.model)
    if hasattr(cfg, "critic") and cfg.critic.model and not no_critic(cfg):
        check_model("critic.model", cfg.critic.model)


def check_model(key: str, path: str) -> None:
    """A Hugging Face directory with config, safetensors and tokenizer."""
    remedy = "`make model` (python -m spmd_rl.model.smollm2) makes the default one"
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{key}: no directory {path}; give a Hugging Face model directory, or {remedy}")
    for what, patterns in (("config.json", ("config.json",)), ("safetensors", WEIGHTS), ("tokenizer", TOKENIZERS)):
        if not any(any(folder.glob(pattern)) for pattern in patterns):
            raise UserError(f"{key}: {path} has no {what}; give a Hugging Face model directory, or {remedy}")


def check_data(cfg: Any) -> None:
    """Files exist. Their rows are read later, and still before the process group forms."""
    for key in ("train", "eval"):
        for path in files(getattr(cfg.data, key)):
            if not Path(path).is_file():
                raise UserError(f"data.{key}: no file {path}; give JSONL files, or reasoning_gym:<task>")


def check_rewards(cfg: Any) -> None:
    """Each target can be imported and built. Once a node, where its sidecar will do it again."""
    if not cfg.reward.domains:
        raise UserError("reward: no domain has a rewarder; say reward.<domain>.target=module:Class")
    for domain, reward in cfg.reward.domains.items():
        if reward.timeout >= cfg.journal.stall_seconds and not cfg.debug:
            told = f"journal.stall_seconds={cfg.journal.stall_seconds:g}"
            raise UserError(f"reward.{domain}.timeout: {reward.timeout:g} s of legal waiting, but {told} ends the run")
        if reward.devices is not None and cfg.debug:
            raise UserError(f"reward.{domain}.devices: debug starts no server; give reward.{domain}.args.url")
    if local_rank() != 0:
        return
    for domain, reward in cfg.reward.domains.items():
        services = UNPROVIDED if reward.devices is None else {**UNPROVIDED, "url": lambda: "http://127.0.0.1/v1"}
        build_target(f"reward.{domain}", reward.target, reward.args, services=services)


def check_run(cfg: Any) -> None:
    """`run.dir` can be written, and `checkpoint.resume` and `debug` fit what is there."""
    folder = Path(cfg.run.dir)
    ancestor = next(path for path in (folder, *folder.parents) if path.exists())
    if not ancestor.is_dir():
        raise UserError(f"run.dir: {ancestor} is not a directory")
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise UserError(f"run.dir: {ancestor} is not writable")
    if cfg.debug and world_size() != 1:
        raise UserError(f"debug: works in one process, not with {world_size()} ranks; use python -m, not torchrun")
    resume = cfg.checkpoint.resume
    if resume == "never" and saved_config(folder) is not None:
        raise UserError(f"checkpoint.resume: never, but {folder} holds a run; choose another run.dir")
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        raise UserError(f"checkpoint.resume: no directory {resume}; known names: auto, never")


def check_sidecar(cfg: Any) -> None:
    """The keys are there, and nobody else's. The host's are read once a node, where it will start."""
    if cfg.sidecar.keys is not None and not cfg.debug:
        ClientKeys.load(cfg.sidecar.keys)
        if local_rank() == 0:
            HostKeys.load(cfg.sidecar.keys)


CHECKS: dict[str, Callable[[Any], None]] = {
    "train": check_mesh,
    "engine": check_engine,
    "rollout": check_episode,
    "run": check_run,
    "policy": check_models,
    "data": check_data,
    "sidecar": check_sidecar,
    "reward": check_rewards,
}
