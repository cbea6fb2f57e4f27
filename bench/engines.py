"""Engines side by side, one a process: start, tokens per CPU-second, publish, memory.

    python -m bench.engines native --model ~/.cache/spmd_rl/models/smollm2-135m-instruct

CPU-seconds of this process, since machines are shared. SGLang's figures come from the environment of its own.
"""

import argparse
import json
import resource
import time
from array import array

import torch

from spmd_rl.model.build import build_model
from spmd_rl.types import Request
from tests.engines import started_engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["native", "vllm", "sglang"])
    parser.add_argument("--model", required=True, help="a model directory")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    began = time.process_time()
    with started_engine(args.engine, args.model, max_running=args.requests, kv_tokens=8192) as engine:
        figures = {"start": time.process_time() - began}
        began = time.process_time()
        weights = list(build_model(args.model, torch.float32, "cpu").named_parameters())
        before = time.process_time()
        engine.load(weights, version=1)
        figures["load"] = time.process_time() - before
        for name, seed in (("warm", 0), ("tokens", 1)):
            for i in range(args.requests):
                prompt = array("i", range(100 + 97 * i + seed, 164 + 97 * i + seed))
                engine.add(Request(f"{name}{i}", prompt, args.tokens, 1.0, seed=i))
            began, count = time.process_time(), 0
            while engine.num_unfinished:
                count += sum(len(completion.token_ids) for completion in engine.step())
            figures[f"{name}_per_cpu_second"] = count / (time.process_time() - began)
        figures["peak_rss_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"engine": args.engine} | {name: round(value, 2) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
