"""A mixed run: sums, small programs and short texts in exact shares, each domain with its own rewarder and curve.

    python -m bench.mixed --steps 10 --svg docs/mixed.svg

The demo's model, `data.mix={math: 0.4, code: 0.3, general: 0.3}`, ten prompts a step: of every ten tickets four are
sums (math-verify), three ask for a function of one line (its tests run in the sandbox), three for a word. Left out:
problems worth solving; this shows the mixing.
"""

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

from bench import show, work
from spmd_rl.track.metrics import read_lines

DOMAINS = ("math", "code", "general")
MIX = {"math": 0.4, "code": 0.3, "general": 0.3}
FUNCTIONS = {
    "add {n} to x": "x + {n}",
    "multiply x by {n}": "x * {n}",
    "subtract {n} from x": "x - {n}",
    "return whether x is greater than {n}": "x > {n}",
}
WORDS = ("apple", "bridge", "candle", "cloud", "forest", "garden", "mountain", "ocean", "paper", "pencil", "river")


def rows(seed: int = 0, count: int = 150) -> list[dict]:
    """Problems of the three domains."""
    draw = random.Random(seed)
    made: list[dict] = []
    for _ in range(count):
        a, b = draw.randint(1, 20), draw.randint(1, 9)
        text = f"What is {a} + {b}? Answer with the number only."
        made.append({"domain": "math", "prompt": text, "ground_truth": str(a + b)})
        task, body = draw.choice(sorted(FUNCTIONS.items()))
        n = draw.randint(2, 99)
        cases = [f"assert f({x}) == ({body.format(n=n).replace('x', str(x))})" for x in (1, 7, 50, 99)]
        text = f"Write a Python function f(x) to {task.format(n=n)}. Answer with one short ```python code block."
        code = {"case_type": "assert", "test_cases": [{"assert_code": case, "entry_point": "f"} for case in cases]}
        made.append({"domain": "code", "prompt": text, "ground_truth": "", **code})
        one, two = draw.sample(WORDS, 2)
        text = f"Which of these two words comes first in the alphabet: {one} or {two}? Answer with that word only."
        made.append({"domain": "general", "prompt": text, "ground_truth": min(one, two)})
    return made


def settings(data: Path, run_dir: Path, steps: int, seed: int) -> list[str]:
    """Overrides of the demo."""
    return [
        "+experiment=demo",
        "data=jsonl_math",
        f"data.train={data}",
        "data.format='{question}'",
        "data.mix={" + ",".join(f"{domain}:{share}" for domain, share in MIX.items()) + "}",
        "reward.code.target=rewards.code:CodeReward",
        "reward.code.timeout=20",
        "reward.code.workers=2",
        "reward.general.target=rewards.general:GeneralReward",
        "rollout.prompts_per_step=10",
        "rollout.over_sample=0",
        "rollout.filter.zero_variance=false",
        "rollout.max_new_tokens=48",
        "eval.every=5",
        "eval.prompts=30",
        "eval.answers=2",
        f"steps={steps}",
        f"seed={seed}",
        f"run.dir={run_dir}",
    ]


def main() -> None:
    """One run; a table and a picture."""
    options = work.parser(__doc__ or "", steps=10)
    options.add_argument("--ranks", type=int, default=2)
    args = options.parse_args()
    folder = (args.dir / "mixed").resolve()
    work.fresh(folder)
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    run_dir = folder / "run"
    chosen = [*settings(data, run_dir, args.steps, args.seed[0]), *args.settings]
    door = [*work.launcher(sys.executable, args.ranks), "-m", "spmd_rl.rlvr", *chosen]
    subprocess.run(door, env=work.environment(args.ranks) | {"PATH": "/usr/bin:/bin"}, cwd=work.ROOT, check=True)
    tickets: dict[int, str] = {}
    for path in sorted((run_dir / "samples").glob("step-*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            tickets[row["ticket"]] = row["domain"]
    lines = list(read_lines(run_dir / "metrics.jsonl"))
    print("tickets by domain:", dict(Counter(tickets.values())), "of", len(tickets))
    worst = max(
        abs(sum(tickets[t] == domain for t in range(n)) - share * n)
        for n in range(1, len(tickets) + 1)
        for domain, share in MIX.items()
    )
    print(f"farthest from its share in any prefix: {worst:.2f} tickets")
    drawn = {domain: curves(lines, domain) for domain in DOMAINS}
    rows_ = [[d, *(", ".join(f"{y:.2f}" for _, y in one.points) for one in drawn[d])] for d in DOMAINS]
    show.table("Scores by domain", ["domain", "training, by step", "held-out, when evaluated"], rows_)
    show.panels(args.svg, "One run, three domains", "mean score", drawn)


def curves(lines: list[dict], domain: str) -> list[show.Series]:
    """Training and held-out score of one domain."""
    found = {"training": f"score/{domain}/mean", "held-out": f"val/{domain}/score/mean"}
    points = {name: [(line["step"], line[key]) for line in lines if key in line] for name, key in found.items()}
    colors = {"training": show.COLORS[2], "held-out": show.COLORS[0]}
    return [show.Series(name, colors[name], points[name]) for name in found]


if __name__ == "__main__":
    main()
