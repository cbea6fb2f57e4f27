"""Scheduling policies on real processes: store, ticks, verdicts of a sidecar, and an engine that sleeps.

    python -m bench.rollout [--steps 24] [--seed 0] [--ranks 4]

The engine of each rank sleeps as long as a step would take; lengths follow a long-tail law and are a pure function of
(seed, ticket, answer). Every policy trains on as many groups a step. Beside each figure stands what the simulator
(`bench.virtual.simulate`) says of the same steps.
"""

import argparse
import time
from dataclasses import replace

from bench.virtual.simulate.engine import Speed
from bench.virtual.simulate.lengths import Lengths, long_tail
from bench.virtual.simulate.policies import POLICIES, play
from bench.virtual.simulate.scene import Scene
from spmd_rl import sidecar
from spmd_rl.config.schema import RewardConfig, RewardsConfig, RlvrConfig, RolloutConfig
from spmd_rl.distributed import World
from spmd_rl.types import Completion, Request
from tests.dist.harness import run_ranks
from tests.fakes import FakeEngine, FakePrompts, make_rollouts

CAP = 75
"""tokens; the median answer has 3"""
SPEED = Speed(16e-3, 1.2e-4)
MAX_RUNNING = 64
PROMPTS, ANSWERS = 12, 4
"""per rank and step; per prompt"""


def lengths(seed: int) -> Lengths:
    """Tokens of all answers."""
    return Lengths(long_tail(CAP / 25, 1.3, CAP), seed, correlation=0.5)


def rollout_settings(ranks: int) -> RolloutConfig:
    """Of all policies."""
    prompts = PROMPTS * ranks
    settings = RolloutConfig(
        prompts_per_step=prompts, answers_per_prompt=ANSWERS, max_new_tokens=CAP, over_sample=prompts // 4
    )
    settings.filter.zero_variance = False
    return settings


class SleepingEngine(FakeEngine):
    """Answers as long as the law says, each step as long as the model of time says."""

    def __init__(self, lengths: Lengths) -> None:
        super().__init__(lambda request: self._left(request), MAX_RUNNING)
        self._lengths = lengths

    def _left(self, request: Request) -> int:
        ticket, answer, _ = request.order
        return self._lengths.of(ticket, ANSWERS)[answer] - (CAP - request.max_new_tokens)  # less what was carried

    def step(self) -> list[Completion]:
        time.sleep(SPEED.step(len(self.running)))
        return super().step()


def steps(world: World, policy: str, num_steps: int, seed: int) -> list:
    """[seconds, bubble, groups, tokens of the answers used, stale answers] of each step."""
    cfg = RlvrConfig(reward=RewardsConfig(domains={"toy": RewardConfig("tests.e2e.toy_reward:ParityReward")}))
    cfg.rollout = replace(rollout_settings(world.size), **POLICIES[policy])
    prompts = FakePrompts(2 * cfg.rollout.prompts_per_step * (num_steps + 1))
    seen = []
    with sidecar.connect(cfg.reward, world.node) as scorer:
        engine = SleepingEngine(lengths(seed))
        rollouts = make_rollouts(cfg, engine, prompts, scorer, world)
        world.barrier("begin")
        for step in range(1, num_steps + 1):
            engine.version, began = step - 1, time.perf_counter()
            collected = rollouts.collect(step)
            answers = collected.table.accepted
            tokens, stale = int(answers["num_answer_tokens"].sum()), int((answers["lag"] > 0).sum())
            row = [collected.bubble, collected.table.num_accepted, tokens, stale]
            seen.append([time.perf_counter() - began, *row])
        rollouts.close()
    return seen


def measure(policy: str, num_steps: int, ranks: int = 4, seed: int = 0) -> list:
    """`steps` of the first rank, of as many processes as `ranks`."""
    return run_ranks(ranks, steps, policy, num_steps, seed, timeout=600)[0]


def simulated(policy: str, num_steps: int, ranks: int = 4, seed: int = 0) -> list:
    """The same steps on virtual clocks, and on to the end of a long round."""
    scene = Scene(rollout_settings(ranks), lengths(seed), ranks, SPEED, MAX_RUNNING, verdict_seconds=2e-3)
    return list(play(policy, scene, num_steps).steps)


def main() -> None:
    """Print a line for each policy."""
    parser = argparse.ArgumentParser("python -m bench.rollout")
    for name, default in (("steps", 20), ("seed", 0), ("ranks", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    o = parser.parse_args()
    num_steps = len(simulated("defer", o.steps, o.ranks, o.seed))  # whole cycles of tail: defer
    print(f"{o.ranks} ranks, {PROMPTS * o.ranks} prompts x {ANSWERS} answers a step, {num_steps} steps, seed {o.seed}")
    print(f"{'policy':16}  s/step  of static  bubble  tokens  stale   simulated: s/step, of static")
    first = None
    for policy in POLICIES:
        real = measure(policy, num_steps, o.ranks, o.seed)
        seconds = sum(row[0] for row in real)
        virtual = sum(step.seconds for step in simulated(policy, num_steps, o.ranks, o.seed))
        first = first or (seconds, virtual)
        answers = ANSWERS * sum(row[2] for row in real)
        print(
            f"{policy:16}{seconds / num_steps:8.3f}{seconds / first[0]:11.2f}"
            f"{sum(row[0] * row[1] for row in real) / seconds:8.0%}{sum(row[3] for row in real) / answers:8.1f}"
            f"{sum(row[4] for row in real) / answers:7.0%}{virtual / num_steps:14.3f}{virtual / first[1]:11.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
