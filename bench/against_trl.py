"""(a) Our step against TRL's: samples per CPU-second, side by side and interleaved.

    python -m bench.against_trl --ranks 1 2 --engines native vllm --seed 0 1 2 --json a.json --svg a.svg

For every number of ranks and engine, TRL and our door are started together and then compute their steps in turn, each
waiting at the gate while the other works; who goes first changes from step to step. Same prompts in the same order,
same number of answers, token limit, dtype, threads, seed, learning rate and loss (`work.py`, `trl_side.py`).

What comes before the first step is left out on both sides alike (imports, loading, our first publish and our reward
processes), and so is the first step, in which both touch their memory for the first time. All else is in: generation,
scoring, logging, and with us publishing and the log of all samples.

At once in memory: in float32 (a CPU without bfloat16) 13 GiB of TRL's, which computes the whole step as one
micro-batch, and 5 of ours.
"""

import statistics
import sys
from collections.abc import Sequence
from typing import Any

from bench import show, work
from bench.gate import Contestant, Timed


def in_turn(one: Contestant, other: Contestant, steps: int) -> dict[str, list[Timed]]:
    """`steps` timed steps of each after one that is not."""
    timed: dict[str, list[Timed]] = {one.name: [], other.name: []}
    for number in range(steps + 1):
        for side in (one, other) if number % 2 else (other, one):
            timed[side.name].append(side.step())
    return {name: done[1:] for name, done in timed.items()}


def compare(options: Any, ranks: int, engine: str, seed: int) -> dict[str, Any]:
    """One pair, from start to end."""
    folder = options.dir / f"against_trl-{ranks}-{engine}-{seed}"
    work.fresh(folder)
    chosen = [f"engine={engine}", *options.settings]
    overrides = work.settings(chosen, seed, options.steps + 2, folder / "run")
    cfg = work.loaded(overrides)
    with (
        work.trl("trl", cfg, ranks, folder, options.trl_python, options.trl) as trl,
        work.ours("ours", overrides, ranks, folder) as ours,
    ):
        trl.wait()
        ours.wait()
        ours.step()  # step 0, which only evaluates
        timed = in_turn(trl, ours, options.steps)
        peak = {side.name: side.peak_bytes() for side in (trl, ours)}
    row: dict[str, Any] = {"ranks": ranks, "engine": engine, "seed": seed, "samples": work.num_samples(cfg)}
    for name, steps in timed.items():
        row[name] = {
            "cpu_seconds": [step.cpu_seconds for step in steps],
            "seconds": [step.seconds for step in steps],
            "score": [step.values.get(work.SCORE[name]) for step in steps],
            "answer_tokens": [step.values.get(work.TOKENS[name]) for step in steps],
            "peak_bytes": peak[name],
            "values": [step.values for step in steps],
        }
    return row


def rate(row: dict[str, Any], side: str) -> float:
    """Samples per CPU-second over all timed steps."""
    cpu = row[side]["cpu_seconds"]
    return row["samples"] * len(cpu) / sum(cpu)


def lines(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Two lines of the table: TRL and ours in the runs of one pair, over all seeds."""
    ranks, engine = rows[0]["ranks"], rows[0]["engine"]
    out = []
    for side, name in (("trl", f"TRL, {ranks} rank(s)"), ("ours", f"ours, {engine}, {ranks} rank(s)")):
        out.append(
            [
                name,
                show.mean_and_range([statistics.fmean(row[side]["cpu_seconds"]) for row in rows]),
                show.mean_and_range([statistics.fmean(row[side]["seconds"]) for row in rows]),
                show.mean_and_range([rate(row, side) for row in rows]),
                show.mean_and_range([rate(row, side) / rate(row, "trl") for row in rows]),
                show.mean_and_range([statistics.fmean(row[side]["answer_tokens"]) for row in rows], ".1f"),
                f"{max(row[side]['peak_bytes'] for row in rows) / 2**30:.1f}",
            ]
        )
    return out


def main() -> None:
    parser = work.parser(__doc__, steps=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--engines", nargs="+", default=["native", "vllm"])
    work.add_trl(parser)
    options = parser.parse_args()
    pairs: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for seed in options.seed:
        for ranks in options.ranks:
            for engine in options.engines:
                row = compare(options, ranks, engine, seed)
                pairs.setdefault((ranks, engine), []).append(row)
                print(*("  ".join(line) for line in lines([row])), sep="\n", flush=True)
                show.record(options.json, {"benchmark": "against_trl", "rows": [r for p in pairs.values() for r in p]})
    columns = ("", "CPU-s a step", "s a step", "samples/CPU-s", "x TRL", "tokens an answer", "GiB")
    show.table("Our step against TRL's", columns, [line for rows in pairs.values() for line in lines(rows)])
    drawn = []
    for (ranks, engine), rows in pairs.items():
        ratio = statistics.fmean(rate(row, "ours") / rate(row, "trl") for row in rows)
        drawn.append(show.Bar(f"TRL, {ranks} rank(s)", [("TRL", statistics.fmean(rate(row, "trl") for row in rows))]))
        mine = [("ours", statistics.fmean(rate(row, "ours") for row in rows))]
        drawn.append(show.Bar(f"ours, {engine}, {ranks} rank(s)", mine, f"({ratio:.1f} x)"))
    show.bars(options.svg, "Our step against TRL's", "samples per CPU-second", drawn)


if __name__ == "__main__":
    sys.exit(main())
