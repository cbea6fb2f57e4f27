"""Plan of reward feedback: what a rank would hold when it encodes, draws, decodes and trains pictures.

    python -m spmd_rl plan reward_fl +experiment=reward_fl_sd3_8gpu

It runs the code of a step, over a `Tracer`: the model's transformers, encoders and decoder without their weights, and
made-up prompts. The model of a reward is not counted. Few sampling steps are run, and what each keeps multiplied.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from spmd_rl.base.errors import UserError
from spmd_rl.base.waits import phase
from spmd_rl.config.diffusion import RewardFlConfig
from spmd_rl.config.ranks import world_size
from spmd_rl.config.sections.data import RewardsConfig
from spmd_rl.config.sections.models import RoleConfig, TrainConfig
from spmd_rl.config.sections.pictures import DifferentiableConfig, DiffusionModelConfig
from spmd_rl.learn.feedback import Feedback
from spmd_rl.model.build import materialize
from spmd_rl.model.diffusion import FlowModel, build_flow_model
from spmd_rl.model.diffusion.tiny import TinyFlowModel
from spmd_rl.rollout.pictures import PictureRollouts
from spmd_rl.tools.plan import measured_peaks, room, verdict
from spmd_rl.tools.plan.engine import NOTHING, dtype_of
from spmd_rl.tools.plan.rank import Phase, Trace, Tracer, tracer
from spmd_rl.tools.plan.table import GENERATE, rows, show_axes, show_rank, sleeps_while_idle
from spmd_rl.train import build_denoisers
from spmd_rl.train.stored_model import Stored
from spmd_rl.types import Message, Prompt

PROMPT = Prompt("0" * 32, (Message("user", "?"),), "plan", "")
LESS = (
    "it needs less with a smaller pictures.per_microbatch, frames, height or width, with policy.lora, "
    "train.activation_checkpointing=full or more ranks (plan.ranks)"
)


def show(cfg: RewardFlConfig) -> None:
    """Print the memory of a rank in each phase, and whether it fits."""
    console, size = Console(highlight=False, markup=False, soft_wrap=True, width=140), world_size()
    found = trace(cfg, cfg.plan.rank or 0, size)
    table = rows(found, NOTHING, sleeps_while_idle(cfg.train, cfg.plan))
    show_axes(console, cfg.train, range(size), found)
    show_rank(console, found, table, measured_peaks(Path(cfg.run.dir)))
    worst = max(table, key=lambda row: row.total)
    console.print()
    console.print(verdict(cfg.plan, worst))
    if worst.total > room(cfg.plan):
        console.print(LESS)


@dataclass(frozen=True)
class Counts:
    """Micro-batches of a rank, and of each the sampling steps and trained forwards."""

    batches: int
    steps: int
    trained: int

    def over(self, traced: "Counts", train: TrainConfig) -> "Times":
        """Return the factors from a traced step to this one."""
        batches = self.batches / traced.batches
        drawn, trained = batches * self.steps / traced.steps, batches * self.trained / traced.trained
        kept = batches * (self.steps + 1) / (traced.steps + 1)
        held = {"prompts": batches, "latents": kept, "velocities": trained}
        once = {("update", "all-reduce"): train.updates_per_step}
        if train.reshard_after_forward is False:
            once |= {(GENERATE, "all-gather"): 1, ("prepare", "all-gather"): 1}
        return Times(held, {GENERATE: drawn, "prepare": trained, "update": trained}, once)


@dataclass(frozen=True)
class Times:
    """Factors of kept tensors, and of traffic with its exceptions."""

    held: Mapping[str, float]
    travelled: Mapping[str, float]
    once: Mapping[tuple[str, str], float]

    def more(self, by_tag: Mapping[str, int]) -> Counter[str]:
        """Return bytes by tag, with all kept tensors as `pictures`."""
        found = Counter[str]()
        for tag, size in by_tag.items():
            found["pictures" if tag in self.held else tag] += int(size * self.held.get(tag, 1))
        return found

    def scaled(self, phase: str, one: Phase) -> Phase:
        """Return a phase of the whole step."""
        by_tag, every = self.more(one.peak.by_tag), self.travelled[phase]
        travelled = {kind: int(size * self.once.get((phase, kind), every)) for kind, size in one.travelled.items()}
        return replace(one, peak=replace(one.peak, total=by_tag.total(), by_tag=by_tag), travelled=Counter(travelled))


def counts(cfg: RewardFlConfig, size: int, steps: int) -> Counts:
    """Return the busiest rank's counts for these sampling steps."""
    pictures, feedback = cfg.pictures, cfg.feedback
    batches = -(-pictures.prompts_per_step * pictures.per_prompt // pictures.per_microbatch)
    noisy = steps - 1
    trained = {"grpo": min(feedback.window or noisy, noisy), "nft": min(feedback.levels, steps)}
    return Counts(-(-batches // size), steps, trained.get(feedback.loss, 1))


def trace(cfg: RewardFlConfig, rank: int, size: int) -> Trace:
    """Return the plan of rank `rank` of `size`. UserError if the model's configuration cannot be read."""
    flow, whole = planned_flow(cfg), counts(cfg, size, cfg.pictures.steps)
    last = max(2, cfg.feedback.last_steps * (cfg.feedback.loss == "draft"))
    traced = counts(cfg, size, min(cfg.pictures.steps, last + 1))
    # Two forwards show one beside the gradients of another.
    traced = replace(traced, batches=min(whole.batches, 1 if traced.trained > 1 else 2))
    few, times = planned(cfg, traced, size), whole.over(traced, cfg.train)
    with tracer(few.train, few.plan, rank, size) as found:
        made = _trace(few, found, flow, traced.steps, whole.batches)
    phases = {name: [times.scaled(name, one) for one in parts] for name, parts in made.phases.items()}
    return replace(made, phases=phases, held=times.more(made.held))


def planned_flow(cfg: RewardFlConfig) -> FlowModel:
    """Return the model of a plan, of which only configuration files must be there."""
    folder, sizes = Path(cfg.policy.model), (cfg.pictures.height, cfg.pictures.width, cfg.pictures.frames)
    if cfg.policy.model == str(Path(DiffusionModelConfig.model).expanduser()):
        return TinyFlowModel(folder, {})
    if not folder.is_dir():
        raise UserError(f"policy.model: no such directory: {folder}; set plan.shape")
    return build_flow_model(folder, sizes)


def planned(cfg: RewardFlConfig, traced: Counts, size: int) -> RewardFlConfig:
    """Return settings with the traced micro-batches a step, and a reward without a model."""
    policy, given = replace(cfg.policy, dtype=dtype_of(cfg.policy, cfg.plan), dither=False), cfg.feedback
    pictures = replace(cfg.pictures, prompts_per_step=traced.batches * size, per_prompt=cfg.pictures.per_microbatch)
    reward = DifferentiableConfig(f"{__name__}:mean", frames=given.reward.frames)
    feedback = replace(given, reward=reward, from_step=min(given.from_step, traced.steps - 1))
    own = {"feedback": feedback, "reward": RewardsConfig(), "train": replace(cfg.train, updates_per_step=1)}
    return replace(cfg, policy=policy, pictures=pictures, **own)


def mean(images: Tensor, prompts: Any) -> Tensor:
    """Return the mean of each picture, [B]: a reward with a gradient in every pixel."""
    return images.flatten(1).mean(1)


def _trace(cfg: RewardFlConfig, found: Tracer, flow: FlowModel, steps: int, batches: int) -> Trace:
    """Trace some sampling steps. batches: micro-batches of the run's step."""
    models: dict[str, nn.Module] = {}

    def source(role: RoleConfig, dtype: torch.dtype, _: Callable[[], object]) -> Stored:
        models[role.name] = flow.build(dtype)
        return Stored(models[role.name], lambda *_, **__: None, lambda: 0)

    with phase(f"rank {found.world.rank}: building the models"):
        frozen = flow.without_weights(getattr(torch, cfg.policy.dtype))
        roles = build_denoisers(cfg.denoisers, found.world, source)
    for name in models:
        found.add(name, getattr(roles, name))
    if frozen:
        flow.encoding, flow.decoding = (_held(found, name, modules) for name, modules in frozen.items())
    prompts = SimpleNamespace(ticket=lambda ticket, seed: (0, PROMPT))
    rollouts = PictureRollouts(cfg, prompts, flow, roles.policy, found.world, None)
    # Of a model with two networks, the first step takes one and the last the other.
    rollouts.levels = [rollouts.levels[0], *rollouts.levels[-steps:]]
    learner, made = Feedback(cfg, rollouts, roles, found.world), SimpleNamespace()

    def collect() -> None:
        made.gallery = rollouts.collect(1)
        found.memory.tag("latents", [one.latents for one in made.gallery.drawn])
        found.memory.tag("prompts", [tensor for one in made.gallery.drawn for tensor in one.given.values()])

    def prepare() -> None:
        made.updates = learner.prepare(made.gallery)
        velocities = [kept for items in made.updates for item in items for kept in (item.reference, item.old)]
        found.memory.tag("velocities", [one for one in velocities if one is not None])

    found.run(GENERATE, "policy", collect)
    found.run("prepare", "policy", prepare)
    found.run("update", "policy", lambda: learner.update(made.updates))
    return Trace.of(found, roles.policy, None, batches)


def _held(found: Tracer, name: str, modules: list[nn.Module]) -> Callable[..., AbstractContextManager[None]]:
    """Return a context with frozen modules of the meta device on the device."""
    for module in modules:
        materialize(module, found.world.device)
        getattr(module, "tie_weights", lambda: None)()
    sizes = {p.untyped_storage(): p.nbytes for module in modules for p in module.parameters()}
    for storage in sizes:
        storage.resize_(0)

    @contextmanager
    def inside(*_: Any) -> Iterator[None]:
        for storage, num_bytes in sizes.items():
            storage.resize_(num_bytes)
        found.memory.tag(name, (p for module in modules for p in module.parameters()))
        yield
        for storage in sizes:
            storage.resize_(0)

    return inside
