"""Messages on rank 0's terminal: before a run's first step, in its long phases and after its last step."""

from functools import partial
from itertools import chain
from pathlib import Path

from spmd_rl.base.errors import aligned, duration, plural
from spmd_rl.base.waits import Wait
from spmd_rl.config.apply import apply
from spmd_rl.config.batch_arithmetic import describe_batch, describe_evaluation, describe_held_out, describe_rows
from spmd_rl.config.model_files import describe_model
from spmd_rl.config.placement import Placement, ranks_do
from spmd_rl.config.ranks import world_size
from spmd_rl.config.schema import EngineConfig, EvaluationConfig, JobConfig, PlacementConfig, RolloutConfig
from spmd_rl.config.sections.data import DataConfig
from spmd_rl.config.sections.models import EvaluatedModelConfig, PolicyConfig
from spmd_rl.config.sections.teachers import TeachersConfig
from spmd_rl.distributed import World
from spmd_rl.track import goodput
from spmd_rl.track.metrics import read_lines
from spmd_rl.track.results import RESULTS

LOADERS = {"ForSequenceClassification": "SequenceClassification", "ForConditionalGeneration": "ImageTextToText"}
"""Ends of the auto classes of transformers for architectures other than causal language models."""
WAITS = {
    "start": "starting: loading the models and the pipeline's other parts",
    "restore": "loading the checkpoint",
    "publish": "publishing the weights to the engine",
    "save": "writing the checkpoint",
    "eval": "evaluating",
}
"""Phases that are always announced when they take long."""
FIRST_WAITS = {
    "generate": "generating; an engine may compile in the first step",
    "logprobs": "computing logprobs; the trainer may compile in the first step",
    "update": "training; the trainer may compile in the first step",
}
"""Phases that are announced in the first step of this process."""


