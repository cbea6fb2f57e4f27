"""What every rank computes of all ranks' samples, by the number of ranks: the part of a step that grows with the job.

    python -m bench.metadata --ranks 1 8 64 512 --steps 5 --json m.json

A rank reads what all report at the end of a step, finds outcomes and metrics, and makes the plan: advantages,
weights, and who trains what. Every rank has finished 32 tickets of 8 answers, of all lengths up to 1,024 tokens, in no
order. One process does here what each of them would do: CPU-seconds, the least of the steps. Left out: how the records
travel.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch.distributed as dist

from bench import show
from spmd_rl.algo.moments import Moments
from spmd_rl.config.schema import AlgorithmConfig, RolloutConfig
from spmd_rl.rollout.collected import Collected, RankReport
from spmd_rl.rollout.coordinator import coordinate
from spmd_rl.rollout.step_plan import Cursor, plan_step
from spmd_rl.rollout.table import ANSWER, SliceReport
from tests import plans

TICKETS, ANSWERS = 32, 8
"""Of a rank and step, and of a ticket."""
PROMPT_TOKENS, MOST_TOKENS = 64, 1024
PARTS = ("result", "metrics", "plan")


def records(ranks: int, seed: int) -> list[bytes]:
    """What each rank reports, packed."""
    draw = np.random.default_rng(seed)
    reports = []
    for rank, mine in enumerate(draw.permutation(ranks * TICKETS).reshape(ranks, TICKETS).tolist()):
        rows = np.zeros((TICKETS, ANSWERS), ANSWER)
        rows["ticket"], rows["answer"] = np.array(mine)[:, None], np.arange(ANSWERS)
        rows["unit"], rows["last"] = rows["answer"], True
        rows["rank"], rows["scored"], rows["score"] = rank, True, draw.random(rows.shape)
        rows["num_answer_tokens"] = draw.integers(1, MOST_TOKENS, rows.shape)
        rows["num_prompt_tokens"] = PROMPT_TOKENS
        rows["num_tokens"] = rows["num_answer_tokens"] + PROMPT_TOKENS
        finished = [SliceReport(ticket, 0, "toy", row.tolist()) for ticket, row in zip(mine, rows, strict=True)]
        reports.append(RankReport(finished, running=[], idle_seconds=0.0, seconds=1.0, num_aborted=0))
    return [msgspec.msgpack.encode(one) for one in reports]


def step(payloads: list[bytes]) -> dict[str, float]:
    """CPU-seconds of each part, of one rank."""
    ranks = len(payloads)
    settings = RolloutConfig(prompts_per_step=ranks * TICKETS, answers_per_prompt=ANSWERS)
    coordinator = coordinate(dist.HashStore(), "bench", plan_step(Cursor(), settings), ranks)
    for position in range(ranks * TICKETS):
        coordinator.resolve(position, qualifies=True)
    decode = msgspec.msgpack.Decoder(RankReport).decode
    seconds = {}

    def timed(name: str, do: Callable[[], Any]) -> Any:
        began = time.process_time()
        done = do()
        seconds[name] = time.process_time() - began
        return done

    def read() -> Collected:
        reports = [decode(payload) for payload in payloads]
        return Collected.of(1, settings, coordinator, reports, {})

    collected = timed("result", read)
    timed("metrics", collected.metrics)
    sizes = {"num_updates": 1, "num_shards": ranks, "hidden_size": 576, "max_tokens": MOST_TOKENS}
    timed("plan", lambda: plans.plan(collected, AlgorithmConfig(), Moments(), **sizes))
    return seconds


def measure(ranks: int, steps: int, seed: int) -> dict[str, Any]:
    """The least CPU-seconds of each part, of `steps`, after one that is not timed."""
    payloads = records(ranks, seed)
    seen = [step(payloads) for _ in range(1 + steps)][1:]
    return {"ranks": ranks, "seed": seed, "seconds": {part: min(one[part] for one in seen) for part in PARTS}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="each seed is a run of its own")
    parser.add_argument("--steps", type=int, default=5, help="steps timed, after one that is not")
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    options = parser.parse_args()
    runs = [measure(ranks, options.steps, seed) for ranks in options.ranks for seed in options.seed]
    show.record(options.json, {"benchmark": "metadata", "runs": runs})
    rows = []
    for ranks in options.ranks:
        seconds = [run["seconds"] for run in runs if run["ranks"] == ranks]
        parts = [1e3 * sum(one[part] for one in seconds) / len(seconds) for part in PARTS]
        rows.append([str(ranks), f"{ranks * TICKETS * ANSWERS:,}", *(f"{ms:.2f}" for ms in parts), f"{sum(parts):.2f}"])
    show.table("CPU-ms of each rank, of all ranks' metadata, a step", ["ranks", "samples", *PARTS, "all"], rows)


if __name__ == "__main__":
    sys.exit(main())
