"""Trajectories of an environment's own solution, for a short supervised warm-up.

    collected = demonstrations.collect(step)  # [all]

Each answer is the next action of `solution()` in the form of `env.<tag>.pattern`, ended as the chat template ends an
answer, so the policy trains on the tokens that it sees in play.
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spmd_rl.base.errors import RunFailed, UserError
from spmd_rl.config.sections.env import ACTION_FORMATS, EnvConfig, EnvsConfig, WarmupConfig
from spmd_rl.config.sections.rollout import RolloutConfig
from spmd_rl.data import EnvTasks
from spmd_rl.distributed import World
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.rollout.agent import Agent
from spmd_rl.rollout.collected import Collected, whole
from spmd_rl.rollout.episode import Budget, BudgetSpent, Context, Sampling, play
from spmd_rl.types import Environments, Group, Message, Prompt, Session, Turn

NOBODY = None
"""Engine and scorer, which demonstrations do not use."""


@dataclass(frozen=True, slots=True)
class Demonstrator:
    """Player of the solutions of environments."""

    envs: EnvsConfig
    rollout: RolloutConfig
    kv_tokens: int
    seed: int
    environments: Environments
    tokenizer: Tokenizer

    async def play(self, task: Prompt, ticket: int) -> Group:
        """Return a group of one trajectory, unscored if the environment cannot play the task."""
        env, rollout, shown = self.envs.tags[task.domain], self.rollout, _Shown(self.environments)
        sampling = Sampling(self.seed, "demonstration", 1.0, rollout.max_new_tokens, rollout.stop_strings)
        budget = Budget(rollout.max_context_tokens or self.kv_tokens, rollout.max_turns)
        ctx = Script(
            prompt=task,
            ticket=ticket,
            answer_index=0,
            seed=lambda *_: 0,
            sampling=sampling,
            budget=budget,
            tokenizer=self.tokenizer,
            engine_loop=NOBODY,
            scorer=NOBODY,
            environments=shown,
            env=env,
        )
        return Group(task, ticket, tuple(await play(Agent(self.envs), ctx)))


class Demonstrations:
    """Demonstrations of a run's warm-up, each of another seed."""

    def __init__(
        self,
        warmup: WarmupConfig,
        tasks: EnvTasks,
        by: Demonstrator,
        world: World,
        rest: Callable[[], None],
    ) -> None:
        """rest: see `RolloutSource`. UserError for an environment with a custom pattern."""
        self._warmup, self._tasks, self._by, self._world, self._rest = warmup, tasks, by, world, rest
        for tag, env in by.envs.tags.items():
            if warmup.steps and env.share and env.pattern_for(False) not in ACTION_FORMATS:
                raise UserError(
                    f"warmup.steps: env.{tag}.pattern is not a named one, so no action can be written for it"
                )

    def collect(self, step: int) -> Collected:
        """[all] Return a step's demonstrations, one per group."""
        # An evaluation may have left an engine with its weights.
        self._rest()
        count, world = self._warmup.episodes, self._world
        with world.phase("generate"):
            mine = range(world.rank, count, world.size)
            groups = asyncio.run(self._play([(step * count + number, number) for number in mine]))
        collected = Collected.given(step, whole(groups), range(count), world)  # [all]
        if failed := next(iter(collected.table.details.values()), ""):
            raise RunFailed(f"warmup.steps: a demonstration failed: {failed}")
        return collected

    async def _play(self, numbers: Sequence[tuple[int, int]]) -> list[Group]:
        tasks = [(self._tasks.demonstration(number, self._by.seed), ticket) for number, ticket in numbers]
        return await asyncio.gather(*[self._by.play(*task) for task in tasks])


class _Shown:
    def __init__(self, environments: Environments) -> None:
        self._environments = environments
        self.session: Session | None = None
        self.tools: list | None = None

    async def reset(self, tag: str, seed: int, held_out: bool = False) -> Session:
        self.session = await self._environments.reset(tag, seed, held_out, solve=True)
        self.tools = self.session.reply.info.get("tools")
        return self.session


@dataclass(slots=True, kw_only=True)
class Script(Context):
    """A context whose answers are the environment's solution."""

    env: EnvConfig

    async def generate(self, prompt_ids: array) -> Turn:
        """Append `prompt_ids` and the next action. BudgetSpent without an action or room for it."""
        info = self.environments.session.reply.info
        form = ACTION_FORMATS.get(self.env.pattern_for(bool(self.environments.tools)))
        if "solution" not in info:
            raise BudgetSpent("the environment has no solution() to play")
        if form is None:
            raise BudgetSpent("its pattern is not a named one, so no action can be written for it")
        if not info["solution"]:
            raise BudgetSpent("the environment's solution() gives no next action")
        text = form.template.format(info["solution"][0])
        ids = self.tokenizer.encode(text)
        if not any(text.endswith(stop) for stop in self.sampling.stop):
            end = self.tokenizer.bridge([Message("user", "")]).token_ids[:1]
            ids = ids + (end if end and end[0] in self.tokenizer.stop_ids else array("i"))
        if self.num_tokens + len(prompt_ids) + len(ids) > self.budget.max_context_tokens:
            raise BudgetSpent(f"{self.num_tokens + len(prompt_ids)} tokens leave no room to answer")
        zeros = bytes(4 * len(ids))
        known = (array("f", zeros), array("i", zeros), "stop", text)
        return self.append(Turn(prompt_ids, ids, *known, pictures=self.pictures_in(prompt_ids)))
