"""`trace`: one rank's memory and traffic in each phase, from running its code without tensors.

    found = trace(cfg, rank=0, size=256)
    found.phases["update"].peak.total

Roles are built as in a run, over a `PlannedWorld`; computation is faked (`fake_device.py`) and counted
(`memory_tracker.py`). An engine's memory is estimated (`engine.py`).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spmd_rl.base.devices import cpu_as
from spmd_rl.base.errors import UserError
from spmd_rl.base.hub import model_folder
from spmd_rl.base.png import encode_png
from spmd_rl.base.waits import phase as progress
from spmd_rl.batch import Batch, bounds_of, picture_columns
from spmd_rl.config.backends import backend
from spmd_rl.config.batch_arithmetic import tokens_per_turn
from spmd_rl.config.schema import AlgorithmConfig, PlanConfig, RlConfig, RolloutConfig, TrainConfig
from spmd_rl.config.sections.constraint import ConstraintConfig
from spmd_rl.config.sections.models import RoleConfig
from spmd_rl.learn.losses import bind_loss, bind_value_loss
from spmd_rl.learn.token_advantages import needs_old_logprobs
from spmd_rl.model.build import shape_on_meta
from spmd_rl.model.load import Region
from spmd_rl.model.stored import stored_parts
from spmd_rl.model.value_head import head_weights, with_value_head
from spmd_rl.tools.plan.engine import dtype_of
from spmd_rl.tools.plan.fake_device import FakeDeviceMode
from spmd_rl.tools.plan.memory_tracker import MemoryTracker, Peak
from spmd_rl.tools.plan.world import PlannedWorld, planned_world
from spmd_rl.train import build_role
from spmd_rl.train.microbatch import plan as plan_bins
from spmd_rl.train.stored_model import Stored
from spmd_rl.types import picture_ids


def num_microbatches(rollout: RolloutConfig, updates: int, num_shards: int, tokens_per_microbatch: int) -> int:
    """Return the micro-batches per update and data shard if all samples have maximum length."""
    longest = tokens_per_turn(rollout, rollout.max_prompt_tokens)
    samples = rollout.prompts_per_step * rollout.answers_per_prompt / updates / num_shards
    per_microbatch = max(1, tokens_per_microbatch // longest)
    return max(1, math.ceil(math.ceil(samples) / per_microbatch))


def full_batch(
    algorithm: AlgorithmConfig, longest: int, count: int, tokens_per_microbatch: int, vocabulary: int
) -> Batch:
    """Return a batch of `count` micro-batches, each full of samples of one unit.

    Every token but a sample's first counts as sampled, and no two samples begin alike.
    """
    whole, rest = divmod(max(tokens_per_microbatch, longest), longest)
    lengths = [longest] * whole + ([rest] if rest > 1 else [])
    sizes = torch.tensor(lengths * count)
    total, first = int(sizes.sum()), bounds_of(sizes)[:-1]
    positions = torch.arange(total) - first.repeat_interleave(sizes)
    # A plan must be the same every time.
    generator = torch.Generator().manual_seed(0)
    zeros = torch.zeros(total)
    tickets = torch.arange(count).repeat_interleave(len(lengths))
    return Batch(
        bounds_of(sizes),
        keys=torch.stack([tickets, torch.arange(len(lengths)).repeat(count)], 1),
        units=torch.zeros(len(sizes), dtype=torch.int64),
        token_ids=torch.randint(0, vocabulary, (total,), generator=generator),
        position_ids=positions,
        loss_mask=positions > 0,
        rollout_logprobs=zeros,
        lags=torch.zeros(total, dtype=torch.int32),
        advantages=zeros,
        weights=zeros,
        old_logprobs=zeros,
        ref_logprobs=zeros if algorithm.uses_reference else None,
        values=zeros if algorithm.uses_critic else None,
        returns=zeros if algorithm.uses_critic else None,
        marked=torch.zeros(total, dtype=torch.bool),
    )


SIDE = 28
"""Pixels by which a picture shrinks until it fits."""


def with_pictures(batch: Batch, processor: Any, most: int) -> Batch:
    """Return a batch in which each sample begins with a picture of its own, of at most `most` tokens."""
    sides = range(SIDE * math.isqrt(most), 0, -SIDE)
    side = next((side for side in sides if processor.count(_square(side, 0)) <= most), SIDE)
    ids, learnt, shown = batch.token_ids.clone(), batch.loss_mask.clone(), []
    for number, (begin, end) in enumerate(pairwise(batch.starts.tolist())):
        data = _square(side, number)
        marks = torch.tensor(picture_ids(data, processor.count(data)))
        fits = len(marks) < end - begin
        if fits:
            ids[begin : begin + len(marks)] = marks
            learnt[begin : begin + len(marks)] = False
        shown.append([data] * fits)
    return replace(batch, token_ids=ids, loss_mask=learnt, **picture_columns(shown))


def _square(side: int, number: int) -> bytes:
    return encode_png([number.to_bytes(3, "big") * side**2], side, side)


ACCUMULATED = "update: results"
"""Collective after the last backward pass of an update."""
SUMS = "update: names of averages"
"""Broadcast from the last pipeline stage to the others"""
WEIGHTS, OPTIMIZER, GRADIENTS = "weights", "optimizer", "gradients"


@dataclass(frozen=True, slots=True)
class Phase:
    """A role's memory and traffic in a phase."""

    role: str
    peak: Peak
    """peak without other roles that are off the device"""
    travelled: Counter[str]
    """bytes arriving at this rank in a step, by kind of collective"""


