"""`Job`: what every pipeline begins with: ranks form and agree, a run that is over ends, and a checkpoint is restored.

    with Job.open(cfg, rows, prompts, cfg.data.chat_template_kwargs) as job:  # [all]
        place = place_ranks(job)  # [all] who trains and who generates; without sections for that, `job.train()`
        saver, start = job.restore(place, rollouts=place.rollouts, learner=learner)  # [all]

Who does what is the affair of `placement/`, what a step does that of the pipelines.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from spmd_rl import sidecar, train
from spmd_rl.base.errors import UserError
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
    """What a rank does in its job: either `generate`, and nothing else, or all the rest."""

    generate: Callable[[], None] | None = None
    """[generate] Generates, or computes with a frozen role, until the run is over. Of one that is over already, on all
    ranks: does nothing."""
    world: World | None = None
    """The ranks that train."""
    roles: Roles | None = None
    rollouts: RolloutSource | None = None
    """None in a pipeline that does not generate."""
    publish: Callable[..., dict[str, float]] | None = None
    """[train] `publish(version)`: the policy's weights to whoever generates. None in a pipeline that does not."""
    environments: Environments | None = None
    """None in a pipeline without environments."""
    on_start: Callable[[int], object] = lambda start: None
    """[all] Called with the step from which the run goes on, before its weights are published."""


@dataclass(slots=True)
class Job:
    """One rank's part of a run. What `stack` holds is given back when `open` is left."""

    cfg: JobConfig
    source: Prompts | EnvTasks | None
    tokenizer: Tokenizer
    world: World
    """All ranks; without those that only hold a frozen role, once `placement.frozen` has set them apart."""
    stack: ExitStack
    envs: EnvsConfig | None = None
    is_over: bool = False
    """Whether the run directory holds the last step already."""
    track: Run | None = None
    """On ranks that train, once `open_run` has opened it."""
    frozen: FrozenRoles | None = None
    """On ranks that train, the roles that lie on ranks of their own; None where there are none."""

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
        """[all] Form the world and agree on settings, versions and data (`rows`, by name, each with an `id`).

        `source`: the prompts or tasks that tickets stand for; None in a pipeline that does not generate.
        `template_args`: of the chat template. `envs`: None in a pipeline without environments. UserError on all ranks
        where they differ, naming what.
        """
        run_dir = Path(cfg.run.dir)
        tokenizer = load_tokenizer(cfg.policy.model, cfg.policy.trust_remote_code, template_args)
        opened = World.open(run_dir, cfg.journal.stall_seconds, cfg.debug)
        with opened as world, world.resources() as stack:  # [all]
            agree_on_start(world, cfg, rows)  # [all]
            job = cls(cfg, source, tokenizer, world, stack, envs)
            if cfg.steps:  # an evaluation has none
                done = finished(cfg.checkpoint, run_dir, cfg.steps, world)  # [all]
                job.is_over = done is not None
                if job.is_over and world.rank == 0:
                    print(f"{cfg.run.dir}: already at step {done}; set steps above {done} to continue", flush=True)
            if not job.is_over:
                agree_on_dtype(world, cfg.policy)  # [all]
            yield job

    def open_run(self, world: World) -> None:
        """[train] Open the run directory; `world`: the ranks that train."""
        self.track = self.stack.enter_context(Run.open(self.cfg, world))  # [train]
        self.track.announce(*(len(self.source.train), len(self.source.eval)) if self.source else (0, 0))

    def train(self) -> Place:
        """[all] All ranks train, in a pipeline in which nobody generates: the run directory, and the roles."""
        self.open_run(self.world)  # [all]
        with self.starting():
            return Place(world=self.world, roles=self.build_roles(self.world))  # [all]

    def build_roles(self, trainers: World) -> Roles:
        """[train] The roles of the pipeline, those on ranks of their own included."""
        if self.frozen is None:
            return train.build_roles(self.cfg.roles, trainers)  # [train]
        own = [role for role in self.cfg.roles if role.kind not in self.frozen.kinds]
        return self.frozen.beside(train.build_roles(own, trainers))  # [all] that train, and those ranks

    @contextmanager
    def starting(self) -> Iterator[None]:
        """What is done inside may take `journal.start_seconds` without progress."""
        with self.world.phase("start"), self.world.journal.extend_timeout(self.cfg.journal.start_seconds):
            yield

    def connect(self, debug: bool = False) -> tuple[Scorer, Environments | None]:
        """The scorer and the environments of this node's sidecar; `debug`: both run in this process instead."""
        cfg = self.cfg
        at = cfg.sidecar
        host = sidecar.connect_both(cfg.reward, self.envs, self.world.node, at.bind, debug, at.keys, at.hosts)
        scorer, environments = self.stack.enter_context(host)
        return scorer, environments if self.envs else None

    @property
    def episode(self) -> Episode | None:
        """What plays environments, unless `rollout.target` names another; None without environments."""
        return Agent(self.envs) if self.envs and not self.cfg.rollout.target else None

    def restore(
        self, place: Place, export: Callable[[Path], list[Path]] | None = None, **parts: Stateful
    ) -> tuple[Checkpointer, int]:
        """[all] Load the newest checkpoint and publish its weights; the checkpointer, and the step that it holds.

        export: writes a checkpoint's `hf/`; by default the policy's weights. parts: what a checkpoint holds beside the
        trained roles and the run's journal. 0 is a fresh run's step.
        """
        run_dir, parts = Path(self.cfg.run.dir), {**parts, "track": self.track}
        export = export or HfExport(place.roles.policy, self.cfg.policy.model, place.world)
        saver = Checkpointer(self.cfg.checkpoint, run_dir, place.world, place.roles.trained, parts, export)  # [train]
        start = saver.restore()  # [train]
        self.begin(place, start)  # [all]
        return saver, start

    def verify(self, key: str, checkpoint: str | None) -> None:
        """[all] UserError, naming the setting `key`, unless every byte of a checkpoint is as its manifest says."""
        with self.world.phase("restore"):
            problem = problem_of(Path(checkpoint), self.world) if checkpoint else None  # [all] the setting is agreed on
        if problem:
            raise UserError(f"{key}: {checkpoint} is torn ({problem})")

    def begin(self, place: Place, start: int) -> None:
        """[all] Let those who generate begin with the weights of step `start`."""
        place.on_start(start)  # [all]
        if place.publish:
            with self.world.journal.extend_timeout(
                self.cfg.journal.start_seconds
            ):  # an engine's first step may compile
                place.publish(version=start)  # [train] verified
