"""Answers that have to parse: how many do, what masks cost, how far the trainer's logprobs are from the engine's.

    python -m bench.constrained answers native --model ~/.cache/spmd_rl/models/smollm2-135m-instruct
    python -m bench.constrained steps +experiment=demo steps=2 rollout.constraint.json_schema=schema.json ...

`answers`: 100 at temperature 1 for each of three constraints. `steps`: a run of `spmd_rl.rlvr` in this process with
these settings; of its CPU-seconds, what went into masks, by who asked for them. In CPU-seconds, as machines are shared.
"""

import argparse
import json
import runpy
import sys
import time
from collections import Counter
from collections.abc import Callable

import torch

from spmd_rl.engine.native import engine as native
from spmd_rl.model.build import build_model
from spmd_rl.model.constraint import Constraint, constraint_of
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.types import Message, Request
from tests.engines import started_engine
from tests.unit.test_constraint import CASES
from tests.unit.test_engine_parity import drain


def answers(engine: str, model: str, count: int, most: int) -> None:
    tokenizer = load_tokenizer(model)
    prompt = tokenizer.render([Message("user", "Name a thing, its size and its tags.")])
    for case, (settings, parses) in CASES.items():
        with started_engine(engine, model, max_running=count, kv_tokens=count * 256, constraint=settings) as one:
            one.load(build_model(model, torch.float32, "cpu").named_parameters(), 0)
            for i in range(count):
                one.add(Request(str(i), prompt, most, 1.0, i, stop_ids=tokenizer.stop_ids))
            done = drain(one).values()
        reasons = Counter(completion.finish_reason for completion in done)
        whole = [tokenizer.decode(one.token_ids) for one in done if one.finish_reason == "stop"]
        token_ids = [completion.token_ids.tolist() for completion in done]
        began = time.process_time()
        allowed = constraint_of(settings, model, False).replay(token_ids)
        seconds, num_tokens = time.process_time() - began, len(allowed.index)
        figures = {"parse": sum(map(_whole(parses), whole)), "cut off": reasons["length"], "tokens": num_tokens}
        print(case, json.dumps(figures | {"us_a_token": 1e6 * seconds / num_tokens, "masks": len(allowed.words)}))


def _whole(parses: Callable[[str], bool]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        try:
            return parses(text)
        except ValueError:
            return False

    return check


def steps(settings: list[str]) -> None:
    spent: Counter[str] = Counter()

    def timed(name: str, function: Callable) -> Callable:
        def call(*args: object) -> object:
            began = time.process_time()
            found = function(*args)
            spent[name] += time.process_time() - began
            spent[f"{name}: calls"] += 1
            return found

        return call

    native.cut_off = timed("native engine", native.cut_off)
    Constraint.replay = timed("trainer", Constraint.replay)
    sys.argv, began = ["rlvr", *settings], time.process_time()
    try:
        runpy.run_module("spmd_rl.rlvr", run_name="__main__", alter_sys=True)
    finally:
        print(json.dumps({"whole run": time.process_time() - began, **spent}))


def main() -> None:
    if sys.argv[1:2] == ["steps"]:
        steps(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["answers"])
    parser.add_argument("engine", choices=["native", "vllm", "sglang"])
    parser.add_argument("--model", required=True, help="a model directory")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=100)
    args = parser.parse_args()
    answers(args.engine, args.model, args.count, args.tokens)


if __name__ == "__main__":
    main()
