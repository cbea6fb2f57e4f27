"""On-policy distillation against supervised tuning on a teacher's answers, at equal tokens: reverse KL to the teacher.

    python -m bench.distillation --seeds 3 --steps 40 --out figures.json

A small teacher learns a random walk over letters (SFT). A smaller student, warmed up on the same walk for a few steps,
then learns from the teacher in three ways, each of as many steps of as many samples: its own samples with the
teacher's distribution (rlvr with `teacher`), the teacher's samples (sft), and these with its distribution (sft with
`teacher`). Measured on the student's own samples: KL(student || teacher), exact, in nats a token; beside it their
score, the share of them that are walks, and how many tokens were learnt.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.show import mean_and_range, record, table
from tests.models import tiny

ROOT = Path(__file__).resolve().parents[1]
LENGTH, SAMPLES = 6, 64
"""Letters of a walk, and samples of a step."""
ARMS = ("student", "on policy", "sft", "off policy", "teacher")
MEASURED = {
    "kl": "KL(student || teacher) on the student's samples, nats a token",
    "score": "Share of the student's samples that are walks",
    "tokens": "Tokens learnt",
}


def walk(number: int, draw: random.Random) -> str:
    """Letters from one that the prompt gives, each 0, 1 or 2 further than the one before."""
    place, letters = number % 10, []
    for _ in range(LENGTH):
        letters.append("abcdefghij"[place])
        place = (place + draw.choices((0, 1, 2), (0.15, 0.6, 0.25))[0]) % 10
    return "".join(letters)


def is_walk(prompt: str, answer: str) -> bool:
    places = ["abcdefghij".find(letter) for letter in answer]
    steps = [(after - before) % 10 for before, after in zip(places, places[1:], strict=False)]
    return len(places) == LENGTH and min(places) >= 0 and places[0] == int(prompt) % 10 and max(steps) <= 2


def rows(path: Path, pairs: list[tuple[str, str]]) -> Path:
    path.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in pairs if c))
    return path


def run(door: str, folder: Path, *settings: str) -> Path:
    """Run a pipeline to its end; the model that it made."""
    common = [f"run.dir={folder}", "policy.dtype=float32", "eval.every=0", "checkpoint.every=0", "data.holdout=0"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(f"{folder}.out", "w") as out:
        ended = subprocess.run([sys.executable, "-m", f"spmd_rl.{door}", *common, *settings], env=env, stderr=out)
    assert not ended.returncode, Path(f"{folder}.out").read_text()[-2000:]
    return max(folder.glob("checkpoints/step-*/hf"))


def answers(folder: Path, count: int, seed: int) -> list[tuple[str, str]]:
    """So many sampled answers of a model to each of a hundred prompts."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    found = []
    for number in range(100):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": str(number)}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=False,
        )
        new = model.generate(ids.repeat(count, 1), do_sample=True, top_k=0, max_new_tokens=LENGTH + 4)[
            :, ids.shape[1] :
        ]
        found += [(str(number), text) for text in tokenizer.batch_decode(new, skip_special_tokens=True)]
    return found


def reverse_kl(student: Path, teacher: Path, pairs: list[tuple[str, str]]) -> float:
    """Mean over the tokens of the student's answers, the end of the turn included."""
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (student, teacher)]
    tokenizer, total, count = AutoTokenizer.from_pretrained(teacher), 0.0, 0
    for prompt, answer in pairs:
        head = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        ids = [
            *head,
            *tokenizer.encode(answer, add_special_tokens=False),
            tokenizer.convert_tokens_to_ids("<|im_end|>"),
        ]
        with torch.no_grad():
            s, t = (F.log_softmax(m(torch.tensor([ids])).logits[0, len(head) - 1 : -1], -1) for m in models)
        total, count = total + float((s.exp() * (s - t)).sum()), count + len(s)
    return total / count


def measure(model: Path, teacher: Path, seed: int) -> dict[str, float]:
    """What `MEASURED` names; `model` is a run's."""
    pairs, lines = answers(model, 4, seed), (model.parents[2] / "metrics.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines) if "system/tps" in step]
    score = sum(is_walk(*pair) for pair in pairs) / len(pairs)
    tokens = sum(round(step["system/tps"] * step["time/total"]) for step in steps)
    return {"kl": reverse_kl(model, teacher, pairs), "score": score, "tokens": tokens}


def one_seed(place: Path, seed: int, steps: int) -> dict[str, dict[str, float]]:
    draw = random.Random(seed)
    truth = rows(place / "truth.jsonl", [(str(n % 100), walk(n % 100, draw)) for n in range(12800)])
    prompts = place / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": str(n), "ground_truth": "", "domain": "toy"}) + "\n" for n in range(100))
    )
    large, small = (
        tiny("llama", place / "large", seed=seed),
        tiny("llama", place / "small", seed=seed + 9, hidden_size=32),
    )
    sft = (f"data.rows_per_step={SAMPLES}", f"seed={seed}", "policy.max_grad_norm=1")
    teacher = run(
        "sft", place / "teacher", *sft, f"policy.model={large}", f"data.train={truth}", "steps=200", "policy.lr=3e-3"
    )
    warm = run(
        "sft", place / "warm", *sft, f"policy.model={small}", f"data.train={truth}", "steps=60", "policy.lr=3e-3"
    )
    shown = rows(place / "shown.jsonl", answers(teacher, -(-steps * SAMPLES // 100), seed))
    learns = (f"policy.model={warm}", "policy.lr=1e-3", f"steps={steps}", f"seed={seed}", "policy.max_grad_norm=1")
    rl = (f"data.train={prompts}", "reward.toy.target=tests.e2e.toy_reward:ParityReward", f"teacher.model={teacher}")
    size = ("rollout.prompts_per_step=16", "rollout.answers_per_prompt=4", f"rollout.max_new_tokens={LENGTH + 4}")
    made = {
        "student": warm,
        "on policy": run("rlvr", place / "on", *learns, *rl, *size),
        "sft": run("sft", place / "sft", *learns, f"data.train={shown}", f"data.rows_per_step={SAMPLES}"),
        "off policy": run(
            "sft", place / "off", *learns, f"data.train={shown}", f"data.rows_per_step={SAMPLES}",
            f"teacher.model={teacher}", "teacher.loss=forward_kl",
        ),
        "teacher": teacher,
    }  # fmt: skip
    return {arm: measure(folder, teacher, seed + 100) for arm, folder in made.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found = []
    for seed in range(asked.seeds):
        with tempfile.TemporaryDirectory() as place:
            found.append(one_seed(Path(place), seed, asked.steps))
            print(seed, found[-1], flush=True)
    for name, title in MEASURED.items():
        values = {arm: [one[arm][name] for one in found] for arm in ARMS}
        table(
            f"{title}; {asked.steps} steps of {SAMPLES} samples",
            ["", "mean (range)", *(f"seed {seed}" for seed in range(asked.seeds))],
            [[arm, mean_and_range(values[arm], ".4f"), *(f"{value:.4f}" for value in values[arm])] for arm in ARMS],
        )
    record(asked.out, {"seeds": found})


if __name__ == "__main__":
    main()
