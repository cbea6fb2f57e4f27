"""`RemoteRollouts`: what generating ranks make, seen from a training rank as if it had generated it itself.

They may be of this job, or of jobs of their own that are others tomorrow.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from statistics import fmean
from time import perf_counter
from typing import Any

import msgspec

from spmd_rl.config.schema import RlConfig
from spmd_rl.data import EnvTasks, Prompts
from spmd_rl.learn import Evaluation
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.rollout import Collected, RankReport, Sampling, check_errors
from spmd_rl.rollout.coordinator import coordinate
from spmd_rl.rollout.prompt_lengths import fit_prompts
from spmd_rl.rollout.step_plan import Cursor, GroupSlice, plan_step
from spmd_rl.rollout.table import SliceReport
from spmd_rl.split.messages import Kind, Stats
from spmd_rl.split.pace import is_evaluated, oldest_version
from spmd_rl.split.pieces import Asked, PieceRules
from spmd_rl.split.queues import Accepted, Place
from spmd_rl.split.server import Checked
from spmd_rl.split.sides import TrainSide
from spmd_rl.split.work_queue import WorkQueue
from spmd_rl.types import Group, Prompt
from spmd_rl.types.encoded import unpack
from spmd_rl.weights.messages import Announcement
from spmd_rl.weights.probe import NEW_TOKENS, PROMPTS, Answer

LOOK_SECONDS = 0.5
"""Between two looks whether generating ranks have moved."""
CARRIED_STEPS = 8
"""A piece counts, where answers are carried on, so many steps after the one for which it was claimed at most, beside
`placement.max_staleness`."""


REPORTS = {"step": "generate", "eval": "eval", "probe": "publish"}
"""The phase of each kind of work."""


class Ended(msgspec.Struct, array_like=True):
    """What the first training rank knows of a work that has ended."""

    accepted: list[Accepted]
    reports: list[RankReport]
    stats: list[Stats]
    waited: float


class RemoteRollouts:
    """Stateful, like `Rollouts`: the cursor says which tickets no step has trained on. Its server asks it what a piece
    must be (`server.Rules`)."""

    def __init__(
        self, cfg: RlConfig, prompts: Prompts | EnvTasks, tokenizer: Tokenizer, side: TrainSide, rules: PieceRules
    ) -> None:
        """[all] that train. prompts: of tasks, what they say is known when they begin."""
        self.source = self.prompts = prompts
        if isinstance(prompts, Prompts):
            sections = cfg.rollout, cfg.data, cfg.reward
            self.prompts, *_ = fit_prompts(prompts, tokenizer, *sections, side.world)  # [all]
        self._cfg, self._server, self._world = cfg, side.server, side.world
        self._evaluation = Evaluation.of(cfg)
        self._cursor, self._rules, self._start, self._collected = Cursor(), rules, 0, 0
        self._render = None if isinstance(prompts, EnvTasks) or cfg.rollout.target else tokenizer.render
        self._probed = -1
        """The newest version whose probe has been answered."""
        self._server.rules = self

    def state(self) -> dict[str, Any]:
        """See `checkpoint.Stateful`."""
        return self._cursor.state(self.prompts.fingerprint())

    def load_state(self, state: dict[str, Any]) -> None:
        """See `checkpoint.Stateful`. UserError if the tickets would now stand for other prompts."""
        self._cursor = Cursor.of_state(state, self.prompts.fingerprint())

    def begin(self, start: int) -> None:
        """[all] Open the steps after `start`."""
        first = max(start, self._cfg.num_shown) + 1
        self._start = start
        if self._world.rank == 0:
            rest = self._cfg.steps, self._cursor, self._priority
            self._server.with_queue(lambda queue: queue.begin(start, first, *rest))

    def _priority(self, ticket: int) -> float:
        return self.prompts.ticket(ticket, self._cfg.seed)[1].priority

    def announce(self, announcement: Announcement) -> None:
        """On the first rank: let generating ranks know of a version, and of what is asked of it."""
        version = announcement.version
        prompts, _ = self._evaluation.questions(self.prompts.eval, version)

        def ask(queue: WorkQueue) -> None:
            if announcement.probed:
                queue.ask_probe(version)
            if prompts and is_evaluated(version, self._start) and not self._cfg.placement.is_lent:
                queue.ask_eval(version, len(prompts))

        self._server.announce(msgspec.msgpack.encode(announcement), ask)

    def collect(self, step: int) -> Collected:
        """[all] Wait until generating ranks have made this step, and return what of it lies on this rank."""
        world = self._world
        with world.phase("generate"):
            ended, mine = self._take(f"generate: step {step} from ranks that generate", "step", step)  # [all]
        with world.phase("coordination"):
            self._collected = step
            groups = self._server.collect("step", mine)
            finished = {GroupSlice(*one.place): group for one, group in zip(mine, groups, strict=True)}
            collected = self._step(step, ended.reports, finished)
            collected = replace(collected, pace=self._pace(collected, ended))
        return check_errors(collected, self._cfg.reward, self._cfg.rollout, world)  # [all]

    def _step(self, step: int, reports: list[RankReport], finished: Mapping[GroupSlice, Group]) -> Collected:
        """What the reports of generating ranks make of a step, of which this rank has what is `finished`."""
        settings = self._cfg.rollout
        coordinator = coordinate(self._world.store, f"step{step}", plan_step(self._cursor, settings))
        collected = Collected.of(step, settings, coordinator, reports, finished)
        self._cursor = self._cursor.after(collected.table.tickets.tolist())
        return collected

    def _pace(self, collected: Collected, ended: Ended) -> dict[str, float]:
        """How the two sides keep up with each other; means over the ranks that generated."""
        lag = collected.table.answers["lag"]
        pace = {
            "placement/train_wait_seconds": ended.waited,
            "placement/generate_wait_seconds": fmean(one.waited for one in ended.stats),
            "rollout/lag/max": float(lag.max(initial=0)),
        }
        pace["placement/swaps"] = fmean(one.num_swaps for one in ended.stats)
        pace["placement/swap_seconds"] = fmean(one.swap_seconds for one in ended.stats)
        return pace

    def answer(self, prompts: Sequence[Prompt], sampling: Sequence[Sampling]) -> list[Group]:
        """[all] Wait for the answers to held-out prompts by the newest version of the policy.

        What is asked when is known on both sides (`learn.Evaluation`).
        """
        _, mine = self._take("eval: answers from ranks that generate", "eval", self._server.weights.newest)  # [all]
        return self._server.collect("eval", sorted(mine, key=lambda one: one.place))

    def probe_answers(self, version: int) -> dict[int, list[Answer]]:
        """[all] Wait for what engines answer to the probe of a version; by member, what lies on this rank."""
        _, mine = self._take("publish: answers of engines", "probe", version)  # [all]
        self._probed = version
        return dict(zip((one.member for one in mine), self._server.collect("probe", mine), strict=True))

    def _take(self, name: str, kind: Kind, number: int) -> tuple[Ended, list[Accepted]]:
        """[all] Wait for a work's end; what came of it on all ranks, and the pieces that lie on this one."""
        began = perf_counter()
        self._wait(name, lambda queue: queue.ended(kind, number))
        ended = None
        if self._world.rank == 0:
            end = self._server.with_queue(lambda queue: queue.take(kind, number))
            ended = Ended(end.accepted, end.reports, end.stats, perf_counter() - began)
        ended, *_ = self._world.gather(f"{REPORTS[kind]}: reports", ended, Ended | None)  # [all]
        mine = [one for one in ended.accepted if one.member % self._world.size == self._world.rank]
        return ended, mine

    def _wait(self, name: str, until: Callable[[WorkQueue], bool]) -> None:
        """On the first rank, wait for generating ranks."""
        if self._world.rank:
            return
        with self._world.journal.waiting(name):
            while not self._server.wait(LOOK_SECONDS, until):
                pass

    # -- for the server's thread -----------------------------------------------------------------------------------

    def is_late(self, kind: Kind, number: int) -> bool:
        """See `server.Rules`."""
        settings = self._cfg
        if kind != "step":
            return number != self._server.weights.newest or (kind == "probe" and number <= self._probed)
        kept = settings.placement.max_staleness + CARRIED_STEPS if settings.rollout.partial_rollout else 0
        return number <= self._collected - kept

    def check(self, member: int, kind: Kind, number: int, place: Place, payload: memoryview) -> Checked:
        """See `server.Rules`."""
        world, settings = self._world, self._cfg
        if member % world.size != world.rank:
            raise ValueError("another training rank holds it")
        if kind == "probe":
            return Checked(self._probe(payload), b"")
        if kind == "eval":
            prompts, drawn = self._evaluation.questions(self.prompts.eval, number)
            return Checked(self._rules.held_out(payload, self._asked(prompts[place[0]], place[0]), drawn, number), b"")
        _, prompt = self.prompts.ticket(place[0], settings.seed)
        oldest = oldest_version(number, settings.placement.max_staleness, self._start)
        versions = range(oldest, self._server.weights.newest + 1)
        group = self._rules.group(payload, self._asked(prompt, place[0]), place[1], versions)
        report = SliceReport.of(group, place[1], world.rank, number - 1)
        return Checked(group, msgspec.msgpack.encode(report))

    def _asked(self, prompt: Prompt, number: int) -> Asked:
        """What a piece is to answer: one turn after the prompt's tokens, or what an episode makes of it."""
        return Asked(prompt, number, self._render(prompt.messages) if self._render else None)

    def _probe(self, payload: memoryview) -> list[Answer]:
        answers = unpack(payload, list[Answer])
        if len(answers) != len(PROMPTS) or any(not 0 < len(one.token_ids) <= NEW_TOKENS for one in answers):
            raise ValueError("it does not answer the probe")
        for one in answers:
            self._rules.check_ids(one.token_ids)
            if len(one.token_ids) != len(one.logprobs) or any(not isfinite(x) and x == x for x in one.logprobs):
                raise ValueError("its logprobs are none")
        return answers
