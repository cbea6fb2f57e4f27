"""`Job`: the start of every pipeline: form the world, agree on settings, detect a finished run, restore a checkpoint.

with Job.open(cfg, rows, prompts, cfg.data.chat_template_kwargs) as job:  # [all]
    place = place_ranks(job)  # [all] which ranks train and generate; supervised pipelines call `job.train()`
    saver, start = job.restore(place, rollouts=place.rollouts, learner=learner)  # [all]
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from spmd_rl import sidecar, train
from spmd_rl.base.errors import Stopped, UserError
from spmd_rl.checkpoint import Checkpointer, HfExport, finished, problem_of
from spmd_rl.checkpoint.checkpointer import Stateful
from spmd_rl.config.schema import JobConfig
from spmd_rl.config.sections.env import EnvsConfig
from spmd_rl.data import EnvTasks, Prompts
from spmd_rl.distributed import World, agree_on_dtype, agree_on_start
from spmd_rl.learn.frozen import FrozenRoles
from spmd_rl.model.tokenizer import Tokenizer, load_tokenizer
from spmd_rl.rollout import Agent, RolloutSource
from spmd_rl.rollout.episode import Episode
from spmd_rl.track.run import Run
from spmd_rl.train import Roles
from spmd_rl.types import Environments, Scorer


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's part in its job. A rank that only generates, or holds a frozen role, has `generate` alone."""

    generate: Callable[[], None] | None = None
    """[generate] Generate, or compute with a frozen role, until the run is over; no-op if it already is."""
    world: World | None = None
    roles: Roles | None = None
    """Models that this rank trains or asks."""
    rollouts: RolloutSource | None = None
    """None in a pipeline that does not generate."""
    publish: Callable[..., dict[str, float]] | None = None
    """[train] `publish(version)`: send the policy's weights to generator ranks."""
    environments: Environments | None = None
    on_start: Callable[[int], object] = lambda start: None
    """[all] Called with the step to resume from, before the first publish."""


