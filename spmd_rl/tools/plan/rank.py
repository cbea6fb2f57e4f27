"""`trace`: memory and traffic of one rank of a run in each phase, found by running its code without its tensors.

    found = trace(cfg, rank=0, size=256)
    found.phases["update"].peak.total

The roles are those of a run, built by the same function over a `PlannedWorld`; their computation is faked
(`fake_device.py`) and counted (`memory_tracker.py`). The memory of an engine is estimated (`engine.py`).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from spmd_rl.base.devices import cpu_as
from spmd_rl.base.errors import UserError
from spmd_rl.base.hub import model_folder
from spmd_rl.base.png import encode_png
from spmd_rl.base.waits import phase as progress
from spmd_rl.batch import Batch, bounds_of, picture_columns
from spmd_rl.config.backends import backend
from spmd_rl.config.batch_arithmetic import tokens_per_turn
from spmd_rl.config.schema import AlgorithmConfig, RlConfig, RolloutConfig
from spmd_rl.config.sections.constraint import ConstraintConfig
from spmd_rl.config.sections.models import RoleConfig
from spmd_rl.distributed.dtype import choose_dtype
from spmd_rl.learn.losses import bind_loss, bind_value_loss
from spmd_rl.learn.token_advantages import needs_old_logprobs
from spmd_rl.model.build import shape_on_meta
from spmd_rl.model.value_head import with_value_head
from spmd_rl.tools.plan.fake_device import FakeDeviceMode
from spmd_rl.tools.plan.memory_tracker import MemoryTracker, Peak
from spmd_rl.tools.plan.world import PlannedWorld, planned_world
from spmd_rl.train import build_role
from spmd_rl.train.stored_model import Stored
from spmd_rl.types import picture_ids


def num_microbatches(rollout: RolloutConfig, updates: int, num_shards: int, tokens_per_microbatch: int) -> int:
    """Return the number of micro-batches of each of a step's updates on each data shard, if all samples have maximum
    length.
    """
    longest = tokens_per_turn(rollout, rollout.max_prompt_tokens)
    samples = rollout.prompts_per_step * rollout.answers_per_prompt / updates / num_shards
    per_microbatch = max(1, tokens_per_microbatch // longest)
    return max(1, math.ceil(math.ceil(samples) / per_microbatch))


def full_batch(
    algorithm: AlgorithmConfig, longest: int, count: int, tokens_per_microbatch: int, vocabulary: int
) -> Batch:
    """Return a batch of `count` micro-batches, each filled to the last token with samples of one unit.

    Every token but the first of a sample counts as sampled, and no two samples begin alike: nothing is saved.
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
"""Broadcast from the last stage of a pipeline to the others."""
WEIGHTS, OPTIMIZER, GRADIENTS = "weights", "optimizer", "gradients"


@dataclass(frozen=True, slots=True)
class Phase:
    """Memory and traffic of a role in a phase of a step."""

    role: str
    peak: Peak
    """peak without other roles that are off the device then"""
    travelled: Counter[str]
    """bytes that arrive at this rank in a step, by kind of collective"""


@dataclass(frozen=True, slots=True)
class Trace:
    """The plan of one rank, by phase."""

    rank: int
    places: dict[str, int]
    """coordinates along the axes of the policy's layout"""
    held: dict[str, int]
    """permanent bytes, by role and content"""
    phases: dict[str, list[Phase]]
    size: Any
    """sizes of the policy, a `ModelSize`"""
    config: Any
    """configuration of its text model"""
    microbatches: int
    """number in an update of each data shard"""
    longest: int
    """tokens of the longest sample"""


def trace(cfg: RlConfig, rank: int, size: int) -> Trace:
    """Return the plan of rank `rank` of `size`. UserError if the layout is impossible.

    It runs at most as many micro-batches as can be in flight, and one more, which accumulates gradients.
    """
    offload, cfg = cfg.train.offload and cfg.plan.device != "cpu", planned(cfg)
    with ExitStack() as stack:
        world = stack.enter_context(planned_world(rank, size))
        stack.enter_context(cpu_as(cfg.plan.device) if cfg.plan.device != "cpu" else nullcontext())
        fake, memory = FakeDeviceMode(), MemoryTracker()
        world.told[SUMS] = ["loss", "num_tokens"]
        world.on_meeting = partial(_met, memory, fake)
        run = _Trace(cfg, offload, world, memory, fake)
        stack.enter_context(fake)
        stack.enter_context(memory)
        return run.traced()


