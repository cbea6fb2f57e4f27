"""Supervised fine-tuning against TRL's SFTTrainer: unpadded tokens per CPU-second, step by step in turns.

    python -m bench.sft --data ../shared/data/gsm8k/train.jsonl --steps 12 --json sft.json

Both train the same rows of GSM8K in the same order, from the same tokens and masks, and both say their loss on the same
held-out rows before the first step and after the last. These two steps are left out of the timing: TRL's evaluation is
ours, and neither side's is what is compared.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from bench import show, work
from bench.gate import Contestant
from spmd_rl.config import SftConfig
from spmd_rl.config.load import load
from spmd_rl.data import Examples
from spmd_rl.model.tokenizer import load_tokenizer

KEYS = ("data.keys.prompt=question", "data.keys.completion=answer")


def tokens(examples: Any, tokenizer: Any, numbers: list[int]) -> list[dict]:
    """Rows as TRL takes tokenized ones."""
    rows = []
    for number in numbers:
        pieces = tokenizer.pieces(examples[number].conversations[0])
        ids = [id for pair in pieces for part in pair for id in part]
        mask = [int(learnt) for given, answer in pieces for learnt in [*[False] * len(given), *[True] * len(answer)]]
        rows.append({"input_ids": ids, "completion_mask": mask})
    return rows


def main() -> None:
    made = work.parser(__doc__, steps=12)
    work.add_trl(made)
    made.add_argument("--data", default="../shared/data/gsm8k/train.jsonl")
    made.add_argument("--attention", default="sdpa", help="TRL's: sdpa or eager")
    options = made.parse_args()
    rows = []
    for seed in options.seed:
        folder, steps = options.dir / f"sft-{seed}", options.steps + 2
        work.fresh(folder)
        given = [f"data.train={Path(options.data).resolve()}", *KEYS, "data.rows_per_step=8", "data.holdout=0.02"]
        given += ["policy.lr=1e-5", "eval.rows=32", f"eval.every={steps}", "checkpoint.every=0", work.PATIENT]
        given += [f"seed={seed}", f"steps={steps + 1}", f"run.dir={folder / 'run'}", *options.settings]
        cfg = load("sft", SftConfig, given)
        examples, tokenizer = Examples.load(cfg.data, cfg.row_kind), load_tokenizer(cfg.policy.model)
        size = cfg.data.rows_per_step
        order = [examples.train.at(place, seed)[1] for place in range(steps * size)]
        task = {
            "directory": str(folder / "trl"), "model": str(Path(cfg.policy.model).expanduser()), "dtype": "bfloat16",
            "attention": options.attention, "steps": steps, "rows_per_step": size, "lr": cfg.policy.lr,
            "rows": tokens(examples.train, tokenizer, order),
            "eval": tokens(examples.eval, tokenizer, list(range(cfg.eval.rows))),
        }  # fmt: skip
        (folder / "trl.json").write_text(json.dumps(task))
        sizes = [len(row["input_ids"]) for row in task["rows"]]
        per_step = [sum(sizes[begin : begin + size]) for begin in range(0, len(sizes), size)]
        env = work.environment(1) | {"SPMD_RL_BENCH_PIPELINE": "sft"}
        theirs = [str(options.trl_python), "-m", "bench.trl_sft", str(folder / "trl.json")]
        ours = [sys.executable, "-m", "bench.our_side", *given]
        with (
            Contestant.start("trl", theirs, env, 1, folder) as trl,
            Contestant.start("ours", ours, env, 1, folder) as own,
        ):
            before = {"trl": trl.wait()["val/loss"]}
            own.wait()
            before["ours"] = own.step().values["val/loss"]  # step 0, which only evaluates
            found = {"trl": [], "ours": []}
            for number in range(steps):
                for side in (trl, own) if number % 2 else (own, trl):
                    found[side.name].append(side.step())
        timed = {name: done[1:-1] for name, done in found.items()}
        row = {"seed": seed, "tokens": per_step[1:-1]}
        for name, done in timed.items():
            row[name] = {
                "tokens_per_cpu_second": sum(row["tokens"]) / sum(step.cpu_seconds for step in done),
                "cpu_seconds": [step.cpu_seconds for step in done],
                "val": [before[name], found[name][-1].values["val/loss"]],
                "loss": [step.values.get("loss", step.values.get("sft/loss")) for step in found[name]],
            }
        row["ratio"] = row["ours"]["tokens_per_cpu_second"] / row["trl"]["tokens_per_cpu_second"]
        rows.append(row)
        print(json.dumps({key: row[key] for key in ("seed", "ratio")} | {n: row[n]["val"] for n in timed}), flush=True)
    cells = [
        [str(r["seed"]), *(f"{r[n]['tokens_per_cpu_second']:.1f}" for n in ("trl", "ours")), f"{r['ratio']:.2f}"]
        for r in rows
    ]
    show.table("Unpadded tokens per CPU-second", ["seed", "TRL", "ours", "ratio"], cells)
    print("mean ratio", statistics.fmean(r["ratio"] for r in rows))
    if options.json:
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
