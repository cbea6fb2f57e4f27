"""Random histories of claims, verdicts, filters, aborts, carried answers, crashes and resumes: no ticket is lost, none
is used twice."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spmd_rl.config import RlvrConfig
from spmd_rl.distributed import solo
from spmd_rl.types import Verdict
from tests.fakes import FakeEngine, FakePrompts, FakeScorer, make_rollouts, tickets_of

MODES = [
    {},
    {"partial_rollout": True},
    {"accept": "first_finished"},
    {"accept": "first_finished", "partial_rollout": True},
    {"tail": "defer"},
    {"claim": "static"},
]


class Crash(Exception):
    """Of the process, as far as this test is concerned."""


class Crashing(FakeEngine):
    """Answers of random length; dies in its `fatal`-th step."""

    def __init__(self, draw: random.Random, fatal: int | None) -> None:
        super().__init__(lambda request: 1 + hash_of(request.order) % 11)
        self.left = fatal

    def step(self):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Crash
        return super().step()


def hash_of(order: tuple[int, ...]) -> int:
    return random.Random(str(order)).randrange(1000)


class Moody(FakeScorer):
    """Some verdicts are no score, some groups have no variance."""

    def __init__(self) -> None:
        super().__init__(lambda prompt, answer: True)

    async def score(self, prompt, answer, info) -> Verdict:
        await super().score(prompt, answer, info)
        mood = random.Random(f"{prompt.id} {answer}").random()
        return Verdict("timeout") if mood < 0.1 else Verdict("ok", float(mood < 0.6))


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_no_ticket_is_lost_and_none_is_used_twice(count: int) -> None:
    histories = given(
        mode=st.sampled_from(MODES),
        goal=st.integers(1, 3),
        extra=st.integers(0, 3),
        slices=st.sampled_from([None, 1, 2]),
        slots=st.integers(1, 12),
        crashes=st.lists(st.one_of(st.none(), st.integers(0, 25)), min_size=5, max_size=5),
        seed=st.integers(0, 10**6),
    )
    settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))(histories(one_history))()


def one_history(mode, goal, extra, slices, slots, crashes, seed) -> None:
    draw = random.Random(seed)
    cfg = RlvrConfig(seed=seed)
    cfg.rollout.filter.zero_variance = True
    for key, value in {"answers_per_prompt": 3, "answers_per_claim": slices, "max_new_tokens": 8, **mode}.items():
        setattr(cfg.rollout, key, value)
    cfg.rollout.prompts_per_step, cfg.rollout.over_sample = goal, extra
    cfg.reward.error_budget = 1.0
    used: list[set[int]] = []  # by the steps that count
    saved = {"next_ticket": 0, "skipped": [], "prompts": "fake"}
    saved_at = 0
    for fatal in [*crashes, None]:
        with solo() as world:
            engine = Crashing(draw, fatal)
            rollouts = make_rollouts(cfg, engine, FakePrompts(7), Moody(), world)
            rollouts.load_state(saved)
            del used[saved_at:]  # what came after the checkpoint has not happened
            try:
                for _ in range(draw.randint(1, 3)):
                    collected = rollouts.collect(len(used) + 1)
                    used.append({o.ticket for o in tickets_of(collected.table)})
                    state = rollouts.state()
                    if draw.random() < 0.7:
                        saved, saved_at = state, len(used)
                    everything = [ticket for step in used for ticket in step]
                    assert len(set(everything)) == len(everything), "used twice"
                    open_ones = set(state["skipped"]) | {state["next_ticket"]}
                    assert set(range(state["next_ticket"])) - set(everything) == set(state["skipped"]), "lost"
                    assert not open_ones & set(everything)
                    assert len({s.key for g in collected.groups for s in g.samples}) == sum(
                        len(g.samples) for g in collected.groups
                    )
            except Crash:
                pass
            rollouts.close()
    assert used
