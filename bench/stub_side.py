"""The real door with nothing to compute: engine and trainer are stubs that hand real tensors on. Held at the gate.

    torchrun --nproc-per-node 8 -m bench.stub_side key=value ...        # started by `coordination.py`

All that is not model compute is as in a run: tickets, ticks, coroutines, tokenizing, verdicts of a sidecar, the plan,
the all-to-all, publishing with its hashes and its probe, metrics and the log of all samples.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from bench import our_side
from spmd_rl import engine, train
from spmd_rl.batch import Batch
from spmd_rl.config import RlvrConfig, main
from spmd_rl.config.sections.engine import EngineConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.engine.base import Capacity, EngineCounts
from spmd_rl.rlvr import run
from spmd_rl.train import Roles
from spmd_rl.types import Completion, Request

LOGPROB = -0.5
"""Of every token, to engine and trainer alike."""
SHORTEST, LONGEST = 4, 12
"""Tokens of an answer."""
TOKENS = array("i", [1000 + 7919 * place % 1000 for place in range(4096)])
"""Answers are stretches of it: making them up must cost nothing."""
NUM_WEIGHTS, WEIGHT_SIZE = 32, 1024


class StubEngine:
    """Answers of 4 to 12 tokens, a token a step; the request's seed says which."""

    leads = True
    processor = None

    def __init__(self, settings: EngineConfig) -> None:
        self.capacity = Capacity(settings.max_running, settings.kv_tokens, settings.kv_tokens)
        self.token_counts = EngineCounts()
        self.ends: dict[int, list[tuple[Request, int]]] = defaultdict(list)
        self.now = self.version = self.num_unfinished = 0
        self._weights: list[tuple[str, Tensor]] = []

    def add(self, request: Request) -> None:
        """Queue."""
        length = min(SHORTEST + request.seed % (LONGEST - SHORTEST + 1), request.max_new_tokens)
        self.ends[self.now + length].append((request, length))
        self.num_unfinished += 1

    def abort(self, ids: Iterable[str]) -> None:
        """Nothing is ever left over: every step takes exactly the tickets it needs."""
        assert not list(ids)

    def step(self) -> list[Completion]:
        """The next token of all."""
        self.now += 1
        ended = [self._completion(*pair) for pair in self.ends.pop(self.now, ())]
        self.num_unfinished -= len(ended)
        return ended

    def _completion(self, request: Request, length: int) -> Completion:
        begin = request.seed % (len(TOKENS) - LONGEST)
        numbers = array("f", [LOGPROB]) * length, array("i", [self.version]) * length
        return Completion(request.id, TOKENS[begin : begin + length], *numbers, "stop")

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Keep: to copy is an engine's work."""
        self._weights = list(weights)
        self.version = version

    def driven(self, join: Callable[[bytes], None] | None = None) -> AbstractContextManager[None]:
        """A replica of one rank decides for itself."""
        return nullcontext()

    def joined(self, message: bytes) -> AbstractContextManager[None]:
        """There are no others."""
        return nullcontext()

    def loaded_weights(self) -> Iterator[tuple[str, Tensor]]:
        """What was kept."""
        yield from self._weights

    def awake(self) -> AbstractContextManager[None]:
        """Always."""
        return nullcontext()

    def sleep(self) -> None:
        """Nothing to free."""

    def close(self) -> None:
        """Nothing to free."""


class StubTrainer:
    """Weights that stay as they are; meets the other ranks where FSDP2's update calls for a named meeting."""

    hidden_size = 576
    sees = False

    def __init__(self, world: World) -> None:
        self._world, self.layout = world, Layout(world)
        self._weights = torch.arange(NUM_WEIGHTS * WEIGHT_SIZE, dtype=torch.float32).view(NUM_WEIGHTS, WEIGHT_SIZE)

    def awake(self) -> AbstractContextManager[None]:
        """Always."""
        return nullcontext()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The same every time."""
        for number, weight in enumerate(self._weights):
            yield f"weight.{number}", weight

    def logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """[all] What the engine said too."""
        self._world.reduce("logprobs: number of micro-batches", {"count": 1.0}, op="max")  # [all]
        return batch.loss_mask * LOGPROB, torch.zeros(batch.num_tokens)

    def update(self, batch: Batch, loss: Any, temperature: float) -> dict[str, float]:
        """[all] No update."""
        self._world.reduce("update: number of micro-batches", {"count": 1.0}, op="max")  # [all]
        sums = {"grad_square": 1.0, "loss": 0.0, "num_tokens": float(batch.loss_mask.sum())}
        self._world.reduce("update: gradient norm and averages", sums, op="sum")  # [all]
        return {"loss": 0.0, "grad_norm": 1.0, "lr": 0.0, "skipped": 0.0, "num_microbatches": 1.0}

    def close(self) -> None:
        """Nothing to free."""


if __name__ == "__main__":
    engine.build = lambda settings, *_: StubEngine(settings)
    train.build_roles = lambda _, world: Roles(StubTrainer(world), None, None)
    our_side.hold()
    main("rlvr", RlvrConfig, run)