@dataclass(slots=True)
class Job:
    """One rank's part of a run. `open` closes everything in `stack` on exit."""

    cfg: JobConfig
    source: Prompts | EnvTasks | None
    tokenizer: Tokenizer | None
    """Tokenizer of the policy, if a language model."""
    world: World
    """All ranks; after `place_ranks` without ranks that only hold a frozen role."""
    stack: ExitStack
    envs: EnvsConfig | None = None
    is_over: bool = False
    """True if the run directory already holds the last step."""
    track: Run | None = None
    """The run directory on trainer ranks, from `open_run` on."""
    stopped: Stopped | None = None
    """Reason why the run ends early."""
    frozen: FrozenRoles | None = None
    """[train] Proxies of models on separate ranks."""

    @classmethod
    @contextmanager
    def open(
        cls,
        cfg: JobConfig,
        rows: Mapping[str, Sequence[Any]] = MappingProxyType({}),
        source: Prompts | EnvTasks | None = None,
        template_args: Mapping[str, Any] = MappingProxyType({}),
        envs: EnvsConfig | None = None,
    ) -> Iterator["Job"]:
        """[all] Form the world and agree on settings, software versions and data.

        rows: of each data set by its setting (`data.train`), each with an `id`; their hashes are compared. source:
        prompts or environment tasks for the tickets, if the pipeline generates. template_args: of the chat template.
        UserError on all ranks, naming the difference, if they disagree. `Stopped`, after everything is closed, if a
        signal ended the `steps`.
        """
        run_dir = Path(cfg.run.dir)
        args = (cfg.policy.model, cfg.policy.trust_remote_code, template_args)
        tokenizer = load_tokenizer(*args) if cfg.roles else None
        opened = World.open(run_dir, cfg.journal.stall_seconds, cfg.debug)
        with opened as world, world.resources() as stack:  # [all]
            world.journal.hashes = cfg.journal.hashes
            agree_on_start(world, cfg, rows)  # [all]
            job = cls(cfg, source, tokenizer, world, stack, envs)
            # The pipeline `evaluate` has no steps, so it is never finished.
            if cfg.steps:
                done = finished(cfg.checkpoint, run_dir, cfg.steps, world)  # [all]
                job.is_over = done is not None
                if job.is_over and world.rank == 0:
                    print(f"{cfg.run.dir}: already at step {done}; set steps above {done} to continue", flush=True)
            if not job.is_over:
                agree_on_dtype(world, cfg.policy)  # [all]
            yield job
        if job.stopped:
            raise job.stopped

    def open_run(self, world: World) -> None:
        """[train] Open the run directory. world: the trainer ranks."""
        self.track = self.stack.enter_context(Run.open(self.cfg, world))  # [train]
        self.track.announce(*(len(self.source.train), len(self.source.eval)) if self.source else (0, 0))

    def train(self, build: Callable[[World], Roles] | None = None) -> Place:
        """[all] Make every rank a trainer, in a pipeline without engines: open the run directory and build the roles.

        build: [all] replaces `build_roles` for other models than language models.
        """
        self.open_run(self.world)  # [all]
        with self.starting():
            return Place(world=self.world, roles=(build or self.build_roles)(self.world))  # [all]

    def build_roles(self, trainers: World) -> Roles:
        """[train] Build this rank's roles, and proxies of those on other ranks."""
        if self.frozen is None:
            return train.build_roles(self.cfg.roles, trainers)  # [train]
        own = [role for role in self.cfg.roles if role.kind not in self.frozen.kinds]
        return self.frozen.beside(train.build_roles(own, trainers))  # [train] and the holders of these roles

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Allow `journal.start_seconds` without progress inside."""
        with self.world.phase("start"), self.world.journal.extend_timeout(self.cfg.journal.start_seconds):
            yield

    def connect(self, debug: bool = False) -> tuple[Scorer, Environments | None]:
        """Return the scorer and the environments of this node's sidecar; `debug`: in this process instead."""
        cfg = self.cfg
        at = cfg.sidecar
        host = sidecar.connect_both(cfg.reward, self.envs, self.world.node, at.bind, debug, at.keys, at.hosts)
        scorer, environments = self.stack.enter_context(host)
        return scorer, environments if self.envs else None

    @property
    def episode(self) -> Episode | None:
        """Episode that plays the environments, unless `rollout.target` names one."""
        return Agent(self.envs) if self.envs and not self.cfg.rollout.target else None

    def restore(
        self, place: Place, export: Callable[[Path], list[Path]] | None = None, **parts: Stateful
    ) -> tuple[Checkpointer, int]:
        """[all] Load the checkpoint of `checkpoint.resume`, if any, and publish the weights; return the checkpointer
        and the checkpoint's step, 0 for a fresh run.

        export: writes a checkpoint's `hf/`; by default the policy's weights. parts: contents of a checkpoint besides
        the trained roles and the state of `track`.
        """
        run_dir, parts = Path(self.cfg.run.dir), {**parts, "track": self.track}
        export = export or HfExport(place.roles.policy, self.cfg.policy.model, place.world)
        saver = Checkpointer(self.cfg.checkpoint, run_dir, place.world, place.roles.trained, parts, export)
        start = saver.restore()  # [train]
        self.begin(place, start)  # [all]
        return saver, start

    def steps(self, start: int, saver: Checkpointer) -> Iterator[int]:
        """[train] Yield the steps after `start`, up to `run.until` or a signal. Save the last one if more are to come;
        after a signal, leaving the job raises `Stopped`.
        """
        stop, last = self.world.stop, min(self.cfg.steps, self.cfg.run.until or self.cfg.steps)
        stop.accept()
        saver.record_hashes(start)
        for step in range(start + 1, last + 1):
            yield step
            saver.record_hashes(step)
            signum = self.track.stop_signal
            if (signum or step == last) and step < self.cfg.steps:
                saver.maybe_save(step, stops=True)  # [train] all trainers see the same signal
                self.stopped = Stopped(signum, step) if signum else None
                break
        stop.refuse()

    def verify(self, key: str, checkpoint: str | None) -> None:
        """[all] Raise UserError naming the setting `key` unless every byte of a checkpoint matches its manifest."""
        with self.world.phase("restore"):
            problem = problem_of(Path(checkpoint), self.world) if checkpoint else None  # [all] the setting is agreed on
        if problem:
            raise UserError(f"{key}: {checkpoint} is torn ({problem})")

    def begin(self, place: Place, start: int) -> None:
        """[all] Start the run at step `start`: call `on_start`, then publish."""
        place.on_start(start)  # [all]
        if place.publish:
            # An engine's first step may compile kernels.
            with self.world.journal.extend_timeout(self.cfg.journal.start_seconds):
                place.publish(version=start)  # [train] verified
