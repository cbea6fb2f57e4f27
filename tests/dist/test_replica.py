"""Replicas of several ranks: the first decides, the others do the same, and any failure ends them together."""

import os
import signal
import time
from array import array
from pathlib import Path

import pytest

from spmd_rl.config.schema import RlvrConfig
from spmd_rl.distributed import World
from spmd_rl.engine.replicated import ReplicatedEngine
from spmd_rl.rollout import Sampling
from spmd_rl.types import Request
from tests.dist.harness import launch, run_ranks
from tests.fakes import FakeEngine, FakePrompts, FakeScorer, make_rollouts, tickets_of
from tests.patience import patient

STALL = 3.0


def settings(**rollout) -> RlvrConfig:
    cfg = RlvrConfig()
    cfg.rollout.filter.zero_variance = True
    for key, value in {"prompts_per_step": 4, "answers_per_prompt": 4, "max_new_tokens": 12, **rollout}.items():
        setattr(cfg.rollout, key, value)
    return cfg


class Recording(FakeEngine):
    """Remembers every call, in order."""

    def __init__(self, length) -> None:
        super().__init__(length)
        self.calls: list = []

    def add(self, request) -> None:
        self.calls.append(["add", request.id, request.seed, list(request.prompt_ids)])
        super().add(request)

    def abort(self, ids) -> None:
        self.calls.append(["abort", *ids])
        super().abort(ids)

    def step(self):
        self.calls.append(["step"])
        return super().step()


def steps(world: World, tp: int, rollout: dict) -> list:
    """Two steps and an evaluation: calls of this rank's engine, and what each step used and left here."""
    engine = Recording(lambda request: 30 if request.order[0] % 5 == 4 else 3)
    scorer = FakeScorer(lambda prompt, answer: int(answer[0]) % 2 == 0)
    replicated = ReplicatedEngine(engine, world, tp)
    rollouts = make_rollouts(settings(**rollout), replicated, FakePrompts(50), scorer, world)
    seen = []
    for step in (1, 2):
        collected = rollouts.collect(step)
        seen.append([[o.ticket, o.answers["score"].tolist()] for o in tickets_of(collected.table)])
        seen.append([g.ticket for g in collected.groups])
    groups = rollouts.answer(rollouts.prompts.eval, [Sampling(0, "eval", 1.0, 8)])
    rollouts.close()
    return [engine.calls, seen, [g.ticket for g in groups]]


@pytest.mark.parametrize(
    "rollout", [{}, {"over_sample": 2, "partial_rollout": True}, {"answers_per_claim": 1}, {"claim": "static"}], ids=str
)
def test_peers_do_what_the_first_rank_does(rollout: dict) -> None:
    results = run_ranks(4, steps, 2, rollout)
    for first, peer in ((0, 1), (2, 3)):
        assert results[first][0] == results[peer][0], "the engines of one replica were asked different things"
        # with claims from the store one replica may come late, and find next to nothing left to do
        assert len(results[first][0]) > (20 if rollout.get("claim") == "static" else 0)
        assert results[peer][1][1] == results[peer][1][3] == results[peer][2] == [], "a peer has no samples"
    assert len(results[0][0]) + len(results[2][0]) > 40
    assert results[0][0] != results[2][0], "two replicas did the same work"
    assert len({str([r[1][0], r[1][2]]) for r in results}) == 1, "ranks know different outcomes"
    if not rollout.get("partial_rollout"):
        alone = run_ranks(1, steps, 1, rollout)[0]
        assert alone[1][0] == results[0][1][0], "what a step uses depends on the replicas"
    assert sorted(t for r in results for t in r[2]) == [0, 1]


def joining(world: World) -> list:
    """Requests, then a message on which all ranks ask by themselves, as a probe does, then requests again."""
    engine = Recording(lambda request: 5)
    replicated = ReplicatedEngine(engine, world, 2)

    def answered(first: int) -> None:
        for number in range(first, first + 3):
            replicated.add(Request(f"r{number}", array("i", [1, 2]), 8, 1.0, seed=number))
        while replicated.num_unfinished:
            replicated.step()

    def join(message: bytes) -> None:
        engine.calls.append(["told", message.decode()])
        answered(100)

    with replicated.driven(join):
        if replicated.leads:
            answered(0)
            with replicated.joined(b"version 1"):
                join(b"version 1")
            answered(10)
    return engine.calls


def test_in_the_middle_all_ranks_of_a_replica_can_make_the_same_calls() -> None:
    first, peer, *others = run_ranks(4, joining)
    assert first == peer and others == [first, first]
    told = first.index(["told", "version 1"])
    assert 0 < told < len(first) - 1 and [call[1] for call in first if call[0] == "add"][3] == "r100"


def differing(world: World) -> list:
    engine = FakeEngine(lambda request: 3 + world.rank)
    scorer = FakeScorer(lambda prompt, answer: int(answer[0]) % 2 == 0)
    rollouts = make_rollouts(settings(), ReplicatedEngine(engine, world, 2), FakePrompts(50), scorer, world)
    rollouts.collect(1)
    return []


def test_a_peer_whose_engine_gives_other_answers_ends_the_run() -> None:
    with pytest.raises(AssertionError, match="its engine gave other answers than its replica's first rank"):
        run_ranks(2, differing)


class Struck(FakeEngine):
    """Whatever befalls the peer in its 20th step."""

    def __init__(self, world: World, fate: str) -> None:
        super().__init__(lambda request: 400)
        self.world, self.fate, self.num_steps = world, fate, 0

    def step(self):
        self.num_steps += 1
        if self.world.rank == 1 and self.num_steps == 20:
            self.world.journal.note("struck")
            if self.fate == "raise":
                raise ValueError("a bad page")
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.fate])
        time.sleep(0.002)
        return super().step()


def struck(world: World, fate: str) -> None:
    cfg = settings(max_new_tokens=400)
    scorer = FakeScorer(lambda prompt, answer: int(answer[0]) % 2 == 0)
    world.journal.set_step(1)
    engine = ReplicatedEngine(Struck(world, fate), world, 2)
    make_rollouts(cfg, engine, FakePrompts(50), scorer, world).collect(1)


@pytest.mark.parametrize("fate", ["raise", "kill", "stop"])
def test_a_peer_struck_in_a_tick_ends_the_job_together(tmp_path: Path, fate: str) -> None:
    with launch(4, struck, fate, directory=tmp_path, stall_seconds=STALL) as job:
        job.wait_for("struck", 1)
        began = time.monotonic()
        others = [process for rank, process in enumerate(job.processes) if rank != 1]
        while any(process.poll() is None for process in others):
            assert time.monotonic() - began < patient(STALL + 6), job.output()
            time.sleep(0.02)
        assert all(process.returncode for process in others)
        if fate == "stop":
            report = (job.run_dir / "hang.txt").read_text()
            assert "phase: generate" in report and "rank 1 (pid" in report
            assert "replica 0: tick" in report, "rank 0 waits for its peer in a tick"
        elif fate == "raise":
            assert time.monotonic() - began < patient(4)
            assert "rank 1 failed: ValueError: a bad page" in (tmp_path / "rank-0.log").read_text()
