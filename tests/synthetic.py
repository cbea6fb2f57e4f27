"""A run directory as a real run leaves it, made up: input of the report and of comparisons in tests and by hand.

python -m tests.synthetic DIR [NUM_STEPS]
"""

import math
import random
import sys
from pathlib import Path

import msgspec
import yaml

from spmd_rl.track.samples import SampleRow, TurnRow
from spmd_rl.types import Message

PHASES = {
    "generate": 6.0,
    "score": 0.2,
    "prepare": 0.15,
    "update": 4.5,
    "publish": 0.3,
    "save": 0.0,
    "coordination": 0.1,
}


def make_run(directory: Path, num_steps: int = 12, num_ranks: int = 2, seed: int = 0) -> Path:
    """Write config.yaml, metrics.jsonl, journal/ and the samples of the last step."""
    rng = random.Random(seed)
    (directory / "samples").mkdir(parents=True)
    (directory / "journal").mkdir()
    settings = {
        "seed": seed,
        "steps": num_steps,
        "run": {"name": "smollm2-135m-grpo-1f0c", "dir": str(directory)},
        "policy": {"model": "~/.cache/spmd_rl/models/smollm2-135m-instruct", "dtype": "bfloat16", "lr": 2e-5},
        "about": {"pipeline": "rlvr", "git_revision": "0123456789abcdef", "versions": {"torch": "2.13.0+cpu"}},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    lines = [metrics(step, num_steps, rng) for step in range(num_steps + 1)]
    (directory / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    for rank in range(num_ranks):
        events = journal(num_steps, random.Random(f"{seed} {rank}"), rank, num_ranks)
        (directory / "journal" / f"rank-{rank}.jsonl").write_bytes(
            b"".join(msgspec.json.encode(e) + b"\n" for e in events)
        )
    rows = [sample(ticket, answer, rng) for ticket in range(8) for answer in range(8)]
    path = directory / "samples" / f"step-{num_steps:06d}.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return directory


def metrics(step: int, num_steps: int, rng: random.Random) -> dict[str, float]:
    """One line; step 0 has the evaluation alone."""
    done = 1 / (1 + math.exp(-8 * (step / num_steps - 0.35)))
    line: dict[str, float] = {"step": step}
    if step % max(1, num_steps // 6) == 0:
        line |= {"val/score/mean": 0.19 + 0.66 * done + rng.gauss(0, 0.01), "val/score_greedy/mean": 0.81 + 0.14 * done}
    if step == 0:
        return line | {"time/eval": 9.1, "time/other": 0.02, "time/total": 9.12, "system/overhead": 0.001}
    times = {phase: seconds * rng.uniform(0.85, 1.15) for phase, seconds in PHASES.items()}
    times["checkpoint"] = 1.4 if step % 4 == 0 else 0.0
    times["train"] = times.pop("update")
    del times["save"]
    total = sum(times.values()) + 0.03
    return line | {
        "critic/score/mean": min(1, max(0, 0.2 + 0.65 * done + rng.gauss(0, 0.04))),
        "actor/pg_loss": rng.gauss(0, 0.01),
        "actor/grad_norm": 0.6 + rng.random() * 0.5,
        "actor/entropy": 1.9 - 1.4 * done + rng.gauss(0, 0.05),
        "rollout/response_length/mean": 7.5 - 4 * done + rng.gauss(0, 0.2),
        "rollout/bubble": 0.2 + rng.random() * 0.1,
        "train_infer/abs_diff/mean": 0.011 + rng.random() * 0.004,
        **{f"time/{phase}": seconds for phase, seconds in times.items()},
        "time/other": 0.03,
        "time/total": total,
        "system/tps": 5200 / total,
        "system/overhead": times["coordination"] / total,
    }


def journal(num_steps: int, rng: random.Random, rank: int, num_ranks: int) -> list[dict]:
    """Events of one rank: nested phases, collectives, the start."""
    now = 1.7e9
    events = [{"t": now, "event": "start", "step": 0, "rank": rank}]
    command = "torchrun --nproc-per-node 2 -m spmd_rl.rlvr run.name=demo policy.lr=2e-5"
    events.append(
        {
            "t": now,
            "event": "run",
            "step": 0,
            "command": command,
            "machine": "2 x Intel Xeon, 24 GiB",
            "ranks": num_ranks,
        }
    )
    for step in range(1, num_steps + 1):
        events.append({"t": now, "event": "step", "step": step})
        for phase, seconds in PHASES.items():
            events.append({"t": now, "event": "enter", "phase": phase, "step": step})
            if phase == "publish":
                events.append({"t": now, "event": "kind", "kind": "copy", "step": step})
            now += seconds * rng.uniform(0.9, 1.1)
            if phase == "publish":
                events.append({"t": now, "event": "kind_done", "step": step})
            events.append({"t": now, "event": "enter", "phase": "coordination", "step": step})
            events.append(
                {"t": now, "event": "collective", "phase": "coordination", "name": "x", "kind": "wait", "step": step}
            )
            now += rng.random() * 0.3
            events.append({"t": now, "event": "collective_done", "phase": "coordination", "name": "x", "step": step})
            events.append({"t": now, "event": "exit", "phase": "coordination", "step": step})
            events.append({"t": now, "event": "exit", "phase": phase, "step": step})
    return events


def sample(ticket: int, answer: int, rng: random.Random) -> SampleRow:
    """A row of `samples/`."""
    a, b = rng.randrange(10), rng.randrange(10)
    right = rng.random() < 0.7
    text = f"{a + b if right else rng.choice([a * b, a - b])}"
    return SampleRow(
        ticket=ticket,
        answer=answer,
        id=f"{ticket:032x}",
        domain="arithmetic",
        messages=[Message("user", f"State the final answer to the following: {a} + {b} = <b>?</b>")],
        ground_truth=f"{a + b}",
        turns=[TurnRow(text, [9, ticket, answer], [33, 2], [-0.2, -0.1], [3, 3], "stop")],
        verdict={"status": "ok", "score": float(right), "parts": {}},
        advantage=0.6 if right else -1.4,
        kept=True,
        reject_reason=None,
    )


if __name__ == "__main__":
    print(make_run(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 12))
