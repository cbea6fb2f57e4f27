"""(b) CPU-seconds until a held-out score of 0.8: TRL's and ours, side by side and interleaved.

    python -m bench.to_score --ranks 2 --engine native --target 0.8 --seed 0 1 2 --json b.json --svg b.svg

Both train on the same prompts in the same order (`work.py`), a step each in turn. After every `--eval-every` steps a
contestant writes its weights and stays at the gate while this process judges them: one engine (ours, native), the same
held-out prompts, noise and rewarder for both. Counted are the CPU-seconds of a contestant's own steps, the first
included; start, export and judging are not. `--steps` is where a contestant that does not get there is given up.
"""

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bench import show, work
from bench.gate import Contestant
from spmd_rl.base.targets import build_target
from spmd_rl.config import RlvrConfig
from spmd_rl.data import Prompts
from spmd_rl.data.seeds import counter_seed
from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.module import empty_module
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.types import AnswerInfo, Prompt, Request


class Judge:
    """The mean score of a policy's sampled answers to the held-out prompts."""

    def __init__(self, cfg: RlvrConfig) -> None:
        self._cfg = cfg
        module = empty_module(cfg.policy.model, torch.bfloat16)
        self._engine = NativeEngine(module, cfg.engine.max_running, cfg.engine.kv_tokens)
        self._tokenizer = load_tokenizer(cfg.policy.model)
        self._prompts = Prompts.load(cfg.data).eval[: cfg.eval.prompts]
        ((self._domain, reward),) = cfg.reward.domains.items()
        self._rewarder = build_target(f"reward.{self._domain}", reward.target, reward.args)
        self._num_judged = 0

    def score(self, weights: Path) -> float:
        """Of the weights in a safetensors file; the noise is the same every time."""
        self._num_judged += 1
        self._engine.load(load_file(weights).items(), self._num_judged)
        asked = {request.id: prompt for request, prompt in self._requests()}
        scores = []
        while self._engine.num_unfinished:
            for done in self._engine.step():
                info = AnswerInfo(len(done.token_ids), done.finish_reason)
                answer = self._tokenizer.decode(done.token_ids)
                scores.append(self._rewarder.score(asked[done.id], answer, info).score)
        return statistics.fmean(scores)

    def _requests(self) -> Iterator[tuple[Request, Prompt]]:
        cfg = self._cfg
        for prompt in self._prompts:
            ids = self._tokenizer.render(prompt.messages)
            for answer in range(cfg.eval.answers):
                request = Request(
                    id=f"{prompt.id}/{answer}",
                    prompt_ids=ids,
                    max_new_tokens=cfg.rollout.max_new_tokens,
                    temperature=cfg.rollout.temperature,
                    seed=counter_seed(cfg.seed, "bench", prompt.id, answer),
                    stop_ids=self._tokenizer.stop_ids,
                )
                self._engine.add(request)
                yield request, prompt


def race(options: Any, seed: int) -> dict[str, Any]:
    """Both from the same start to the target; per side the points (steps done, CPU-seconds, held-out score)."""
    folder = options.dir / f"to_score-{options.ranks}-{options.engine}-{seed}"
    work.fresh(folder)
    chosen = [f"engine={options.engine}", *options.settings]
    overrides = work.settings(chosen, seed, options.steps + 1, folder / "run")
    cfg = work.loaded(overrides)
    judge = Judge(cfg)
    with (
        work.trl("trl", cfg, options.ranks, folder, options.trl_python, options.trl) as trl,
        work.ours("ours", overrides, options.ranks, folder) as ours,
    ):
        trl.wait()
        ours.wait()
        ours.step()  # step 0, which only evaluates
        running = [trl, ours]
        cpu = {side.name: 0.0 for side in running}
        points: dict[str, list[list[float]]] = {side.name: [] for side in running}
        rewards: dict[str, list[float]] = {side.name: [] for side in running}
        for step in range(options.steps + 1):
            for side in list(running):
                if step:
                    timed = side.step()
                    cpu[side.name] += timed.cpu_seconds
                    rewards[side.name].append(timed.values.get(work.SCORE[side.name], float("nan")))
                if step % options.eval_every == 0:
                    points[side.name].append([step, cpu[side.name], _judged(side, judge, folder)])
                    print(f"{side.name:5} step {step:2}  {cpu[side.name]:7.1f} CPU-s  ", end="", flush=True)
                    print(f"held out {points[side.name][-1][2]:.3f}", flush=True)
                    if points[side.name][-1][2] >= options.target:
                        running.remove(side)
    reached = {name: done[-1][1] if done[-1][2] >= options.target else None for name, done in points.items()}
    return {"seed": seed, "points": points, "training_reward": rewards, "cpu_seconds": reached}


def _judged(side: Contestant, judge: Judge, folder: Path) -> float:
    path = folder / f"{side.name}.safetensors"
    side.export(path)
    return judge.score(path)


def main() -> None:
    parser = work.parser(__doc__, steps=24)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--engine", default="native")
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--eval-every", type=int, default=1)
    work.add_trl(parser)
    options = parser.parse_args()
    races = []
    for seed in options.seed:
        races.append(race(options, seed))
        show.record(options.json, {"benchmark": "to_score", "target": options.target, "races": races})
    rows = []
    for done in races:
        told = [str(done["seed"])]
        for name in ("trl", "ours"):
            steps, _, score = done["points"][name][-1]
            seconds = done["cpu_seconds"][name]
            told += [f"{steps:.0f}", f"{score:.3f}", "not reached" if seconds is None else f"{seconds:.0f}"]
        trl, mine = done["cpu_seconds"]["trl"], done["cpu_seconds"]["ours"]
        rows.append([*told, f"{mine / trl:.2f}" if mine and trl else "-"])
    columns = ["seed"]
    for name in ("TRL", "ours"):
        columns += [f"{name}: steps", "score", "CPU-s"]
    show.table(f"CPU-seconds to a held-out score of {options.target}", [*columns, "ours / TRL"], rows)
    drawn = [
        show.Series(label, color, [(cpu, score) for _, cpu, score in done["points"][name]])
        for done in races
        for name, label, color in (("trl", "TRL", show.COLORS[0]), ("ours", f"ours, {options.engine}", show.COLORS[1]))
    ]
    show.lines(options.svg, "Held-out score by CPU-seconds of training", "CPU-seconds", "mean held-out score", drawn)


if __name__ == "__main__":
    sys.exit(main())