def header(cfg: JobConfig, world: World, num_train: int, num_eval: int) -> str:
    """Describe the run: model, ranks, directory; for generating pipelines also the arithmetic of a step."""
    axes = ", ".join(f"{axis}={size}" for axis, size in cfg.train.used_axes.items())
    ranks, nodes = world_size(), -(-world_size() // world.local_size)
    layout, model, dtype = f"({cfg.train.name}, {axes})", Path(cfg.policy.model), cfg.policy.dtype
    generates = apply((partial(_tasks, layout),), cfg)
    where = "forward passes and the engine" if generates else "forward passes"
    trained = f"{dtype} in {where}; master weights and optimizer in float32"
    tasks = generates[0] if generates else f"each trains {layout}"
    lines = [
        ("run", f"{cfg.run.name}, {cfg.steps or 'no training'}{' steps' * bool(cfg.steps)}, seed {cfg.seed}"),
        ("model", f"{_measured(cfg) or model}: {describe_model(model)}"),
        *apply((_adapters, _teachers), cfg),
        ("dtype", trained if cfg.steps else dtype),
        ("ranks", f"{ranks} on {nodes} node{'s' * (nodes > 1)} ({world.device.type}): {tasks}"),
        *apply((partial(_slow_engine, world.device.type),), cfg),
        *chain.from_iterable(apply([partial(one, num_train, num_eval) for one in (_prompts, describe_rows)], cfg)),
        *chain.from_iterable(apply((describe_batch,), cfg)),
        *apply((partial(_evaluation, num_eval),), cfg),
        ("run.dir", cfg.run.dir),
    ]
    return aligned([line for line in lines if line[1]])


def _measured(cfg: JobConfig) -> str | None:
    return cfg.policy.checkpoint if isinstance(cfg.policy, EvaluatedModelConfig) else None


def _adapters(policy: PolicyConfig) -> tuple[str, str]:
    lora, targets = policy.lora, ", ".join(policy.lora.targets or ["all linear layers of the decoder layers"])
    return "adapters", f"LoRA of rank {lora.rank} on {targets}; no other weight is trained" if lora.rank else ""


def _teachers(teacher: TeachersConfig) -> tuple[str, str]:
    named = [f"{domain or 'all'}: {one.model or 'the policy with a hint'}" for domain, one in teacher.by_domain.items()]
    if not named:
        return "teacher", ""
    scores = "nothing else" if teacher.only else "and from the scores or the rows' own answers"
    return "teacher", f"{', '.join(named).removeprefix('all: ')}; the policy learns from {teacher.loss}, {scores}"


def _tasks(layout: str, placement: PlacementConfig, engine: EngineConfig, steps: int = 0) -> str:
    stages = f", pp={engine.pp}" * (engine.pp > 1)
    generates, ranks = f"({engine.name}, tp={engine.tp}{stages})", Placement.of(placement, world_size())
    if placement.is_split:
        return (
            f"{ranks.held}{ranks_do(ranks.train, 'train')} {layout}, {ranks_do(ranks.generate, 'generate')} {generates}"
        )
    ahead = ", the next step before it trains" if placement.is_overlapped else ""
    each = f"{ranks.held}each{' other' * bool(ranks.held)}"
    return f"{each} trains {layout} and generates {generates}{ahead}" if steps else f"each generates {generates}"


def _slow_engine(device: str, engine: EngineConfig) -> tuple[str, str]:
    is_slow = engine.name == "native" and device != "cpu"
    return "engine", "vLLM decodes 1.5 to 3.3 times as fast as native (1.7B on an H200): engine=vllm" if is_slow else ""


def _prompts(
    num_train: int, num_eval: int, rollout: RolloutConfig, steps: int, data: DataConfig | None = None
) -> list[tuple[str, str]]:
    epochs = steps * rollout.prompts_per_step / max(num_train, 1)
    train = f"{num_train} for training ({epochs:.3g} epochs)" if num_train else "unlimited tasks for training"
    return [("prompts", f"{train}, {describe_held_out(num_eval, data)}")]


def _evaluation(num_eval: int, eval: EvaluationConfig, steps: int = 0) -> tuple[str, str]:
    return "evaluation", describe_evaluation(eval, steps, num_eval)


def footer(run_dir: Path, steps: int) -> str:
    """Return text on the report and the last checkpoint, and how to continue and load the model.

    steps: of a complete run, else 0.
    """
    lines = [("report", str(run_dir / "report.html"))]
    if (run_dir / RESULTS).exists():
        lines.append(("results", str(run_dir / RESULTS)))
    if checkpoints := sorted((run_dir / "checkpoints").glob("step-*")):
        last = checkpoints[-1]
        lines.append(("checkpoint", str(last)))
        lines.append(("continue", "the same command" + f" with steps= above {steps}" * (steps > 0)))
        if (last / "hf").is_dir():
            config = last / "hf" / "config.json"
            text = config.read_text() if config.is_file() else ""
            loader = next((task for kind, task in LOADERS.items() if kind in text), "CausalLM")
            load = f'transformers.AutoModelFor{loader}.from_pretrained("{last / "hf"}")'
            # A diffusion model is loaded by a class of diffusers, see docs/DIFFUSION.md.
            lines.append(("load", load if "architectures" in text else str(last / "hf")))
    if (account := goodput.read(run_dir)).wall:
        starts = plural(account.starts, "start")
        lines.append(("goodput", f"{100 * account.goodput:.1f} % of {duration(account.wall)}, {starts}"))
    lines.append(("compare", f"python -m spmd_rl compare {run_dir} OTHER_RUN_DIR"))
    return aligned(lines)


def interrupted(run_dir: Path) -> str:
    """Return text on an interrupted run: unsaved steps or kept answers, and how to continue."""
    if (run_dir / "answers").is_dir():
        return "the answers that have a score are kept\nthe same command asks for the others"
    latest = run_dir / "checkpoints" / "latest"
    saved = int(latest.read_text().strip().removeprefix("step-")) if latest.exists() else 0
    done = max((line["step"] for line in read_lines(run_dir / "metrics.jsonl")), default=0)
    several = f"steps {saved + 1} to {done} are" if done > saved + 1 else f"step {done} is"
    lost = f"{several} lost" if done > saved else "no finished step is lost"
    kept = f"the newest checkpoint is that of step {saved}" if saved else "there is no checkpoint yet"
    place = f"step {saved}" if saved else "the start"
    return f"{kept}, {lost} (checkpoint.every)\nthe same command continues from {place}"


class PhaseReporter:
    """Watcher of a journal's phases (a `PhaseWatcher`) that reports long ones, such as `evaluating (20 s)`."""

    def __init__(self) -> None:
        self._open: list[Wait] = []
        self.first_step = True
        """True until the first step of this process ends."""

    def enter(self, phase: str) -> None:
        """Begin a phase, inside those that are open."""
        known = WAITS | FIRST_WAITS if self.first_step else WAITS
        self._open.append(Wait(phase in known))
        self._open[-1](known.get(phase, ""))

    def exit(self, phase: str) -> None:
        """End the innermost phase that is open."""
        self._open.pop().over()
