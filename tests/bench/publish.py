"""What a publish costs beside a plain copy of the same bytes, interleaved in one run; medians of the slowest rank.

    torchrun --nproc-per-node 2 tests/bench/publish.py [key=value ...]

`clone` allocates and copies (what a naive hand-over does), `copy` writes into memory that is there already.
"""

import statistics
import sys
import tempfile
import time
from collections import defaultdict

import torch

from spmd_rl import engine, sync, train
from spmd_rl.config import RlvrConfig
from spmd_rl.config.load import load
from spmd_rl.dist import World

ROUNDS = 9


def timed(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    overrides = [f"run.dir={tempfile.mkdtemp()}", "train.offload=false", *sys.argv[1:]]
    cfg = load("rlvr", RlvrConfig, overrides)
    with World.open(cfg) as world:
        policy, _ = train.build_roles(cfg, world)
        generator = engine.build(cfg, world)
        publish = sync.build(policy, generator, world)
        publish(version=0)
        source = [tensor.clone() for _, tensor in generator.held()]
        target = [tensor.clone() for tensor in source]
        seconds: dict[str, list[float]] = defaultdict(list)
        for version in range(1, ROUNDS + 1):
            own = {
                "clone": timed(lambda: [t.clone() for t in source]),
                "copy": timed(lambda: [t.copy_(s) for s, t in zip(source, target, strict=True)]),
            }
            for name, value in world.reduce("bench", own, "max").items():
                seconds[name].append(value)
            for name, value in publish(version=version).items():
                seconds[name].append(value)
        if world.rank == 0:
            medians = {name: statistics.median(values) for name, values in seconds.items()}
            megabytes, threads = medians["publish/bytes"] / 1e6, torch.get_num_threads()
            print(f"{world.size} ranks of {threads} threads, {megabytes:.0f} MB, {cfg.policy.dtype}")
            handed = medians["publish/gather_seconds"] + medians["publish/copy_seconds"]
            rows = {
                "clone of the same bytes": medians["clone"],
                "copy into place": medians["copy"],
                "publish: gather": medians["publish/gather_seconds"],
                "publish: copy": medians["publish/copy_seconds"],
                "publish: both hashes": medians["publish/hash_seconds"],
                "publish: probe": medians["publish/probe_seconds"],
                "gather + copy": handed,
                "gather + copy + hashes": handed + medians["publish/hash_seconds"],
            }
            for name, value in rows.items():
                clones, copies = value / medians["clone"], value / medians["copy"]
                print(f"{name:26} {1e3 * value:8.1f} ms   {clones:6.2f} clones   {copies:6.2f} copies")


if __name__ == "__main__":
    main()
