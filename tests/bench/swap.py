"""What it costs to change the policy in the middle of answers, with their keys and values kept or computed again.

    python -m tests.bench.swap [--model DIR] [--answers 32] [--rounds 5]

A native engine in this process. For answers under way of several lengths: seconds of the load itself, and those by
which the engine's next step takes longer than the one before.
"""

import argparse
import statistics
import time
from array import array

import torch

from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.module import empty_module
from spmd_rl.model.build import weights_of
from spmd_rl.model.smollm2 import default_dir
from spmd_rl.model.stored import stored_parts
from spmd_rl.types import Request


def step(engine: NativeEngine) -> float:
    """Return the seconds of one step."""
    began = time.perf_counter()
    engine.step()
    return time.perf_counter() - began


def swap(
    engine: NativeEngine, weights: list, version: int, lengths: tuple[int, int], answers: int, keep: bool
) -> tuple:
    """Return (seconds of the load, seconds of a step before, seconds of the step after)."""
    prompt, new = lengths
    ids = [f"{version}/{index}" for index in range(answers)]
    for index, id in enumerate(ids):
        tokens = array("i", [(7 * index + place) % 500 + 20 for place in range(prompt)])
        engine.add(Request(id, tokens, 2 * new, 1.0, seed=index))
    for _ in range(new):
        usual = step(engine)
    aborted = []
    if not keep:
        engine.abort(ids)
        aborted = engine.step()
    began = time.perf_counter()
    engine.load(weights, version)
    loaded = time.perf_counter() - began
    for index, done in enumerate(aborted):
        tokens = array("i", [(7 * index + place) % 500 + 20 for place in range(prompt)]) + done.token_ids
        engine.add(Request(done.id, tokens, new, 1.0, seed=index, num_begun=len(done.token_ids)))
    after = step(engine)
    engine.abort(ids)
    engine.step()
    return loaded, usual, after


def main() -> None:
    """Print a line for each length and way."""
    parser = argparse.ArgumentParser("python -m tests.bench.swap")
    parser.add_argument("--model", default=str(default_dir()))
    parser.add_argument("--answers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    o = parser.parse_args()
    module = empty_module(o.model, torch.float32)
    engine = NativeEngine(module, o.answers, 16384)
    like = weights_of(module, stored_parts(module))
    weights = [(name, 0.02 * torch.randn_like(tensor)) for name, tensor in like.items()]
    engine.load(weights, 0)
    version = 0
    print("tokens of prompt + answer   way         load s   step before s   after s   longer by s")
    for lengths in ((40, 16), (40, 64), (40, 160)):
        for keep in (True, False):
            found = []
            for _ in range(o.rounds):
                version += 1
                found.append(swap(engine, weights, version, lengths, o.answers, keep))
            loaded, usual, after = (statistics.median(column) for column in zip(*found, strict=True))
            way = "keep" if keep else "recompute"
            print(
                f"{lengths[0]} + {lengths[1]:<20}{way:12}{loaded:8.3f}{usual:14.3f}{after:12.3f}{after - usual:12.3f}"
            )


if __name__ == "__main__":
    main()