@dataclass(frozen=True, slots=True)
class Trace:
    """The plan of one rank."""

    rank: int
    places: dict[str, int]
    held: dict[str, int]
    """permanent bytes, by role and content"""
    phases: dict[str, list[Phase]]
    size: Any
    config: Any
    microbatches: int
    """number per update and data shard"""
    longest: int = 0
    """tokens of the longest sample"""

    @classmethod
    def of(cls, tracer: "Tracer", policy: Any, config: Any, microbatches: int, longest: int = 0) -> "Trace":
        """Return a tracer's plan. config, microbatches, longest: see the fields."""
        places = {axis: policy.layout.rank(axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
        rank, held = tracer.world.rank, tracer.held()
        return cls(rank, places, held, tracer.phases(), policy.size, config, microbatches, longest)


def trace(cfg: RlConfig, rank: int, size: int) -> Trace:
    """Return the plan of rank `rank` of `size`. UserError if the layout is impossible.

    It runs at most as many micro-batches as are in flight, and one that accumulates gradients.
    """
    with tracer(cfg.train, cfg.plan, rank, size) as found:
        found.world.told[SUMS] = ["loss", "num_tokens"]
        return _Trace(planned(cfg), found).traced()


def planned(cfg: RlConfig) -> RlConfig:
    """Return a plan's settings: tensors stay on their device, and nothing is random."""
    policy = replace(cfg.policy, dtype=dtype_of(cfg.policy, cfg.plan), dither=False)
    others = {
        name: replace(own, train={**own.train, "offload": False})
        for name, own in (("reference", cfg.reference), ("critic", replace(cfg.critic, dither=False)))
    }
    return replace(cfg, policy=policy, train=replace(cfg.train, offload=False), **others)


class Tracer:
    """One planned rank, whose roles' work is faked and counted phase by phase."""

    def __init__(self, offload: bool, world: PlannedWorld, memory: MemoryTracker, fake: FakeDeviceMode) -> None:
        """offload: weights and moments leave the device while unused."""
        self._offload, self.world, self.memory, self.fake = offload, world, memory, fake
        self._ran: list[tuple[str, str, Counter[str]]] = []
        self.roles: dict[str, Any] = {}
        world.on_meeting = self._met

    def _met(self, meeting: str) -> None:
        self.memory.meeting(meeting)
        self.fake.meeting = meeting

    def add(self, name: str, role: Any) -> None:
        """Tag a role's tensors, and gradients once there are any."""
        self.roles[name], model, gradients = role, role.model, role.model.gradients
        for kind, tensors in model.held().items():
            self.memory.tag(f"{name} {kind}", tensors)

        def tagged() -> Mapping[str, Tensor]:
            found = gradients()
            self.memory.tag(f"{name} {GRADIENTS}", found.values())
            return found

        model.gradients = tagged

    def held(self) -> dict[str, int]:
        """Return the permanent bytes, by role and content."""
        found = Counter[str]()
        for entry in self.memory.entries:
            found[entry.tag] += entry.num_bytes * (entry.died > self.memory.now and bool(entry.tag))
        return +found

    def run(self, phase: str, name: str, work: Callable[[], object], traced: int = 1, count: int = 1) -> None:
        """Run a role's part of a phase. traced, count: micro-batches in the trace, and in a step."""
        self.fake.travelled.clear()
        self.fake.meeting = phase
        window = f"{phase} {name}"
        with progress(f"rank {self.world.rank}: {phase} of the {name}"), self.memory.window(window):
            work()
        travelled = Counter[str]()
        for (meeting, kind), num_bytes in self.fake.travelled.items():
            travelled[kind] += num_bytes * _times(meeting, count)
        self._ran.append((phase, name, travelled))

    def phases(self) -> dict[str, list[Phase]]:
        """Return what ran, by phase; afterwards all tensors have their tags."""
        found: dict[str, list[Phase]] = {}
        for phase, name, travelled in self._ran:
            peak = self._peak(phase, name, f"{phase} {name}")
            found.setdefault(phase, []).append(Phase(name, peak, travelled))
        return found

    def _peak(self, phase: str, name: str, window: str) -> Peak:
        """Return a window's peak; with offload, without weights off the device."""
        if not self._offload:
            return self.memory.peak(self.memory.span(window))
        off = [f"{other} {what}" for other in self.roles for what in (WEIGHTS, OPTIMIZER) if other != name]
        before, after = self.memory.split(window, ACCUMULATED)
        found = [self.memory.peak(before, [*off, f"{name} {OPTIMIZER}"])]
        if after[1] > after[0]:
            found.append(self.memory.peak(after, off))
        return max(found, key=lambda peak: peak.total)


@contextmanager
def tracer(train: TrainConfig, plan: PlanConfig, rank: int, size: int) -> Iterator[Tracer]:
    """Yield the tracer of rank `rank` of `size`; inside, its device's tensors are fake."""
    with ExitStack() as stack:
        world = stack.enter_context(planned_world(rank, size))
        stack.enter_context(cpu_as(plan.device) if plan.device != "cpu" else nullcontext())
        fake, memory = FakeDeviceMode(), MemoryTracker()
        found = Tracer(train.offload and plan.device != "cpu", world, memory, fake)
        stack.enter_context(fake)
        stack.enter_context(memory)
        yield found


class _Trace:
    """The roles of a run, and their work in a step."""

    def __init__(self, cfg: RlConfig, tracer: Tracer) -> None:
        self._cfg, self._tracer, self._world = cfg, tracer, tracer.world
        self._roles, self._run = tracer.roles, tracer.run
        self._models: dict[str, nn.Module] = {}

    def traced(self) -> Trace:
        cfg = self._cfg
        for role in (role for role in cfg.roles if not role.is_base_of(cfg.roles[0])):
            host = next((key for key in backend(role.train.name).unplanned if getattr(role.train, key)), "")
            if host and cfg.plan.device != "cpu":
                # Its tensors on the host would be counted as those of the device, which the CPU imitates.
                raise UserError(f"{role.key}.{host}: --plan cannot tell host and device apart; must be False")
            with progress(f"rank {self._world.rank}: building the {role.name}"):
                self._build(role)
        policy = self._roles["policy"]
        rollout, train = cfg.rollout, cfg.train
        shards = policy.layout.data.size
        most = num_microbatches(rollout, train.updates_per_step, shards, train.tokens_per_microbatch)
        config = self._models["policy"].config.get_text_config()
        self._run("publish", "policy", lambda: _emptied(policy.model.weights()))
        for name, role in self._roles.items():
            several = train.updates_per_step * cfg.algorithm.sample_epochs > 1
            # The update itself computes these logprobs.
            if name == "policy" and not several and not needs_old_logprobs(cfg.algorithm):
                continue
            batch, *counts = self._batch(name, config.vocab_size)
            compute = role.values if name == "critic" else partial(role.logprobs, temperature=1.0)
            self._run("prepare", name, partial(compute, batch), *counts)
        for name in ("critic", "policy"):
            if name in self._roles:
                self._update(name, config.vocab_size)
        longest = tokens_per_turn(rollout, rollout.max_prompt_tokens)
        return Trace.of(self._tracer, policy, config, most, longest)

    def _build(self, role: RoleConfig) -> None:
        model = shape_on_meta(model_folder(role.model), getattr(torch, role.held_dtype), role.trust_remote_code)
        model = with_value_head(model, role.value_bias) if role.name == "critic" else model
        # The answers of a plan are made up, and match no grammar.
        free = replace(role, constraint=ConstraintConfig())
        self._models[role.name] = model
        self._tracer.add(role.name, build_role(free, self._world, source=lambda *_: without_weights(model)))

    def _batch(self, name: str, vocabulary: int) -> tuple[Batch, int, int]:
        """Return a role's batch, its number of micro-batches, and that of a step."""
        cfg, layout = self._cfg, self._roles[name].layout
        train, rollout, updates = cfg.role(name).train, cfg.rollout, cfg.train.updates_per_step
        longest, budget = tokens_per_turn(rollout, rollout.max_prompt_tokens), train.tokens_per_microbatch
        count = num_microbatches(rollout, updates, layout.data.size, budget)
        # One micro-batch more than are in flight: the first to add to gradients of an earlier one.
        traced = min(count, 2 * layout.size("pp") if train.vpp > 1 else layout.size("pp") + 1)
        for what in ("update", "logprobs", "values"):
            self._world.told[f"{what}: number of micro-batches"] = {"count": float(traced)}
        batch = full_batch(cfg.algorithm, longest, traced, budget, vocabulary)
        if tower := getattr(self._models[name], "tower", None):
            batch = with_pictures(batch, tower.processor, rollout.max_prompt_tokens)
        if layout.size("pp") > 1:
            model = self._roles[name].model
            row = model.row(batch.select(plan_bins(batch, budget)[0]))
            self._tracer.fake.received = (len(row.token_ids) // layout.size("tp"), 1, model.hidden_size)
        return batch, traced, count * updates

    def _update(self, name: str, vocabulary: int) -> None:
        role, settings = self._roles[name], self._cfg.algorithm
        batch, traced, count = self._batch(name, vocabulary)
        loss = (bind_loss(settings), 1.0) if name == "policy" else (bind_value_loss(settings),)
        self._run("update", name, lambda: role.update(batch, *loss), traced, count * settings.sample_epochs)


def without_weights(model: nn.Module) -> Stored:
    """Return a stored model of which nothing is read."""
    return Stored(model, _ignored, lambda: 0, lambda *_: _ignored, ShapeFiles(model))


def _ignored(*_: Any, **__: Any) -> None:
    pass


# A loader of packed weights asks its reader for the names.
_ignored.tensors = {}


class ShapeFiles:
    """Stand-in for `WeightFiles`, without contents."""

    bytes_read = 0

    def __init__(self, model: nn.Module) -> None:
        regions = {part.name: part for parts in stored_parts(model).values() for part in parts}
        self._shapes = {name: [x.stop - x.start for x in p.region][p.is_expert :] for name, p in regions.items()}
        self.folder, self.names, self.head = Path(model.config.name_or_path), self._shapes.keys(), head_weights(model)

    def shape(self, name: str) -> list[int]:
        """Return the shape of a stored tensor."""
        return self._shapes[name]

    def read(self, name: str, region: Region) -> torch.Tensor:
        """Return a tensor of a region's shape."""
        return torch.empty([one.stop - one.start for one in region])


def _times(meeting: str, count: int) -> int:
    """Return the number of a step's collectives that one of the trace represents."""
    # The last micro-batch but one stands for those that are not traced.
    _, found, place = meeting.partition("micro-batch ")
    if not found:
        return 1
    number, traced = map(int, place.split("/"))
    return 1 + max(0, count - traced) if number == max(1, traced - 1) else 1


def _emptied(items: Iterator[Any]) -> None:
    for _ in items:
        pass
