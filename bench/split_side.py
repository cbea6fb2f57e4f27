"""The door with an engine and a trainer that sleep: real processes, store, sidecar and transport, no computation.

    torchrun --nproc-per-node 4 -m bench.split_side key=value ...        # started by `split.py`

An engine's step sleeps as the simulator's model of time says, answers are as long as its law says (a pure function of
seed, ticket and answer), and an update sleeps in proportion to the share of the ranks that train. When each step ended
is written to `ended.jsonl` in the run's directory, and which tokens were computed again to `recomputed.jsonl`.
"""

import atexit
import os
import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.stub_side import LOGPROB, StubEngine, StubTrainer
from bench.virtual.simulate.engine import Speed
from bench.virtual.simulate.lengths import Lengths, long_tail
from spmd_rl import engine, train
from spmd_rl.batch import Batch
from spmd_rl.config import RlvrConfig, main
from spmd_rl.distributed import World
from spmd_rl.rlvr import run
from spmd_rl.track.run import Run
from spmd_rl.train import Roles
from spmd_rl.types import Completion, Request

CAP = 75
"""Tokens of the longest answer; the median one has 3."""
SPEED = Speed(40e-3, 1e-4)
TRAIN_SECONDS = float(os.environ.get("TRAIN_SECONDS", "0.5"))
"""Of an update on all ranks."""
ENDED = "ended.jsonl"
RECOMPUTED = "recomputed.jsonl"
"""A line for each engine: tokens computed again, those of all answers that it went on with, and all tokens."""
TOKENS = array("i", [97 + 7 * place % 26 for place in range(CAP + 26)])
"""Letters in any byte-level vocabulary of the tests."""


def lengths(seed: int) -> Lengths:
    """Return the tokens of all answers."""
    return Lengths(long_tail(CAP / 25, 1.3, CAP), seed, correlation=0.5)


class SleepingEngine(StubEngine):
    """Generates a token a step for all requests that run, each step as long as one of an engine."""

    def __init__(self, cfg: RlvrConfig) -> None:
        super().__init__(cfg.engine)
        self._lengths, self._answers = lengths(cfg.seed), cfg.rollout.answers_per_prompt
        self._gone: set[str] = set()
        self._num_computed = self._num_recomputed = 0
        atexit.register(self._write, Path(cfg.run.dir) / RECOMPUTED)

    def _write(self, path: Path) -> None:
        with open(path, "a") as out:
            out.write(f"[{self._num_recomputed}, {self._num_computed}]\n")

    def add(self, request: Request) -> None:
        """Queue."""
        self._num_computed += len(request.prompt_ids)
        self._num_recomputed += len(request.prompt_ids) if request.num_begun else 0
        ticket, answer, _ = request.order
        length = self._lengths.of(ticket, self._answers)[answer % self._answers] - request.num_begun
        length = max(1, min(length, request.max_new_tokens))
        self.ends[self.now + length].append((request, length))
        self.num_unfinished += 1

    def abort(self, ids: Iterable[str]) -> None:
        """End them with the next step, with the tokens that they have."""
        gone = set(ids)
        stopped = [
            (request, length - (end - self.now))
            for end, pairs in self.ends.items()
            for request, length in pairs
            if request.id in gone
        ]
        for end in self.ends:
            self.ends[end] = [pair for pair in self.ends[end] if pair[0].id not in gone]
        self.ends[self.now + 1] += stopped
        self._gone |= gone

    def step(self) -> list[Completion]:
        """Sleep as long as it would take."""
        time.sleep(SPEED.step(self.num_unfinished))
        self._num_computed += self.num_unfinished
        return super().step()

    def _completion(self, request: Request, length: int) -> Completion:
        reason = "abort" if request.id in self._gone else "stop"
        self._gone.discard(request.id)
        begin = request.seed % 26
        numbers = array("f", [LOGPROB]) * length, array("i", [self.version]) * length
        return Completion(request.id, TOKENS[begin : begin + length], *numbers, reason)


class SleepingTrainer(StubTrainer):
    """Takes for an update what its share of the ranks would."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._seconds = TRAIN_SECONDS * int(os.environ["WORLD_SIZE"]) / world.size

    def update(self, batch: Batch, loss: Any, temperature: float) -> dict[str, float]:
        """[all] Sleep, and meet as an update does."""
        time.sleep(self._seconds)
        return super().update(batch, loss, temperature)

    def save(self, folder: Path) -> list[Path]:
        """[all] Nothing has changed; a run saves at its end."""
        return []

    def counters(self) -> dict[str, int]:
        """None."""
        return {}

    def hashes(self) -> dict[str, str]:
        """None."""
        return {}


def tell_ends() -> None:
    """Have rank 0 write down when each step has ended, in seconds of the monotonic clock."""
    step_of = Run.step

    @contextmanager
    def timed(track: Run, step: int) -> Iterator[None]:
        with step_of(track, step):
            yield
        if int(os.environ["RANK"]) == 0:
            with open(track.directory / ENDED, "a") as out:
                out.write(f"[{step}, {time.monotonic()}]\n")

    Run.step = timed


def run_asleep(cfg: RlvrConfig) -> None:
    """[all] The pipeline over this engine."""
    engine.build = lambda *_: SleepingEngine(cfg)
    run(cfg)  # [all]


if __name__ == "__main__":
    train.build_roles = lambda _, world: Roles(SleepingTrainer(world), None, None)
    tell_ends()
    main("rlvr", RlvrConfig, run_asleep)