def planned(cfg: RlConfig) -> RlConfig:
    """Return settings for a plan: every tensor stays on its device, and nothing is drawn at random."""
    policy = cfg.policy
    if policy.dtype == "auto":
        dtype = "bfloat16" if cfg.plan.device != "cpu" else choose_dtype(torch.device("cpu"))[0]
        policy = replace(policy, dtype=dtype)
    others = {
        name: replace(own, train={**own.train, "offload": False})
        for name, own in (("reference", cfg.reference), ("critic", replace(cfg.critic, dither=False)))
    }
    return replace(cfg, policy=replace(policy, dither=False), train=replace(cfg.train, offload=False), **others)


def _met(memory: MemoryTracker, fake: FakeDeviceMode, name: str) -> None:
    memory.meeting(name)
    fake.meeting = name


class _Trace:
    """The roles of a run, and their work in a step."""

    def __init__(
        self, cfg: RlConfig, offload: bool, world: PlannedWorld, memory: MemoryTracker, fake: FakeDeviceMode
    ) -> None:
        """Keep the planned objects. offload: weights and moments leave the device while they are unused."""
        self._offload, self._cfg, self._world, self._memory, self._fake = offload, cfg, world, memory, fake
        self._models: dict[str, nn.Module] = {}
        self._phases: dict[str, list[Phase]] = {}
        self._roles: dict[str, Any] = {}

    def traced(self) -> Trace:
        cfg = self._cfg
        for role in (role for role in cfg.roles if not role.is_base_of(cfg.roles[0])):
            if not backend(role.train.name).has_plan:
                raise UserError(f"{role.key}.name: --plan cannot trace train={role.train.name}")
            # peft moves weights, which made-up ones do not support.
            if role.lora.rank:
                raise UserError(f"{role.name}.lora.rank: --plan cannot trace adapters; give {role.name}.lora.rank=0")
            with progress(f"rank {self._world.rank}: building the {role.name}"):
                # The answers of a plan are made up, and match no grammar.
                free = replace(role, constraint=ConstraintConfig())
                self._roles[role.name] = build_role(free, self._world, source=partial(self._model, role.name))
            self._tag(role.name)
        policy = self._roles["policy"]
        rollout, train = cfg.rollout, cfg.train
        shards = policy.layout.data.size
        most = num_microbatches(rollout, train.updates_per_step, shards, train.tokens_per_microbatch)
        vocabulary = self._models["policy"].config.get_text_config().vocab_size
        self._run("publish", "policy", lambda: _emptied(policy.model.whole_parameters()))
        for name, role in self._roles.items():
            several = train.updates_per_step * cfg.algorithm.sample_epochs > 1
            # The update itself computes these logprobs.
            if name == "policy" and not several and not needs_old_logprobs(cfg.algorithm):
                continue
            batch, *counts = self._batch(name, vocabulary)
            compute = role.values if name == "critic" else partial(role.logprobs, temperature=1.0)
            self._run("prepare", name, partial(compute, batch), *counts)
        for name in ("critic", "policy"):
            if name in self._roles:
                self._update(name, vocabulary)
        axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        places = {axis: policy.layout.rank(axis) for axis in axes}
        held = Counter[str]()
        for entry in self._memory.entries:
            held[entry.tag] += entry.num_bytes * (entry.died > self._memory.now and bool(entry.tag))
        longest = tokens_per_turn(rollout, rollout.max_prompt_tokens)
        config = self._models["policy"].config.get_text_config()
        return Trace(self._world.rank, places, +held, self._phases, policy.size, config, most, longest)

    def _model(self, name: str, role: RoleConfig, dtype: torch.dtype, _: Callable[[], object]) -> Stored:
        model = _plain(shape_on_meta(model_folder(role.model), dtype, role.trust_remote_code))
        self._models[name] = with_value_head(model, role.value_bias) if role.name == "critic" else model
        return Stored(model, lambda *_, **__: None, lambda: 0)

    def _tag(self, name: str) -> None:
        self._memory.tag(f"{name} {WEIGHTS}", self._models[name].parameters())
        moments = self._roles[name].model.state_dict().get("optimizer", {})
        self._memory.tag(f"{name} {OPTIMIZER}", moments.values())

    def _batch(self, name: str, vocabulary: int) -> tuple[Batch, int, int]:
        """Return a batch for a role, its number of micro-batches, and their number in a step."""
        cfg, layout = self._cfg, self._roles[name].layout
        train, rollout, updates = cfg.role(name).train, cfg.rollout, cfg.train.updates_per_step
        longest, budget = tokens_per_turn(rollout, rollout.max_prompt_tokens), train.tokens_per_microbatch
        count = num_microbatches(rollout, updates, layout.data.size, budget)
        # One micro-batch more than are in flight: the first to add to gradients of an earlier one.
        traced = min(count, 2 * layout.size("pp") if train.vpp > 1 else layout.size("pp") + 1)
        batch = full_batch(cfg.algorithm, longest, traced, budget, vocabulary)
        if tower := getattr(self._models[name], "tower", None):
            batch = with_pictures(batch, tower.processor, rollout.max_prompt_tokens)
        return batch, traced, count * updates

    def _update(self, name: str, vocabulary: int) -> None:
        role, settings = self._roles[name], self._cfg.algorithm
        batch, traced, count = self._batch(name, vocabulary)
        counts = traced, count * settings.sample_epochs

        def met(meeting: str) -> None:
            if meeting == ACCUMULATED:
                grads = (p.grad for p in self._models[name].parameters())
                self._memory.tag(f"{name} {GRADIENTS}", (grad for grad in grads if grad is not None))
            _met(self._memory, self._fake, meeting)

        self._world.on_meeting = met
        if name == "policy":
            self._run("update", name, lambda: role.update(batch, bind_loss(settings), 1.0), *counts)
        else:
            self._run("update", name, lambda: role.update(batch, bind_value_loss(settings)), *counts)
        self._world.on_meeting = partial(_met, self._memory, self._fake)

    def _run(self, phase: str, name: str, work: Callable[[], object], traced: int = 1, count: int = 1) -> None:
        """Run a role's part of a phase. traced, count: micro-batches in the trace, and in a step."""
        self._fake.travelled.clear()
        self._fake.meeting = phase
        window = f"{phase} {name}"
        for what in ("update", "logprobs", "values"):
            self._world.told[f"{what}: number of micro-batches"] = {"count": float(traced)}
        with progress(f"rank {self._world.rank}: {phase} of the {name}"), self._memory.window(window):
            work()
        travelled = Counter[str]()
        for (meeting, kind), num_bytes in self._fake.travelled.items():
            travelled[kind] += num_bytes * _times(meeting, count)
        found = Phase(name, self._peak(phase, name, window), travelled)
        self._phases.setdefault(phase, []).append(found)

    def _peak(self, phase: str, name: str, window: str) -> Peak:
        """Return the peak of a window; with offload, without weights that are off the device."""
        if not self._offload:
            return self._memory.peak(self._memory.span(window))
        off = [f"{other} {what}" for other in self._roles for what in (WEIGHTS, OPTIMIZER) if other != name]
        before, after = self._memory.split(window, ACCUMULATED)
        found = [self._memory.peak(before, [*off, f"{name} {OPTIMIZER}"])]
        if after[1] > after[0]:
            found.append(self._memory.peak(after, off))
        return max(found, key=lambda peak: peak.total)


def _plain(model: nn.Module) -> nn.Module:
    """Make a model's parameters plain tensors on the meta device, in place; tied parameters stay tied."""
    # FSDP cuts plain meta tensors much faster than fake ones.
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if p not in made:
                fresh = torch.empty(p.shape, dtype=p.dtype, device="meta")
                made[p] = nn.Parameter(fresh, requires_grad=p.requires_grad)
            module.register_parameter(name, made[p])
    return model


def _times(meeting: str, count: int) -> int:
    """Return how many collectives of a step one of the trace represents: the first micro-batches represent the rest."""
    _, found, place = meeting.partition("micro-batch ")
    if not found:
        return 1
    number, traced = map(int, place.split("/"))
    return 1 + max(0, count - traced) if number == 1 else 1


def _emptied(items: Iterator[Any]) -> None:
    for _ in items:
        pass
