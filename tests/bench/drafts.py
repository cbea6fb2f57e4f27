"""Drafts of an engine: answers with and without, in steps and in CPU-seconds.

    python -m tests.bench.drafts agent 16 --model ~/.cache/spmd_rl/models/smollm2-135m-instruct --drafts 0 4

agent: turns on frozen lakes, four answers to each, of a line of thought and a move; problems: of reasoning-gym's
`gsm_symbolic`, four answers to each. The number: of answers side by side. CPU-seconds of this process, since machines
are shared; prompts are computed before the clock starts, but for an agent's later turns.
"""

import argparse
import json
import time
from collections.abc import Callable

import reasoning_gym
import torch

from envs.frozen_lake import FrozenLake
from spmd_rl.engine.base import Engine
from spmd_rl.model.build import build_model
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.types import Completion, Message, Request
from tests.engines import started_engine

GROUP = 4
NUM_TURNS = 3
SHOTS = [
    ("The goal is 2 down and 1 right.", "Thought: the goal is 2 down and 1 right, so I go down.\nAction: down"),
    ("The goal is 1 down and 1 right.", "Thought: the goal is 1 down and 1 right, so I go down.\nAction: down"),
    ("The goal is 0 down and 1 right.", "Thought: the goal is 0 down and 1 right, so I go right.\nAction: right"),
]
Texts = dict[tuple[int, int], list[Message]]


def agent(num: int) -> Texts:
    """The first turn of each answer; all answers to one task see the same lake."""
    shots = [Message(role, text) for pair in SHOTS for role, text in zip(("user", "assistant"), pair, strict=True)]
    texts = {}
    for ticket in range(num // GROUP):
        lake = FrozenLake(size=4, is_slippery=False, min_path=2, observation="relative")
        seen, _ = lake.reset(ticket)
        for answer in range(GROUP):
            texts[ticket, answer] = [*shots, Message("user", seen)]
    return texts


def problems(num: int) -> Texts:
    """One turn of each answer."""
    rows = reasoning_gym.create_dataset("gsm_symbolic", size=num // GROUP, seed=0)
    return {(n // GROUP, n % GROUP): [Message("user", rows[n // GROUP]["question"])] for n in range(num)}


WORKLOADS: dict[str, tuple[Callable[[int], Texts], int, int]] = {
    "agent": (agent, NUM_TURNS, 32),
    "problems": (problems, 1, 48),
}


def play(
    engine: Engine, tokenizer, texts: Texts, num_turns: int, num_tokens: int
) -> tuple[dict[str, Completion], int, float]:
    """All turns, each of which waits for all others: the completions, steps and CPU-seconds."""
    done, num_steps, seconds = {}, 0, 0.0
    for turn in range(num_turns):
        for (ticket, answer), messages in texts.items():
            name, seed = f"{ticket}/{answer}/{turn}", ticket << 20 | answer << 10 | turn
            prompt = tokenizer.render(messages)
            engine.add(Request(name, prompt, num_tokens, 1.0, seed, (ticket, answer, turn), tokenizer.stop_ids))
        began = time.process_time()
        if turn == 0:
            engine.step()
            began = time.process_time()
        while engine.num_unfinished:
            done |= {completion.id: completion for completion in engine.step()}
            num_steps += 1
        seconds += time.process_time() - began
        for (ticket, answer), messages in texts.items():
            text = tokenizer.decode(done[f"{ticket}/{answer}/{turn}"].token_ids)
            messages += [Message("assistant", text), Message("user", messages[-1].text)]
    return done, num_steps, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("num", type=int)
    parser.add_argument("--model", required=True, help="a model directory")
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--engine", default="native")
    args = parser.parse_args()
    torch.set_num_threads(1)
    make, num_turns, num_tokens = WORKLOADS[args.workload]
    tokenizer, plain = load_tokenizer(args.model), None
    weights = list(build_model(args.model, getattr(torch, args.dtype), "cpu").named_parameters())
    for drafts in args.drafts:
        sizes = {"max_running": args.num, "kv_tokens": 1024 * args.num}
        with started_engine(args.engine, args.model, args.dtype, drafts=drafts, **sizes) as engine:
            engine.load(weights, version=1)
            done, num_steps, seconds = play(engine, tokenizer, make(args.num), num_turns, num_tokens)
        plain = plain or done
        count, counts = sum(len(one.token_ids) for one in done.values()), engine.token_counts
        figures = {
            "engine": args.engine, "workload": args.workload, "num": args.num, "drafts": drafts, "dtype": args.dtype,
            "tokens": count, "steps": num_steps,
            "cpu_seconds": round(seconds, 2), "per_cpu_second": round(count / seconds, 2),
            "verified": counts.verified, "accepted": counts.accepted,
            "same_tokens": all(one.token_ids == plain[id].token_ids for id, one in done.items()), "same": done == plain,
        }  # fmt: skip
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
